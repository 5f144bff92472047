"""Working ahead changes when a batch is made, and nothing else."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.data.batches import GlobalBatches, MicroBatchLimits, prefetch
from frugal.engine.engine import initialize
from frugal.models.objectives import CausalLM
from tests.engine.small_models import ragged_samples, tiny_gpt2


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_one_item_is_made_while_the_last_is_worked_on_and_never_more() -> None:
    is_made = [threading.Event() for _ in range(4)]

    def making() -> Iterator[int]:
        for number, event in enumerate(is_made):
            event.set()
            yield number

    items = prefetch(making())
    assert next(items) == 0
    assert is_made[1].wait(60)  # nobody has asked for it yet
    assert not is_made[2].is_set()
    assert next(items) == 1
    items.close()  # type: ignore[attr-defined]  # a generator
    assert not threads()


def test_a_failure_is_raised_once_where_its_item_would_have_come() -> None:
    def making() -> Iterator[int]:
        yield from range(2)
        raise ValueError("row 2 is broken")

    items, received = prefetch(making()), []
    with pytest.raises(ValueError, match="row 2 is broken"):
        for item in items:
            received.append(item)
    assert received == [0, 1]
    assert next(items, None) is None
    assert not threads()


def prepared_and_plain() -> dict[str, Any]:
    """Losses and weights of steps on batches prepared ahead and on plain ones, and limits that fall between."""
    samples = ragged_samples(24)
    batches = GlobalBatches(samples, global_batch=8, seed=3)
    results: dict[str, Any] = {}
    for way in ("plain", "ahead"):
        plan = plan_by_hand(world_size=1, global_batch=8, micro_batch=4, zero_stage=2)
        engine = initialize(tiny_gpt2(), plan, CausalLM())
        to_come = [batch for batch, _ in zip(batches.iterate(), range(3), strict=False)]
        steps = prefetch(map(engine.prepare, to_come)) if way == "ahead" else iter(to_come)
        losses = []
        for number, batch in enumerate(steps):
            if number == 1:  # the next batch is prepared, and now too large
                engine.adaptive_limits.limits = MicroBatchLimits(
                    max_samples=(1,), seq_len=64, shortest=64, overhead=None
                )
            losses.append(engine.train_step(batch).loss)
        weights = torch.cat([parameter.detach().flatten() for parameter in engine.module.parameters()])
        results[way] = losses, weights.numpy()
        engine.destroy()
    gc.collect()
    return results


def test_batches_prepared_ahead_train_the_same_weights_also_when_memory_runs_out_between(one_rank: Ranks) -> None:
    (results,) = one_rank.run(prepared_and_plain)
    assert results["ahead"][0] == results["plain"][0]
    assert (results["ahead"][1] == results["plain"][1]).all()
