"""The runs of `bench.emulated_gpu.ragged`: which are drawn, what they train on, and what the docs say of them."""

import json
from dataclasses import replace
from math import prod

import pytest

from bench.emulated_gpu import ragged, ragged_run
from bench.gpu.models import FAMILIES
from bench.plans import plan_by_hand
from frugal.planning.plan import Plan
from tests import readme

ROWS = list(ragged.configurations())


def test_every_kind_of_run_is_drawn_and_one_family_in_four_is_in_no_table() -> None:
    drawn = [row for row, _ in ROWS]
    assert 12 <= len({row.name for row in drawn}) == len(drawn) <= 16
    assert {row.zero_stage for row in drawn} == {0, 2, 3} and {row.world_size for row in drawn} == {1, 2, 4}
    assert {row.pack for row in drawn} == {True, False}
    assert {row.lora for row in drawn} == {None, "r=8"} and len({task for _, task in ROWS}) >= 2
    known = {*FAMILIES.values(), *(kind for kinds in ragged.KNOWN.values() for kind in kinds)}
    unseen = drawn[ragged.UNSEEN - 1 :: ragged.UNSEEN]
    assert len(unseen) == len(drawn) // ragged.UNSEEN and not known & {row.model for row in unseen}
    assert [row for row, _ in ragged.configurations()] == drawn  # by the seed alone


def plan_of(task: str, *, packed: bool, world_size: int, shortest: int | None) -> Plan:
    plan = plan_by_hand(world_size=world_size, global_batch=12 * world_size, micro_batch=4, zero_stage=2)
    request = replace(plan.request, seq_len=128, pack=packed or None)
    batch = replace(plan.batch, shortest=shortest, overhead_tokens=100)
    return replace(plan, request=request, batch=batch, model=replace(plan.model, task=task))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("task", "packed"), [("causal-lm", False), ("causal-lm", True), ("seq2seq", False)])
def test_micro_batches_hold_every_sample_once_under_the_budget(task: str, packed: bool, seed: int) -> None:
    plan = plan_of(task, packed=packed, world_size=1 + seed, shortest=32 if seed else None)
    training, _ = ragged_run.samples(plan, seed)
    run = ragged_run.shapes(plan, seed)
    assert len(run) == ragged_run.STEPS and {len(micro_step) for step in run for micro_step in step} == {1 + seed}
    shapes = [shape for step in run for micro_step in step for shape in micro_step if shape != (1, 2)]
    assert sum(samples for samples, _ in shapes) == len(training)
    assert max(length for _, length in shapes) == max(training.lengths) <= 128
    shortest = plan.batch.shortest or 128
    assert max(samples * max(length, shortest) for samples, length in shapes) <= prod((4, 128))
    assert len({length for _, length in shapes}) > 3  # ragged


def test_the_docs_have_the_sums_of_the_kept_result() -> None:
    found = json.loads(ragged.OUT.read_text())["summary"]
    assert ragged.line(found) in " ".join(readme.text("emulated-gpu").split())
