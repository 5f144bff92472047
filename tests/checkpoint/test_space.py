"""A run that a host has no room for is refused on every rank before it starts, with the host's name and the numbers."""

import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.checkpoint import manifest, run_folder
from frugal.config.adapters import Lora
from frugal.config.optimizers import Optimizer
from frugal.config.run_settings import RunSettings
from frugal.errors import NothingFitsError
from frugal.models import adapters
from frugal.planning.memory import breakdown
from frugal.planning.plan import Plan
from tests.engine.engines import running
from tests.engine.small_models import ragged_samples, tiny_gpt2

HUGE = 1 << 50


def plan_of(world_size: int, *, tensors: int = 0, parameters: int = 0, **strategy: Any) -> Plan:
    """A plan that says its ranks hold so many bytes, and that its model has so many parameters."""
    made = plan_by_hand(
        world_size=world_size, global_batch=4, micro_batch=2, zero_stage=3 if strategy else 1, strategy=strategy
    )
    memory = replace(made.memory, parameters=tensors, total_bytes=tensors, usable_bytes=tensors)
    model = replace(made.model, parameters=parameters, trainable_parameters=parameters)
    return replace(made, memory=memory, model=model)


def refusal(plan: Plan, asked: RunSettings) -> str:
    """Return what the check says; runs on ranks."""
    try:
        run_folder.check_space(plan, asked)
    except NothingFitsError as error:
        return str(error)
    return ""


def test_each_host_is_held_against_what_its_ranks_will_take(two_ranks: Ranks, tmp_path: Path) -> None:
    asked = RunSettings(data=("x",), out=tmp_path / "run")
    assert two_ranks.run(refusal, plan_of(2, tensors=1 << 20, parameters=1000), asked) == ["", ""]

    (first, second) = two_ranks.run(refusal, plan_of(2, tensors=HUGE), asked)
    assert first == second
    name = re.escape(socket.gethostname())
    what = "of memory left, and its 2 ranks will take"
    assert re.search(rf"because {name} has [\d.]+ GiB {what} 21\d+\.\d+ GiB\n", first)

    assert two_ranks.run(refusal, plan_of(2, parameters=1000), replace(asked, async_save=True)) == ["", ""]
    (first, _) = two_ranks.run(refusal, plan_of(2, parameters=HUGE), replace(asked, async_save=True))
    assert re.search(r"its 2 ranks and the copy of train.async-save will take [\d.]+ GiB\n", first)

    (first, _) = two_ranks.run(refusal, plan_of(2, parameters=HUGE), asked)
    disk_of = re.escape(str(tmp_path))
    what = "checkpoints and the trained model will take"
    assert re.search(rf"because {name} has [\d.]+ GiB free on the disk of {disk_of}, and {what} [\d.]+ GiB\n", first)

    on_disk = {"offload_optimizer": "nvme", "offload_parameters": "cpu", "nvme_path": str(tmp_path)}
    (first, _) = two_ranks.run(refusal, plan_of(2, parameters=HUGE, **on_disk), asked)
    assert "and offloaded states will take" in first


def saved(plan: Plan, folder: Path) -> tuple[list[int], int, int]:
    """Bytes of a checkpoint that was really saved, by the rank that wrote them, and parameters; runs on ranks.

    Parameters are counted all, and those that are trained.
    """
    model = adapters.as_planned(tiny_gpt2(n_embd=128, n_head=2, n_layer=2, vocab_size=2048, n_positions=64), plan)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    with running(plan, model) as engine:
        engine.train_step(ragged_samples(4, shortest=8, longest=16))
        files = manifest.read(engine.save(folder)).files.values()
    written = [sum(file.num_bytes for file in files if file.rank == rank) for rank in range(plan.batch.world_size)]
    return written, parameters, trained


IN_BF16 = {"precision": "bf16", "optimizer": Optimizer(states="bf16")}


@pytest.mark.parametrize(
    ("zero_stage", "asked"),
    [
        (0, {}),
        pytest.param(1, {}, marks=pytest.mark.exhaustive),
        (3, {"lora": Lora.of("r=128")}),
        (2, IN_BF16),
        pytest.param(3, IN_BF16, marks=pytest.mark.exhaustive),
    ],
)
def test_a_saved_checkpoint_is_as_large_as_was_said(
    zero_stage: int, asked: dict[str, Any], two_ranks: Ranks, tmp_path: Path
) -> None:
    plan = plan_by_hand(world_size=2, global_batch=4, micro_batch=2, zero_stage=zero_stage, request=asked)
    written, parameters, trained = two_ranks.run(saved, plan, tmp_path)[0]
    plan = replace(plan, model=replace(plan.model, parameters=parameters, trainable_parameters=trained))
    whole = breakdown.checkpoint_bytes(plan.request, plan.strategy, plan.model)
    assert sum(written) == pytest.approx(whole, rel=0.05)
    copied = [run_folder.copied_bytes(plan, 1, has_rank_0=rank == 0) for rank in (0, 1)]
    assert written == pytest.approx(copied, rel=0.05, abs=whole / 50)
