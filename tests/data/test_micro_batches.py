"""Samples of like length share a micro-batch, and nothing about the training changes."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.data.batches import MicroBatchLimits, share
from frugal.engine.engine import initialize
from frugal.engine.train_step import evaluate
from frugal.models.objectives import Batch, CausalLM, Objective
from frugal.planning.plan import Plan
from tests.engine.gradients import SGD, Gradient, applied, relative_error, weights, with_bound
from tests.engine.small_models import ragged_samples, tiny_gpt2
from tests.engine.test_exactness import reference_gradient

GLOBAL_BATCH = 20


class Known(list[Any]):
    """Samples whose lengths are known, as those of a tokenised corpus."""

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Tokens of each."""
        return np.array([len(sample["input_ids"]) for sample in self])


def limits(*max_samples: int, shortest: int = 64, overhead: int | None = None) -> MicroBatchLimits:
    """Return limits for samples of up to 64 tokens."""
    return MicroBatchLimits(max_samples=max_samples, seq_len=64, shortest=shortest, overhead=overhead)


def one_step(
    make: Callable[[], nn.Module], plan: Plan, objective: Objective, samples: Sequence[Any]
) -> tuple[Gradient, float, float, list[Batch]]:
    """Gradient and loss of a step, loss of an evaluation, and the rank's micro-batches. Runs on ranks."""
    plan = replace(plan, batch=replace(plan.batch, shortest=8, overhead_tokens=16)).sealed()
    before = weights(make())
    engine = initialize(make(), plan, objective)
    evaluation = evaluate(engine, samples)
    batches = list(engine.prepare(samples).batches)
    result = engine.train_step(samples)
    gradient = applied(engine, before)
    engine.destroy()
    del engine
    gc.collect()
    return gradient, result.loss, evaluation.loss, batches


def train(zero_stage: int, *, is_known: bool) -> tuple[Gradient, float, float, list[list[int]]]:
    """The same of ragged samples, and rows and columns of the rank's micro-batches."""
    plan = plan_by_hand(
        world_size=dist.get_world_size(), global_batch=GLOBAL_BATCH, micro_batch=2, zero_stage=zero_stage, request=SGD
    )
    samples = Known(ragged_samples(GLOBAL_BATCH)) if is_known else ragged_samples(GLOBAL_BATCH)
    *made, batches = one_step(tiny_gpt2, plan, CausalLM(), samples)
    return *made, [list(batch["input_ids"].shape) for batch in batches]


def all_stages() -> list[tuple[Gradient, float, float, list[list[int]]]]:
    """Grouped under each ZeRO stage, and once as planned; runs on ranks."""
    return [train(stage, is_known=True) for stage in range(4)] + [train(2, is_known=False)]


@pytest.mark.parametrize(
    "fixture",
    ["two_ranks", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("one_rank", "three_ranks"))],
)
def test_the_gradient_of_grouped_samples_is_that_of_plain_pytorch(fixture: str, request: pytest.FixtureRequest) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    reference, bound = with_bound(reference_gradient, GLOBAL_BATCH)
    by_rank = ranks.run(all_stages)
    for stage in range(4):
        for results in by_rank:
            gradient, loss, evaluation, _ = results[stage]
            assert relative_error(gradient, reference) < bound
            assert loss == pytest.approx(results[4][1], rel=2 * bound)
            assert evaluation == pytest.approx(loss, rel=2 * bound)
    shapes = [results[0][3] for results in by_rank]
    as_planned = [results[4][3] for results in by_rank]
    assert len({len(each) for each in shapes}) == 1, "as many micro-steps on every rank"
    assert sum(rows for each in shapes for rows, _ in each) == GLOBAL_BATCH
    assert all(rows * max(columns, 8) <= 2 * 64 for each in shapes for rows, columns in each)
    assert max(rows for each in shapes for rows, _ in each) > 2, "short samples were to share a micro-batch"
    assert padded(shapes) < padded(as_planned)


def padded(shapes: list[list[list[int]]]) -> int:
    """Tokens of all micro-batches."""
    return sum(rows * columns for each in shapes for rows, columns in each)


def test_short_samples_of_one_length_share_what_a_long_one_takes() -> None:
    samples = Known([{"input_ids": [0] * 16}] * 16)
    assert len(share(samples, limits(2, 2, shortest=16), 0).places) == 1
    assert len(share(samples, limits(2, 2), 0).places) == 4


def test_a_micro_batch_that_was_too_large_is_cut_until_its_samples_are_alone() -> None:
    samples = Known([{"input_ids": [0] * length} for length in range(4, 64, 4)])
    largest, now = [], limits(4, shortest=8)
    while now is not None:
        cut = share(samples, now, 0)
        sizes = [(len(places) * len(samples[places[0]]["input_ids"]), len(places)) for places in cut.places]
        largest.append((max(tokens for tokens, _ in sizes), max(number for _, number in sizes)))
        now = now.halved(cut.largest)
    assert largest == sorted(set(largest), reverse=True), "each attempt is smaller, in tokens or in samples"
    assert largest[-1] == (60, 1)
