"""Settings become a request and a cluster, or an error that says what is wrong with them."""

import inspect
import random
from pathlib import Path
from typing import Any

import pytest

import frugal
from frugal.cli.options import collect, read_settings
from frugal.config.adapters import Lora
from frugal.config.hardware import cluster as cards
from frugal.config.hardware.context import NCCL_PCIE
from frugal.config.optimizers import Optimizer
from frugal.config.run_settings import SAMPLE_NAMES
from frugal.config.schema import (
    PLAN_SETTINGS,
    SETTINGS,
    TRAIN_SETTINGS,
    in_full,
    merged,
    requested,
    settings_of_toml,
    understand,
)
from frugal.errors import RequestError
from frugal.units import GIB


def test_nodes_are_equal_and_their_gpus_may_differ() -> None:
    _, cluster, _ = understand({"gpus": 4, "mem": "12G", "nodes": 2})
    assert (cluster.world_size, len(cluster.nodes)) == (8, 2)
    _, cluster, _ = understand({"gpu": "a100-40g,h100-80g", "nodes": 2})
    assert [device.name for device in cluster.devices] == ["a100-40g", "h100-80g"] * 2
    assert cluster.devices[0].matrix_flops < cluster.devices[1].matrix_flops
    assert cluster.intra_bandwidth == cards.CARDS["a100-40g"].link_bandwidth


@pytest.mark.parametrize("memory", ["12G-1G,24G", ["12G-1G", 24 * GIB], [f"{12 * GIB}-{GIB}", "24G"]])
def test_what_others_hold_of_a_gpu_is_not_planned_with(memory: Any) -> None:
    first, second = understand({"mem": memory})[1].devices
    assert (first.memory_bytes, first.held_bytes, second.held_bytes) == (12 * GIB, GIB, 0)
    assert understand({"mem": "12G,24G"})[1].devices[0].usable_bytes - first.usable_bytes == GIB


def test_context_and_margin_come_off_a_gpu_and_not_off_a_cpu_rank() -> None:
    (gpu,) = understand({"gpus": 1, "mem": "12G"})[1].devices
    (rank,) = understand({"gpus": 1, "mem": "12G", "device": "cpu"})[1].devices
    assert gpu.usable_bytes == 12 * GIB - gpu.context_bytes - gpu.margin_bytes
    assert rank.usable_bytes == 12 * GIB


def test_the_margin_is_what_may_come_on_top() -> None:
    (card,) = understand({"gpus": 1, "gpu": "rtx3060-12g"})[1].devices
    share = cards.ALLOCATOR_SHARE + cards.KERNELS_SHARE
    assert card.margin_bytes == card.context_above_bytes + cards.ALLOCATOR_BYTES + int(card.memory_bytes * share)
    (box,) = understand({"gpus": 1, "mem": "12G"})[1].devices
    share = cards.ALLOCATOR_SHARE + cards.UNKNOWN_KERNELS_SHARE + cards.NOMINAL_SHARE
    more = box.context_above_bytes + cards.ALLOCATOR_BYTES + int(12 * GIB * share)
    assert box.margin_bytes == more, "a driver reports less than the box"


def test_a_gpu_of_which_only_the_memory_is_known_has_the_context_of_the_largest_card_of_that_memory() -> None:
    (unknown,) = understand({"gpus": 1, "mem": "12G"})[1].devices
    known = [understand({"gpus": 1, "gpu": name, "precision": "fp32"})[1].devices[0] for name in cards.CARDS]
    small = [device.context_bytes for device in known if device.memory_bytes <= 12 * GIB]
    assert unknown.context_bytes == max(small) < max(device.context_bytes for device in known)


def test_several_gpus_also_hold_nccl_buffers_over_nvlink_more_of_them() -> None:
    def added(**settings: Any) -> int:
        one, eight = (understand(settings | {"gpus": gpus})[1].devices[0].context_bytes for gpus in (1, 8))
        return eight - one

    assert added(mem="12G") == NCCL_PCIE.planned
    assert added(gpu="a100-80g") > 4 * added(gpu="l40s-48g")


def test_a_known_card_brings_its_memory_and_speed() -> None:
    _, cluster, _ = understand({"gpus": 8, "gpu": "a100-80g"})
    device = cluster.devices[0]
    assert device.matrix_flops == pytest.approx(312e12 * cards.MATRIX_SHARE)
    assert device.memory_bandwidth == pytest.approx(2039e9 * cards.MEMORY_SHARE)
    assert 79 * GIB < device.memory_bytes < 80 * GIB
    assert cluster.intra_bandwidth == 240e9


@pytest.mark.parametrize(
    ("driver_name", "gib", "card"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.15, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("NVIDIA GeForce RTX 3060", 11.76, "rtx3060-12g"),
        ("NVIDIA L4", 22.0, "l4-24g"),
        ("NVIDIA H200", 139.8, "h200-141g"),
        ("NVIDIA GeForce GTX 1080", 8.0, None),
        ("Tesla T4", 14.56, "t4-16g"),
        ("Tesla V100-SXM2-32GB", 31.74, "v100-32g"),
        ("NVIDIA RTX A6000", 47.5, "a6000-48g"),
        ("NVIDIA GH200 480GB", 94.5, "gh200-96g"),
    ],
)
def test_cards_are_recognised_by_the_drivers_name(driver_name: str, gib: float, card: str | None) -> None:
    assert cards.recognise_card(driver_name, int(gib * GIB)) == card


def test_defaults_are_the_fields_nobody_set() -> None:
    _, _, defaults = understand({"gpus": 1, "mem": "12G", "model": "gpt2", "seq_len": 512})
    assert "model" not in defaults and "seq_len" not in defaults
    assert {"global_batch", "precision", "optimizer", "learning_rate"} <= set(defaults)
    assert "micro_batch" not in defaults, "nothing to tell: frugal decides it"
    assert "global_batch" not in understand({"gpus": 1, "mem": "12G", "global_tokens": 4096})[2]


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown name": ({"gpuss": 4}, "unknown setting `gpuss`", "did you mean `gpus`?"),
    "a name like no other": ({"xyz": 4}, "unknown setting `xyz`", "frugal plan --help"),
    "no number": ({"gpus": "four"}, "`gpus` is 'four'", "a whole number"),
    "a part of a sample": ({"global_batch": "1.0005k"}, "`global_batch` is '1.0005k'", "a whole number"),
    "true as a number": ({"gpus": True}, "`gpus` is True", "a whole number"),
    "no such choice": ({"precision": "fp8"}, "`precision` is 'fp8'", "one of bf16, fp16, fp32"),
    "no GPUs": ({"gpus": 0, "mem": "12G"}, "--gpus is 0", "at least 1"),
    "no memory": ({"gpus": 4}, "the memory of a GPU is not known", "add --mem 12G"),
    "no GPUs at all": ({}, "the memory of a GPU is not known", "add --gpus 4 --mem 12G"),
    "no number of GPUs": ({"mem": "12G"}, "the number of GPUs is not known", "add --gpus 4"),
    "amounts of another number": (
        {"gpus": 3, "mem": "12G,24G"}, "--gpus 3 does not go with 2 values of --mem", "one for each",
    ),
    "cards of another number": (
        {"gpus": 3, "gpu": "a100-40g,a100-80g"}, "--gpus 3 does not go with 2 values of --gpu", "one for each",
    ),
    "memory without unit": ({"gpus": 4, "mem": "12"}, "`12` has no unit", "12G is 12 GiB"),
    "memory below the context": (
        {"gpus": 4, "mem": "700M"}, "700.0 MiB is less than a cuda device needs", "context takes 508.0 MiB",
    ),
    "a card of two sizes": ({"gpus": 1, "gpu": "a100"}, "--gpu a100 is no known card", "a100-40g or a100-80g,"),
    "a card without its maker's word": ({"gpus": 1, "gpu": "4090"}, "--gpu 4090 is no known card", "--gpu rtx4090-24g"),
    "a card as it is printed": ({"gpus": 1, "gpu": "RTX 3090"}, "--gpu RTX 3090 is no known card", "--gpu rtx3090-24g"),
    "a card in capitals": ({"gpus": 1, "gpu": "A100"}, "--gpu A100 is no known card", "a100-40g or a100-80g,"),
    "an unknown card": ({"gpus": 1, "gpu": "a100-80"}, "--gpu a100-80 is no known card", "--gpu a100-80g"),
    "a negative batch": ({"gpus": 1, "mem": "12G", "global_batch": -4}, "--global-batch is -4", "leave --global-batch"),
    "a token target below one sample": (
        {"gpus": 1, "mem": "12G", "global_tokens": 100}, "--global-tokens 100 is less than one sample", "1024 tokens",
    ),
    "bf16 without ZeRO": (
        {"gpus": 1, "mem": "12G", "zero_stage": 0}, "--precision bf16 with --zero-stage 0", "use --zero-stage 2",
    ),
    "offload against the stage": (
        {"gpus": 1, "mem": "12G", "zero_stage": 2, "offload": "all"},
        "--offload all is impossible with --zero-stage 2", "it needs ZeRO stage 3",
    ),
    "no share": (
        {"gpus": 1, "mem": "12G", "offload": "optimizer:half"}, "`offload` is 'optimizer:half'", "optimizer:0.5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said(case: str) -> None:
    settings, what, why = BAD[case]
    with pytest.raises(RequestError) as caught:
        understand(settings)
    assert caught.value.what.startswith(what) and why in str(caught.value)
    assert caught.value.exit_code == 2


def test_there_are_at_most_70_settings_and_every_one_is_a_flag_or_a_key_of_frugal_toml() -> None:
    from frugal.cli.train import command

    flags = {parameter.name for parameter in command.params} - {
        "config", "overrides", "plan_path", "ranks", "printed", "preview", "help_all",
    }  # fmt: skip
    assert flags == {name for name, row in SETTINGS.items() if row.is_flag}
    assert len(SETTINGS) <= 70
    for row in PLAN_SETTINGS.values():
        row.read(row.default)
    for name in TRAIN_SETTINGS:
        with pytest.raises(RequestError, match=f"`{name}` in \\[train\\] of frugal.toml is"):
            settings_of_toml({"train": {name: object()}}, [])


def test_planning_commands_have_the_flags_of_planning() -> None:
    from frugal.cli import dryrun, explain, plan

    of_plan = {name for name, row in PLAN_SETTINGS.items() if row.is_flag}
    for command in (plan.command, explain.command, dryrun.command):
        assert of_plan <= {parameter.name for parameter in command.params}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.beta3=1", "--optimizer knows no `beta3` in --set"),
        ("optimizer.momentum=much", "`momentum` of --optimizer is much in --set"),
        ("optimizer.betas=[0.9, 0.99]", "`betas` of --optimizer is torch's name in --set"),
        ("optimizer=7", "`optimizer` in --set is 7"),
        ("schedule=step", "`name` of --schedule is step in [train] of --set"),
        ("schedule.min-lr=1", "`min_lr` of --schedule is other trainers' name in [train] of --set"),
        ("nic=eth0", "`nic` in --set is frugal's former name"),
        ("beta2", "--set beta2 sets nothing"),
    ],
)
def test_a_wrong_override_is_refused(override: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        settings_of_toml({}, [override])
    assert caught.value.what == said


def test_one_flag_pins_the_mode_of_each_layer_and_one_the_share_in_host_memory() -> None:
    request = requested({"activation_checkpointing": "full:0-1,off:2", "offload": "optimizer:0.5"})[0]
    assert (str(request.layer_modes), request.activation_checkpointing) == ("full:0-1,off:2", "auto")
    assert (request.offload, request.offload_ratio) == ("optimizer", 0.5)


@pytest.mark.parametrize("where", ["nvme", "auto"])
def test_one_flag_names_the_disk_to_offload_to(where: str) -> None:
    request = requested({"offload": f"{where}:/local/a:b"})[0]
    assert (request.offload, request.nvme_path, request.offload_ratio) == (where, "/local/a:b", None)


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        ("nvme", "--offload nvme was given without a folder"), ("nvme:", "`offload` is 'nvme:'"),
        ("all:/scratch", "`offload` is 'all:/scratch'"), ("none:0.5", "`offload` is 'none:0.5'"),
        ("disk:/scratch", "`offload` is 'disk:/scratch'"), ("optimizer:", "`offload` is 'optimizer:'"),
    ],
)  # fmt: skip
def test_what_is_no_place_to_offload_to_is_refused(offload: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        requested({"offload": offload})
    assert caught.value.what == said


def test_every_setting_says_what_it_is_for_in_a_sentence() -> None:
    for row in SETTINGS.values():
        assert row.help.endswith(".") and row.help[0] != " ", row.name
        assert row.choices or row.kind.must_be


@pytest.mark.parametrize("card", ["t4-16g", "v100-16g", "v100-32g", "rtx2080ti-11g"])
def test_a_card_without_bf16_is_refused_with_a_way_out_that_works(card: str) -> None:
    with pytest.raises(RequestError) as caught:
        understand({"gpus": 1, "gpu": card})
    assert caught.value.what == f"--gpu {card} cannot train in bf16"
    assert caught.value.hint == "use --precision fp16, or --precision fp32"
    half, single = (
        understand({"gpus": 1, "gpu": card, "precision": precision})[1].devices[0] for precision in ("fp16", "fp32")
    )
    assert half.matrix_flops > 3 * single.matrix_flops


@pytest.mark.parametrize("card", cards.CARDS)
def test_a_card_s_numbers_are_of_the_right_size(card: str) -> None:
    known = cards.CARDS[card]
    assert 0.88 < known.memory_bytes / GIB / float(card.split("-")[1].removesuffix("g")) <= 1.0
    assert 1.9 < known.half_flops / known.fp32_flops < 31
    assert known.host_link_bandwidth <= known.memory_bandwidth / 10
    assert known.link_bandwidth >= min(cards.PCIE.values())


def test_one_override_leaves_the_rest_of_the_file_as_it_is() -> None:
    """`--set optimizer.beta2` beside `optimizer = "adamw-8bit"` would otherwise train with another optimizer."""
    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"optimizer": "adamw-8bit"}, "optimizer.beta2=0.9", {"optimizer": {"name": "adamw-8bit", "beta2": 0.9}}),
        ({"optimizer": {"name": "adamw", "beta2": 0.9}}, "optimizer=adamw-8bit",
         {"optimizer": {"name": "adamw-8bit", "beta2": 0.9}}),
        ({"optimizer": {"eps": 1e-6}}, "optimizer.epsilon=1e-7", {"optimizer": {"epsilon": 1e-7}}),
        ({"schedule": {"min-lr-ratio": 0.1}}, "schedule=linear", {"schedule": {"name": "linear", "min_lr_ratio": 0.1}}),
        ({"schedule": {"warmup": 5}}, "train.warmup=7", {"schedule": {}, "warmup": 7}),
        ({"lora": {"r": 8}}, "lora.dropout=0.1", {"lora": {"r": 8, "dropout": 0.1}}),
        ({"train": {"epochs": 3}}, "train.steps=7", {"steps": 7}),
    ]  # fmt: skip
    for content, override, expected in cases:
        assert settings_of_toml(content, [override]) == expected


@pytest.mark.parametrize("seed", range(20))
def test_of_several_layers_the_last_that_says_a_key_wins(seed: int) -> None:
    """A table is put together key by key, in whichever form a layer has it; other settings are taken whole."""
    draw = random.Random(seed)
    values = {"beta1": (0.8, 0.9), "beta2": (0.95, 0.99), "epsilon": (1e-6, 1e-7), "decay-norms": (True, False)}
    layers: list[dict[str, Any]] = []
    expected: dict[str, Any] = {}
    for _ in range(4):
        said = {key: draw.choice(each) for key, each in values.items() if draw.random() < 0.5}
        expected |= {key.replace("-", "_"): value for key, value in said.items()}
        text = ",".join(["adamw", *(f"{key}={str(value).lower()}" for key, value in said.items())])
        form = draw.choice((said, text, {key.replace("-", "_"): value for key, value in said.items()}))
        layers.append({"optimizer": form, "gpus": draw.choice((None, 1, 2)), "lora": None})
        expected |= {"name": "adamw"} if form is text else {}
    made = merged(*layers)
    gpus = [layer["gpus"] for layer in layers if layer["gpus"] is not None]
    assert made == {"optimizer": expected} | ({"gpus": gpus[-1]} if gpus else {})
    assert requested({"optimizer": made["optimizer"]})[0].optimizer == Optimizer(**expected)


def test_a_flag_wins_over_the_file_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "frugal.toml"
    file.write_text('gpus = 1\nmem = "12G"\n[optimizer]\nname = "sgd"\ndecay-norms = true\n[lora]\nr = 8\nalpha = 9\n')
    flags = {"optimizer": "adamw,eps=1e-6", "lora": "r=4", "config": file}
    request = collect(read_settings(flags))[0]
    assert request.optimizer == Optimizer(name="adamw", epsilon=1e-6)
    assert request.lora == Lora(rank=4, alpha=9)


# The keyword arguments of `frugal.plan`.


def test_a_notebook_completes_every_setting() -> None:
    parameters = inspect.signature(frugal.plan).parameters
    assert set(parameters) == {"objective", "draft", *PLAN_SETTINGS, *SAMPLE_NAMES}
    assert parameters["seq_len"].default == PLAN_SETTINGS["seq_len"].default


def test_lr_is_the_learning_rate() -> None:
    assert in_full({"lr": 0.1, "gpus": 1}) == {"learning_rate": 0.1, "gpus": 1}


def test_a_number_without_a_unit_is_no_memory() -> None:
    with pytest.raises(RequestError) as raised:
        frugal.plan(model="gpt2", gpus=4, mem=12)
    assert str(raised.value) == (
        '12 is an amount of memory in bytes, and hardly meant so\n\nhint: write it with its unit: "12G"'
    )
