"""Runs whose micro-batches differ in length: what their allocator keeps is replayed without another dry run."""

import os
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

import frugal
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.dryrun import run
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.messages import AskDryRun, DryRun
from frugal.engine.train_step import accumulate
from frugal.models.resolve import resolve_request
from frugal.planning.length_bucketing import Shape, drawn_runs
from frugal.planning.memory.allocator import Replays
from frugal.planning.plan import Plan
from frugal.planning.report import breakdown_table

LENGTHS = {16: 300, 40: 200, 90: 80, 200: 20, 256: 1}
STEPS: list[list[Shape]] = [[(8, 70), (8, 33)], [(8, 90), (8, 20)], [(8, 256), (8, 50)], [(4, 140), (8, 100)]]


def plan_of(**settings: Any) -> Plan:
    """A plan of a small preset for one GPU with segments that cannot grow."""
    chosen: dict[str, Any] = {
        "model": "t5-small", "gpus": 1, "mem": "16G", "seq_len": 256, "global_batch": 16, "micro_batch": 8,
        "activation_checkpointing": "off", "loss": "plain", "offload": "none",
        "lengths": LENGTHS,
    }  # fmt: skip
    with patch.dict(os.environ, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}):
        return frugal.plan(**(chosen | settings))


def dry_run_of(plan: Plan, steps: list[list[Shape]], monkeypatch: pytest.MonkeyPatch) -> DryRun:
    """DeepSpeed's own steps on meta tensors, with micro-batches of these shapes."""

    def train(tracker: Any, zero: Any, objective: Any, asked: AskDryRun) -> Any:
        def mark(phase: str) -> None:
            tracker.relabel(zero.kept())
            tracker.mark(phase)

        marked = run.mark_phases(zero.engine, objective, mark)
        for shapes in steps:
            with run.torch_internals.without_modes():
                batches = [objective.example(*shape) for shape in shapes]
            tracker.expect(batches[0])
            before = tracker.counts
            accumulate(zero.engine, marked, batches, targets=1)
            del batches
            zero.engine.step()
            run.gc.collect()
        return tracker.counts - before

    monkeypatch.setattr(run, "_train", train)
    spec = resolve_request(plan.request)
    asked = AskDryRun(
        request=plan.request, strategy=plan.strategy, micro_batch=8, accumulation_steps=2, world_size=1, rank=0,
        kind="cuda",
    )  # fmt: skip
    build = partial(spec.build, dtype=DTYPES[plan.request.precision], device="meta")
    return run.dry_run(build, spec.objective(pack=False), asked)


@pytest.mark.parametrize(
    ("zero_stage", "loss"),
    [(3, "plain"), *(pytest.param(2, loss, marks=pytest.mark.exhaustive) for loss in ("plain", "tiled"))],
)
def test_the_replay_of_other_lengths_is_that_of_a_dry_run_of_them(
    zero_stage: int, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(zero_stage=zero_stage, loss=loss)
    real = dry_run_of(plan, STEPS, monkeypatch)
    with DryRunSource(plan.request, plan.cluster) as source:
        replayed = source.in_lengths(plan.strategy, [[[(shape,) for shape in shapes] for shapes in STEPS]])
        timeline = source._with_workspaces(real.timeline, 8 * 256)
    expected = Replays(timeline.fixed, timeline.events, timeline.empties)
    assert replayed is not None
    found = replayed[0][0].replays(0)
    assert found.under().peak_allocated_bytes == pytest.approx(expected.under().peak_allocated_bytes, rel=2e-3)
    within = 0.01 if loss == "plain" else 0.03  # one trace tells no squares from lines, and t5 has biases of both
    assert found.under().peak_reserved_bytes == pytest.approx(expected.under().peak_reserved_bytes, rel=within)
    assert found.smallest_capacity() == pytest.approx(expected.smallest_capacity(), rel=within)


def test_a_plan_counts_what_the_allocator_keeps_of_other_lengths() -> None:
    plan = plan_of(zero_stage=2)
    with DryRunSource(plan.request, plan.cluster) as source:
        equal = source.dry_run(plan.strategy, max(plan.batch.micro_batch), 2)
    assert plan.memory.counts_lengths
    assert plan.memory.reserved_bytes > 1.1 * equal.reserved_bytes
    assert any("over the data's lengths" in line for line in breakdown_table(plan))


def test_a_drawn_run_has_the_longest_sample_last_and_never_more_than_the_budget() -> None:
    plan = plan_of(zero_stage=2, micro_batch=None, global_batch=64)
    lengths, batch = plan.request.lengths, plan.batch
    assert lengths is not None
    for steps in drawn_runs(lengths, batch, 256):
        assert steps[-1][0][0][1] == lengths.longest
        shortest = batch.shortest or 256
        shapes = [shape for step in steps for micro_step in step for shape in micro_step]
        assert max(n * max(length, shortest) for n, length in shapes) <= max(batch.micro_batch) * 256


def test_lengths_that_do_not_fit_are_a_bound_and_no_promise() -> None:
    memory = plan_of(zero_stage=2, lengths=None).memory
    more = memory.headroom_bytes + 1
    beyond, within = (
        memory.with_lengths(more, 0, 0, memory.usable_bytes),
        memory.with_lengths(1000, 10, 20, memory.usable_bytes),
    )
    assert (beyond.total_bytes, beyond.may_exceed_with_lengths) == (memory.total_bytes, True)
    assert (within.total_bytes, within.may_exceed_with_lengths) == (memory.total_bytes + 1000, False)
    assert (within.reserved_bytes, within.reserved_above_bytes) == (memory.reserved_bytes + 10, 20)
    assert beyond.interval is not None and memory.interval is not None
    assert beyond.interval.upper_bytes == memory.interval.upper_bytes + more
    assert replace(beyond, interval=memory.interval).fits
