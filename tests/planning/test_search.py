"""The search takes the fastest strategy that fits, prefers the simple one, and proves it where none fits."""

from pathlib import Path
from typing import Any

import pytest

from frugal.errors import NothingFitsError, RequestError
from frugal.planner import make_plan
from frugal.planning.choice import Choice, Nothing
from frugal.planning.plan import Plan
from frugal.planning.search import Search
from frugal.planning.settings import understand
from frugal.units import GIB
from tests.planning.synthetic import SyntheticSource, rehearsing

SMALL = {"parameters": 124_000_000, "flops_per_token": 8e8, "num_operators": 2500}


def plan(*, error: float = 1.0, model: dict[str, Any] | None = None, **settings: Any) -> Plan:
    return make_plan(*understand(settings), rehearse=rehearsing(error, **(model or {})))


def test_four_cards_of_12_gib_train_gpt2_without_any_other_setting() -> None:
    made = plan(gpus=4, mem="12G", model=SMALL | {"bytes_per_token": 1_000_000})
    assert (made.batch.global_batch, made.batch.micro_batch, made.batch.accumulation_steps) == (
        512,
        (10, 10, 10, 10),
        13,
    )
    assert made.strategy.zero_stage == 2
    assert made.strategy.activation_checkpointing == "off"
    assert made.memory.fits


def test_activation_checkpointing_is_switched_on_when_one_sample_does_not_fit_without() -> None:
    made = plan(gpus=4, mem="6G", offload="none")
    assert made.strategy.activation_checkpointing == "full"
    assert made.why[0] == "activation checkpointing is on: one sample does not fit (237.4 MiB short) without it"


def test_activation_checkpointing_is_switched_on_when_it_pays() -> None:
    made = plan(gpus=4, mem="6G", offload="optimizer")
    assert made.strategy.activation_checkpointing == "full"
    assert made.why[0].startswith("activation checkpointing is on: without it micro-batch ")


@pytest.mark.parametrize("choice", ["off", "selective", "full", "offloaded"])
def test_pinned_activation_checkpointing_is_kept(choice: str) -> None:
    made = plan(gpus=4, mem="24G", activation_checkpointing=choice)
    assert made.strategy.activation_checkpointing == choice
    assert made.why[0].endswith("as asked")


def test_a_model_that_cannot_recompute_is_planned_without() -> None:
    made = plan(gpus=4, mem="24G", model={"can_recompute": False})
    assert {made.strategy.activation_checkpointing} | {r.strategy.activation_checkpointing for r in made.rejected} == {
        "off"
    }


LARGE_VOCABULARY = SMALL | {"bytes_per_token": 500_000, "logits_bytes_per_token": 1_500_000, "can_tile": True}


def test_the_loss_is_tiled_when_that_makes_room_for_larger_micro_batches() -> None:
    made = plan(gpus=4, mem="12G", model=LARGE_VOCABULARY)
    assert made.strategy.loss == "tiled"
    assert made.batch.largest_cell == 15
    assert made.why[1].startswith("the loss is tiled: with whole logits micro-batch 5 fits instead of 15")


def test_the_loss_stays_plain_where_tiling_gains_nothing() -> None:
    made = plan(gpus=4, mem="12G", global_batch=4, model=LARGE_VOCABULARY)
    assert made.strategy.loss == "plain"


def test_a_model_whose_rehearsal_refuses_the_tiled_loss_is_planned_without() -> None:
    made = plan(gpus=4, mem="12G", model=LARGE_VOCABULARY | {"changes_logits": True})
    assert {made.strategy.loss} | {rejected.strategy.loss for rejected in made.rejected} == {"plain"}
    with pytest.raises(RequestError, match="cannot take the tiled loss"):
        plan(gpus=4, mem="12G", loss="tiled", model=LARGE_VOCABULARY | {"changes_logits": True})


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("gpus", [1, 4])
def test_half_precision_takes_stages_that_sum_gradients_in_fp32(gpus: int, precision: str) -> None:
    made = plan(gpus=gpus, mem="80G", precision=precision)
    assert made.strategy.zero_stage in (2, 3)
    assert made.strategy.gradient_accumulation_dtype == "fp32"
    assert {rejected.strategy.zero_stage for rejected in made.rejected} <= {2, 3}


def test_one_gpu_in_fp32_needs_no_zero() -> None:
    assert plan(gpus=1, mem="80G", precision="fp32").strategy.zero_stage == 0


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_pinned_stage_is_kept(zero_stage: int) -> None:
    assert plan(gpus=2, mem="80G", precision="fp32", zero_stage=zero_stage).strategy.zero_stage == zero_stage


def test_nothing_is_offloaded_unless_nothing_fits_without() -> None:
    assert plan(gpus=4, mem="8G").strategy.offload_optimizer == "none"
    made = plan(gpus=4, mem="4G")
    assert made.strategy.offload_optimizer == "cpu"
    assert made.why[2] == (
        "the optimizer lives in host memory: one sample does not fit (at least 1.18 GiB short) on the GPUs alone"
    )


def test_offload_beyond_the_host_is_refused() -> None:
    with pytest.raises(NothingFitsError) as caught:
        plan(gpus=4, mem="4G", offload="optimizer", host_mem="8G")
    assert str(caught.value) == (
        "gpt2 does not fit into a node's host memory\n"
        "  because with the optimizer in host memory ZeRO-2 lacks 6.90 GiB on the host, ZeRO-3 6.90 GiB on the host\n"
        "  because the nearest of 8 strategies is ZeRO-2, activation checkpointing off, optimizer in host memory, "
        "with 1 sample of 1024 tokens\n"
        "  because it takes 3.60 GiB: parameters 1.86 GiB, activations 976.6 MiB, context 768.0 MiB, "
        "communication 38.1 MiB\n"
        "  because each node's host needs 14.90 GiB beside it\n"
        "\n"
        "hint: this would fit: --host-mem 15G, or --nodes 2"
    )


def test_equally_fast_strategies_go_to_the_simplest() -> None:
    made = plan(gpus=2, mem="80G", precision="fp32", global_batch=64, model=SMALL)
    assert made.strategy.num_mechanisms == 0


def test_prefer_simple_gives_up_at_most_a_quarter_for_fewer_mechanisms() -> None:
    fast = plan(gpus=4, mem="24G", model=LARGE_VOCABULARY | {"bytes_per_token": 1_000_000})
    simple = plan(gpus=4, mem="24G", prefer="simple", model=LARGE_VOCABULARY | {"bytes_per_token": 1_000_000})
    assert simple.strategy.num_mechanisms < fast.strategy.num_mechanisms
    assert fast.time.total_seconds * 1.02 < simple.time.total_seconds <= fast.time.total_seconds * 1.25
    assert simple.why[-2].startswith(f"--prefer simple: the fastest, {fast.strategy}, takes ")
    taken = next(rejected for rejected in simple.rejected if rejected.strategy == fast.strategy)
    assert taken.reason == "not faster by 25 %, and less simple"


def test_prefer_simple_leaves_what_is_more_than_a_quarter_slower_and_keeps_pins() -> None:
    settings: dict[str, Any] = {
        "gpus": 4,
        "mem": "6G",
        "prefer": "simple",
        "model": SMALL | {"bytes_per_token": 4_000_000},
    }
    made = plan(**settings)
    assert made.strategy.activation_checkpointing == "full", "without it a step takes 1.8 times as long"
    assert "--prefer simple changes nothing: no simpler strategy takes at most 25 % longer" in made.why
    assert plan(zero_stage=3, **settings).strategy.zero_stage == 3


def test_even_cells_win_over_a_slightly_larger_micro_batch() -> None:
    made = plan(gpus=4, mem="24G", model=SMALL)
    assert made.batch.is_uniform


def test_a_batch_that_does_not_divide_is_still_exact() -> None:
    made = plan(gpus=4, mem="12G", global_batch=500, model=SMALL)
    assert sum(map(sum, made.batch.cells)) == 500
    assert made.batch.capacity > 500


def test_cards_that_differ_only_in_memory_take_as_much_as_the_smallest_where_that_is_fastest() -> None:
    made = plan(gpu="a100-80g", mem="12G,24G,24G", global_batch=100, model=SMALL)
    assert (made.batch.micro_batch, made.batch.accumulation_steps) == ((9, 9, 9), 4)
    assert sum(map(sum, made.batch.cells)) == 100


def test_cards_of_another_speed_take_samples_in_proportion_and_are_done_together() -> None:
    made = plan(
        gpu="rtx3060-12g,rtx4090-24g", mem="23G,24G", global_batch=100, model=SMALL | {"bytes_per_token": 10_000}
    )
    slow, fast = (sum(cells) for cells in made.batch.cells)
    assert slow + fast == 100
    assert fast / slow == pytest.approx(165 / 25.5, rel=0.05)
    seconds = [max(c) / d.matrix_flops for c, d in zip(made.batch.cells, made.cluster.devices, strict=True)]
    assert min(seconds) > 0.9 * max(seconds)


def test_a_fast_card_takes_no_more_than_it_holds() -> None:
    made = plan(gpu="rtx3060-12g,rtx4090-24g", mem="24G,12G", global_batch=100, model=SMALL)
    alone = plan(
        gpu="rtx4090-24g", mem="12G", gpus=2, global_batch=100, micro_batch=made.batch.micro_batch[1], model=SMALL
    )
    assert alone.memory.fits
    assert made.batch.micro_batch[0] < made.batch.micro_batch[1]
    assert sum(map(sum, made.batch.cells)) == 100


HOSTS = """
big slots=4    # mem=24G host-mem=64G
small slots=2  # mem=24G host-mem={}
"""


def test_each_node_is_held_against_its_own_ranks_and_host(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    wanted: dict[str, Any] = {
        "hostfile": str(hosts),
        "mem": "4G",
        "offload": "optimizer",
        "model": {"parameters": 10**9},
    }
    hosts.write_text(HOSTS.format("8G"))
    made = plan(**wanted)
    assert made.memory.host_bytes_per_node > 8 * GIB, "that is of four ranks, the small node has two"
    hosts.write_text(HOSTS.format("4G"))
    with pytest.raises(NothingFitsError) as caught:
        plan(**wanted)
    assert "because the host of 2 GPUs that has 4.00 GiB needs 4.97 GiB beside it" in str(caught.value)


def test_cpu_ranks_share_their_host() -> None:
    budget: dict[str, Any] = {"gpus": 2, "device": "cpu", "mem": "20G", "model": SMALL}
    assert plan(**budget, host_mem="64G").memory.fits
    with pytest.raises(NothingFitsError) as caught:
        plan(**budget, host_mem="3G")
    assert "does not fit into a node's host memory" in str(caught.value)
    assert "2 such ranks and their processes take" in str(caught.value)


def test_what_lives_on_disk_must_fit_there() -> None:
    wanted: dict[str, Any] = {"gpus": 2, "mem": "24G", "offload": "nvme", "nvme_path": "/scratch"}
    made = plan(**wanted, host_disk="100G")
    assert made.strategy.offload_optimizer == "nvme"
    assert not any("--host-disk" in note for note in made.warnings)
    with pytest.raises(NothingFitsError) as caught:
        plan(**wanted, host_disk="10G")
    assert str(caught.value).startswith("gpt2 does not fit into the disk of a node\n")


def test_what_could_not_be_checked_is_said() -> None:
    made = plan(gpus=2, mem="4G", offload="optimizer")
    assert made.warnings == ("each host must have 14.90 GiB of memory free; give --host-mem to have that checked",)
    made = plan(gpus=2, mem="24G", offload="nvme", nvme_path="/scratch")
    assert made.warnings[1] == "each node must have 14.90 GiB of disk free; give --host-disk to have that checked"


def test_what_others_hold_is_taken_off_and_said() -> None:
    made = plan(gpus=2, mem="24G", held=[0, 3 * GIB], model=SMALL)
    assert made.cluster.devices[0].usable_bytes - made.cluster.devices[1].usable_bytes == 3 * GIB
    assert "GPU 1: 3.00 GiB are held by other processes" in made.warnings


def test_caps_in_samples_and_tokens_bind() -> None:
    assert max(plan(gpus=4, mem="80G", max_samples_per_gpu=4, model=SMALL).batch.micro_batch) == 4
    made = plan(gpus=4, mem="80G", max_tokens_per_gpu=3000, model=SMALL)
    assert max(made.batch.micro_batch) == 2
    assert made.why[-1] == "--max-tokens-per-gpu binds: it allows 2 samples at once"


def test_pinned_micro_batch_and_steps_are_kept() -> None:
    made = plan(gpus=4, mem="80G", micro_batch=4, accumulation_steps=32, model=SMALL)
    assert (set(made.batch.micro_batch), made.batch.accumulation_steps) == ({4}, 32)
    assert plan(gpus=4, mem="80G", accumulation_steps=100, model=SMALL).batch.accumulation_steps == 100


def test_a_token_target_is_never_exceeded() -> None:
    made = plan(gpus=4, mem="24G", global_tokens=100_000, global_batch=7, model=SMALL)
    assert made.batch.global_batch == 97
    assert made.batch.global_tokens == 100_000
    assert made.warnings[0] == (
        "--global-tokens and --global-batch were both given: tokens win, 100000 tokens are 97 samples of 1024"
    )


def test_a_micro_batch_that_is_never_full_is_told() -> None:
    made = plan(gpus=4, mem="24G", micro_batch=16, global_batch=32, model=SMALL)
    assert made.warnings == ("--micro-batch 16 is never full: no GPU gets more than 8 samples at once",)


def test_a_profile_that_promises_too_much_is_found_out_and_the_choice_made_again() -> None:
    honest, corrected = plan(gpus=4, mem="12G", model=SMALL), plan(gpus=4, mem="12G", error=1.5, model=SMALL)
    assert max(corrected.batch.micro_batch) < max(honest.batch.micro_batch)
    assert corrected.memory.fits
    assert "it does not fit, and was not chosen" in corrected.warnings[0]


def test_a_profile_that_is_off_but_fits_is_told() -> None:
    made = plan(gpus=4, mem="12G", error=0.9, model=SMALL)
    assert made.warnings[0].endswith("off the rehearsal; it still fits")


def test_the_prediction_in_the_plan_is_the_rehearsed_one() -> None:
    assert plan(gpus=4, mem="12G", error=0.9, model=SMALL).memory.activations < (
        plan(gpus=4, mem="12G", model=SMALL).memory.activations
    )


def test_strategies_that_cannot_win_are_not_profiled() -> None:
    request, cluster, _ = understand({"gpus": 4, "mem": "80G", "precision": "fp32"})
    source = SyntheticSource(request, cluster, SMALL)
    Search(request, cluster, source).run()
    assert len(set(source.profiled)) < 8


def test_activation_checkpointing_is_not_tried_where_the_states_alone_are_too_much() -> None:
    request, cluster, _ = understand({"gpus": 4, "mem": "4G"})
    source = SyntheticSource(request, cluster)
    found = Search(request, cluster, source).run()
    assert isinstance(found, Choice)
    hopeless = [rejected for rejected in found.rejected if rejected.reason.startswith("cannot fit")]
    assert {rejected.strategy.activation_checkpointing for rejected in hopeless} == {"full", "selective", "offloaded"}
    assert not {rejected.strategy for rejected in hopeless} & set(source.profiled)


def test_the_nearest_option_of_a_proof_is_really_the_nearest() -> None:
    request, cluster, _ = understand({"gpus": 4, "mem": "4G", "offload": "none"})
    found = Search(request, cluster, SyntheticSource(request, cluster)).run()
    assert isinstance(found, Nothing)
    assert found.nearest.strategy.activation_checkpointing == "offloaded"
    assert found.nearest.strategy.zero_stage == 3
    assert found.num_strategies == 8


def test_a_cpu_rank_offloads_nothing_because_it_is_the_host() -> None:
    with pytest.raises(NothingFitsError, match=r"does not fit into a CPU rank of 2\.00 GiB"):
        plan(gpus=2, mem="2G", device="cpu")


def test_buckets_never_exceed_the_model() -> None:
    made = plan(gpus=4, mem="12G", model=SMALL | {"parameters": 1_000_000})
    assert made.strategy.reduce_bucket_elements == 1_000_000
    assert plan(gpus=4, mem="12G", model=SMALL).strategy.reduce_bucket_elements == 20_000_000


def test_a_thousand_gpus_are_as_many_profiles_as_eight() -> None:
    def profiled(nodes: int) -> int:
        request, cluster, _ = understand({"gpus": 8, "nodes": nodes, "mem": "24G", "global_batch": 16384})
        source = SyntheticSource(request, cluster, SMALL)
        assert isinstance(Search(request, cluster, source).run(), Choice)
        return len(source.profiled)

    assert profiled(128) <= profiled(1)


def test_nothing_fits_is_told_as_a_proof() -> None:
    with pytest.raises(NothingFitsError) as caught:
        plan(gpus=1, mem="12G", offload="none", precision="fp32")
    assert str(caught.value) == (
        "gpt2 does not fit into a GPU of 12.00 GiB\n"
        "  because on the GPU alone ZeRO-0 lacks 5.95 GiB\n"
        "  because the nearest of 4 strategies is ZeRO-0, activation checkpointing offloaded, with 1 sample of 1024 "
        "tokens\n"
        "  because it takes 17.35 GiB: optimizer 11.18 GiB, gradients 3.73 GiB, parameters 1.86 GiB, "
        "context 512.0 MiB\n"
        "  because 614.4 MiB stay free as margin\n"
        "\n"
        "hint: this would fit: --offload auto, or --mem 18.5G, or --gpus 2"
    )


@pytest.mark.parametrize(
    ("settings", "flag", "relaxed"),
    [
        ({"gpus": 1, "mem": "12G", "offload": "none"}, "--offload auto", {"offload": "auto"}),
        ({"gpus": 1, "mem": "12G", "offload": "none"}, "--mem 18.5G", {"mem": "18.5G"}),
        ({"gpus": 1, "mem": "12G", "offload": "none"}, "--gpus 2", {"gpus": 2}),
        ({"gpus": 4, "mem": "24G", "seq_len": 32768, "activation_checkpointing": "off"},
         "--activation-checkpointing auto", {"activation_checkpointing": "auto"}),
        ({"gpus": 4, "mem": "24G", "seq_len": 32768, "activation_checkpointing": "selective"},
         "--activation-checkpointing auto", {"activation_checkpointing": "auto"}),
        ({"gpus": 4, "mem": "24G", "seq_len": 32768, "activation_checkpointing": "off"},
         "--seq-len 16384", {"seq_len": 16384}),
        ({"gpus": 4, "mem": "12G", "micro_batch": 512, "global_batch": 2048, "offload": "none"}, "no --micro-batch",
         {"micro_batch": None}),
        ({"gpus": 4, "mem": "12G", "offload": "none", "accumulation_steps": 1, "global_batch": 2048},
         "no --accumulation-steps", {"accumulation_steps": None}),
    ],
)  # fmt: skip
def test_every_way_out_that_is_named_works(settings: dict[str, Any], flag: str, relaxed: dict[str, Any]) -> None:
    with pytest.raises(NothingFitsError) as caught:
        plan(**settings)
    assert flag in (caught.value.hint or "")
    assert plan(**(settings | relaxed)).memory.fits


IMPOSSIBLE_PINS = {
    "more than the batch": (
        {"micro_batch": 8, "accumulation_steps": 32},
        "--micro-batch 8 --accumulation-steps 32 on 4 GPUs is 1024, not 512\n"
        "  because 8 x 32 x 4 = 1024 samples, and the global batch is 512\n\n"
        "hint: use --micro-batch 4, or --accumulation-steps 16, or --global-batch 1024",
    ),
    "less than the batch": (
        {"micro_batch": 2, "accumulation_steps": 16},
        "--micro-batch 2 --accumulation-steps 16 on 4 GPUs is 128, not 512\n"
        "  because 2 x 16 x 4 = 128 samples, and the global batch is 512\n\n"
        "hint: use --micro-batch 8, or --accumulation-steps 64, or --global-batch 128",
    ),
    "one micro-step is already too much": (
        {"micro_batch": 8, "accumulation_steps": 1, "global_batch": 10},
        "--micro-batch 8 --accumulation-steps 1 on 4 GPUs is 32, not 10\n"
        "  because 8 x 1 x 4 = 32 samples, and the global batch is 10\n\n"
        "hint: use --micro-batch 3, or --global-batch 32",
    ),
    "more steps than samples": (
        {"accumulation_steps": 600},
        "--accumulation-steps 600 is more than the 512 samples of the global batch\n"
        "  because every micro-step needs at least one sample\n\n"
        "hint: use at most --accumulation-steps 512",
    ),
    "steps against a cap": (
        {"accumulation_steps": 2, "max_samples_per_gpu": 32},
        "--accumulation-steps 2 on 4 GPUs needs a micro-batch of 64\n"
        "  because the caps allow 32\n\n"
        "hint: use --accumulation-steps 4, or leave it out",
    ),
    "micro-batch against a cap": (
        {"micro_batch": 8, "max_samples_per_gpu": 4},
        "--micro-batch 8 is over the cap of --max-samples-per-gpu\n"
        "  because --max-samples-per-gpu allows 4 samples of 1024 tokens\n\n"
        "hint: leave one of them out, or use --micro-batch 4",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE_PINS)
def test_impossible_pins_are_refused_with_their_numbers(case: str) -> None:
    settings, message = IMPOSSIBLE_PINS[case]
    with pytest.raises(RequestError) as caught:
        plan(gpus=4, mem="80G", model=SMALL, **settings)
    assert str(caught.value) == message
