"""Learning rates rise to their peak and fall from it."""

from typing import Any

import pytest

from frugal.config.optimizers import schedule_factor


def rates(schedule: Any, warmup_steps: int, total_steps: int) -> list[float]:
    return [
        schedule_factor(step, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps)
        for step in range(total_steps)
    ]


def test_warmup_rises_evenly_to_the_peak_and_wastes_no_step() -> None:
    assert rates("constant", 4, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_from_the_peak_and_never_reach_zero_in_a_step() -> None:
    assert rates("linear", 0, 4) == [1.0, 0.75, 0.5, 0.25]
    assert rates("cosine", 1, 5) == pytest.approx([1.0, 1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert all(rate > 0 for rate in rates("cosine", 3, 200))


def test_steps_beyond_the_end_keep_the_last_value() -> None:
    assert schedule_factor(9, schedule="cosine", warmup_steps=0, total_steps=5) == 0.0
