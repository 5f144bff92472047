"""The bench of the guard takes away what recovery needs, and nothing else."""

import json
from pathlib import Path

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from bench.reliability.guard import in_turns, seconds_of, summary, votes_alone
from bench.runs import TINY


@pytest.mark.parametrize("zero_stage", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_votes_are_counted_and_both_ways_are_timed(zero_stage: int, tmp_path: Path, two_ranks: Ranks) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    plan = plan_by_hand(
        world_size=2, global_batch=8, micro_batch=2, zero_stage=zero_stage,
        request={"model": str(tmp_path / "config.json")},
    )  # fmt: skip
    kept = summary(two_ranks.run(in_turns, plan, 4))
    in_backward, in_step = 2 + 1, 2 + 1 + 1  # the bucket of each micro-step; norm, weights and before the first write
    assert kept["votes_a_step"] == in_backward + in_step, "each with one at the end"
    assert kept["ratio"]["steps"] == 4
    assert 0 < kept["seconds_a_vote"] < kept["step_seconds"]


def test_waiting_for_a_rank_that_comes_late_is_no_cost_of_the_vote() -> None:
    assert seconds_of([(0.0, 5.5), (5.0, 5.25)]) == 0.5


def test_a_vote_alone_is_timed_both_ways(two_ranks: Ranks) -> None:
    assert all(seconds > 0 for seconds in two_ranks.run(votes_alone, 10)[0].values())
