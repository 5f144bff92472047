"""Learning rates rise to their peak and fall from it."""

from dataclasses import replace
from typing import Any

import pytest

from frugal.config.optimizers import Curve, schedule_factor


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


def curve(total_steps: int, **changes: Any) -> Curve:
    return replace(Curve(peak=0.1, schedule="linear", warmup_steps=0, total_steps=total_steps), **changes)


def test_a_longer_run_says_what_becomes_of_the_rate() -> None:
    assert curve(80).change_from(curve(40), 20) == (
        "learning rate of step 21 0.05 -> 0.075 (linear over 40 steps -> linear over 80 steps)"
    )


def test_a_shorter_run_can_keep_the_curve_and_is_told_how() -> None:
    assert curve(40).change_from(curve(80, peak=0.2), 20) == (
        "learning rate of step 21 0.15 -> 0.05 (linear over 80 steps -> linear over 40 steps; --schedule-steps 80 "
        "keeps it)"
    )


def test_another_schedule_or_warmup_is_said_and_a_constant_rate_has_no_length() -> None:
    warm = curve(40, schedule="constant", warmup_steps=4)
    assert warm.change_from(curve(40), 1) == (
        "learning rate of step 2 0.0975 -> 0.05 (linear over 40 steps -> constant with 4 of warmup)"
    )
    assert warm.change_from(curve(80, schedule="constant", warmup_steps=4), 20) is None
