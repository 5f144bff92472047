"""Exports, and their refusals."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.plans import plan_by_hand
from frugal.config.adapters import Lora
from frugal.config.hardware.cluster import Cluster, Node
from frugal.config.optimizers import Optimizer
from frugal.deepspeed_adapter.export import Target, export, needs_even
from frugal.deepspeed_adapter.json_config import deepspeed_config
from frugal.errors import RequestError
from frugal.models.losses import own_loss
from frugal.models.losses.decoder_inputs import source
from frugal.planning.plan import Plan


def plan(*, world_size: int = 3, global_batch: int = 252, micro_batch: Any = 12, **changes: Any) -> Plan:
    return plan_by_hand(
        world_size=world_size, global_batch=global_batch, micro_batch=micro_batch, zero_stage=2, **changes
    )


def nodes_of(*sizes: int) -> Cluster:
    """A cluster whose nodes have so many GPUs."""
    cluster = plan().cluster
    return dataclasses.replace(cluster, nodes=tuple(Node(devices=cluster.devices[:1] * size) for size in sizes))


def refusal(made: Plan, target: Target) -> str:
    with pytest.raises(RequestError) as caught:
        export(made, target)
    return str(caught.value)


def test_only_what_a_target_can_cut_needs_another_plan() -> None:
    uneven, unequal_ranks = plan(global_batch=250), plan(world_size=2, global_batch=24, micro_batch=(8, 4))
    targets: tuple[Target, ...] = ("hf", "accelerate", "script")
    assert [needs_even(uneven, target) for target in targets] == [False, True, False]
    assert [needs_even(unequal_ranks, target) for target in targets] == [False, True, True]
    assert not any(needs_even(plan(), target) for target in targets)


TILED = "the loss is tiled: with whole logits at most micro-batch 8 fits instead of 12"
FOREIGN_MODEL, OWN = {"request": {"model": "my.module:model"}}, dataclasses.replace(plan().model, task="own")
TOKENS = dataclasses.replace(plan().batch, global_tokens=16_128)
OTHERS_CANNOT: list[tuple[Target, dict[str, Any], dict[str, Any], str, str]] = [
    ("accelerate", {"strategy": {"loss": "tiled"}}, {"why": ("x", TILED)}, TILED, "plan with --loss plain"),
    ("accelerate", {"strategy": {"mlp": "tiled"}}, {}, "does not know frugal's tiled MLP", "plan with --mlp plain"),
    ("accelerate", {"strategy": {"activation_checkpointing": "selective"}}, {}, "activation checkpointing selective",
     "plan with --activation-checkpointing full, or off"),
    ("script", {"request": {"optimizer": Optimizer(name="adamw-8bit")}}, {}, "adamw-8bit",
     "plan with --optimizer adamw"),
    ("hf", {}, {"batch": TOKENS}, "global batch of 16128 tokens", "plan with --global-batch 252 instead"),
    ("hf", FOREIGN_MODEL, {"model": OWN}, "its loss is Python of its own", "--to script exports it"),
    ("hf", {}, {"warnings": ("x", own_loss.ROUTERS)}, own_loss.ROUTERS, "train it with `frugal train`, or without"),
    *((target, {"request": {"quantize": "nf4", "lora": Lora.of("r=8")}}, {},  # it would be another model
       "is not exported to with quantised weights", "") for target in get_args(Target)),
    ("accelerate", {}, {"cluster": nodes_of(1, 2)}, "the nodes have 1, 2 GPUs", "use --to script, which starts with"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "asked", "changes", "why", "hint"), OTHERS_CANNOT)
def test_what_only_frugal_can_do_is_refused(
    target: Target, asked: dict[str, Any], changes: dict[str, Any], why: str, hint: str
) -> None:
    made = dataclasses.replace(plan(**asked), **changes)
    said = refusal(made, target)
    assert why in said and f"\n\nhint: {hint}" in said
    if made.model.task == "own" or made.warnings:
        assert export(made, "accelerate").files
    if "cluster" in changes:
        assert export(made, "script").start == "DS_ACCELERATOR=cpu deepspeed --hostfile HOSTS train.py samples.jsonl"


def test_paths_with_dollars_stay_as_they_are() -> None:
    made = plan()
    (text,) = {export(made, "script", folder="out$x", make_model="model = M('$HOME')").files["train.py"]}
    assert "out$x/train.py" in text and "M('$HOME')" in text


def test_accelerate_is_told_of_several_nodes() -> None:
    made = dataclasses.replace(plan(world_size=4, global_batch=96), cluster=nodes_of(2, 2))
    text = export(made, "accelerate", folder="out/").files["accelerate.yaml"]
    for line in (
        '  deepspeed_config_file: "out/ds_config.json"', "  deepspeed_multinode_launcher: pdsh",
        "  deepspeed_hostfile: hostfile  # a line `NAME slots=GPUS` for each node", "num_machines: 2",
        "num_processes: 4", "machine_rank: 0", "use_cpu: true",
    ):  # fmt: skip
        assert f"{line}\n" in text


@pytest.mark.parametrize("target", ["accelerate", "script"])
def test_deepspeeds_json_is_the_plans(target: Target) -> None:
    import json

    made = plan()
    assert json.loads(export(made, target).files["ds_config.json"]) == deepspeed_config(made)


def test_a_trainer_is_given_the_plan_itself(tmp_path: Path) -> None:
    made = plan(strategy={"loss": "tiled", "activation_checkpointing": "selective"}).sealed()
    (tmp_path / "plan.json").write_text(export(made, "hf").files["plan.json"])
    assert Plan.read(tmp_path / "plan.json") == made


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "seq2seq", "sequence-classification"])
@pytest.mark.parametrize("target", ["hf", "script"])
def test_the_python_of_every_task_and_stage_is_python(target: Target, task: str) -> None:
    for stage in (2, 3):
        made = plan_by_hand(world_size=2, global_batch=8, micro_batch=2, zero_stage=stage)
        made = dataclasses.replace(made, model=dataclasses.replace(made.model, task=task))
        name, text = next(iter(export(made, target, make_model="model = None", decoder_inputs=source()).files.items()))
        compile(text, name, "exec")
        assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("    DS_ACC"))


@pytest.mark.parametrize("target", ["accelerate", "script"])
def test_segments_that_the_memory_counts_on_go_with_the_plan(target: Target) -> None:
    told, without = (
        export(plan(strategy={"expandable_segments": each}), target, folder="run") for each in (True, False)
    )
    text, plain = next(iter(told.files.values())), next(iter(without.files.values()))
    where = told.start if target == "accelerate" else text
    assert "expandable_segments:True" in where
    assert "expandable_segments" not in plain + without.start
    if target != "accelerate":
        setting = text.index('os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")')
        assert text.index("import os") < setting < text.index("import torch"), "torch reads it once"
