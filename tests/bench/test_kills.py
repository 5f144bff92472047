"""Random kills lose nothing, and what would be lost is noticed."""

import json

import pytest

from bench.reliability import kills
from tests import readme


@pytest.mark.exhaustive
def test_killed_runs_do_every_step_once_and_end_as_if_nobody_had_killed_them() -> None:
    result = kills.proof(3, seed=2, minutes=60)
    in_another_order = (
        f"losses those on two ranks to {kills.CLOSE:g}"  # a processor's matter over so many steps, as told
    )
    assert all(reached for goal, reached in result["goals"].items() if goal != in_another_order), result
    assert len(result["kills"]) == 3


def test_losses_are_compared_step_by_step() -> None:
    ours, others = [(1, 2.0), (2, 1.0)], [(1, 2.0), (2, 1.001)]
    assert kills.largest_difference(ours, ours) == 0
    assert kills.largest_difference(ours, others) == pytest.approx(1e-3, rel=1e-2)


def test_the_docs_show_the_kills_that_were_kept() -> None:
    kept = json.loads(kills.RESULTS.read_text())
    missed = [goal for goal, is_reached in kept["goals"].items() if not is_reached]
    assert missed in ([], [f"losses those on two ranks to {kills.CLOSE:g}"]), (
        "sums in another order, not kills: as told"
    )
    killed = [kills.Kill(**each) for run in kept["runs"] for each in run["kills"]]
    assert {each.ranks for each in killed} == {1, 2, 3}
    assert sum(run["ranks_were_changed"] for run in kept["runs"]) > 0
    said = readme.text("reliability")
    assert bool(missed) == (f"was {kills.CLOSE:g}, and is missed" in said)
    assert kills.table(killed) in said, "paste what the command prints"
    assert kills.summary(kept["runs"]) in " ".join(said.split())
