"""A rate that follows the batch is the rate that is applied, on any number of ranks."""

import gc
from typing import Any

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.engine.engine import initialize
from frugal.models.objectives import CausalLM
from tests.engine.gradients import bound_of_losses
from tests.engine.small_models import ragged_samples, tiny_gpt2

SCALED = {"learning_rate": 0.05, "reference_batch": 3, "lr_rule": "linear"}


def two_steps(world_size: int, optimizer: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and reported rate of two SGD steps of six samples. Runs on ranks."""
    plan = plan_by_hand(
        world_size=world_size, global_batch=6, micro_batch=2, zero_stage=2,
        request={"optimizer": "sgd", "weight_decay": 0.0, "gradient_clipping": 0.0, **optimizer},
    )  # fmt: skip
    engine = initialize(tiny_gpt2(), plan, CausalLM())
    results = [engine.train_step(ragged_samples(6)) for _ in range(2)]
    engine.destroy()
    gc.collect()
    return [(result.loss, result.learning_rate) for result in results]


def test_one_and_two_ranks_train_with_the_scaled_rate(one_rank: Ranks, two_ranks: Ranks) -> None:
    (alone,) = one_rank.run(two_steps, 1, SCALED)
    (by_hand,) = one_rank.run(two_steps, 1, {"learning_rate": 0.1})
    bound = bound_of_losses(tiny_gpt2, [ragged_samples(6)] * 2, learning_rate=1e-3)
    together = two_ranks.run(two_steps, 2, SCALED)
    assert [rate for _, rate in alone] == [0.1, 0.1]
    assert alone == by_hand, "the same run as with the scaled rate itself"
    for losses_and_rates in together:
        assert [rate for _, rate in losses_and_rates] == [0.1, 0.1]
        assert [loss for loss, _ in losses_and_rates] == pytest.approx([loss for loss, _ in alone], rel=bound)
