"""Measurements of `bench.planning.choice`: real steps of every plan, in turns, on real ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.planning import choice_random
from bench.planning.choice import measured_again
from bench.planning.choice_worker import timed, timed_again
from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.models.factories import import_callable
from frugal.planning.plan import Plan


def plan(micro_batch: int, **strategy: Any) -> Plan:
    return plan_by_hand(
        world_size=2, global_batch=8, micro_batch=micro_batch, zero_stage=2, strategy=strategy,
        request={"model": "bench/memory/families.py:llama", "seq_len": 16},
    )  # fmt: skip


@pytest.mark.exhaustive  # 10 s of real steps
def test_every_plan_is_trained_and_timed_on_all_ranks(two_ranks: Ranks) -> None:
    plans = [plan(4), plan(1, activation_checkpointing="selective")]
    for found in two_ranks.run(timed, plans, turns=1, steps=1):
        assert [len(seconds) for seconds in found] == [1, 1]
        assert all(0 < each < 60 for seconds in found for each in seconds)
        assert found[1][0] > found[0][0]  # four micro-steps of one sample, against one of four


@pytest.mark.exhaustive
def test_the_chosen_and_the_fastest_other_take_turns_once_more(two_ranks: Ranks) -> None:
    plans = [plan(micro) for micro in (1, 4, 2)]
    for found in two_ranks.run(timed_again, plans, [0, 1], num_turns=2):
        assert [len(found[number]) for number in (0, 1)] == [2, 2] and 2 not in found


def test_ratios_are_those_of_the_turns_at_the_end() -> None:
    row = {"ratio": 1.3}
    again = measured_again(row, {0: (2.0, 4.0, 1.0), 3: (1.0, 2.0, 5.0), 4: (1.5, 3.0, 0.75)})
    assert (again["ratio"], again["ratio_at_first"]) == (2.0, 1.3)
    assert measured_again(row, {0: (1.0,), 4: (2.0,)})["ratio"] == 1.0  # the chosen one is faster now
    assert measured_again(row, {}) == row


def test_a_days_models_are_the_same_again(tmp_path: Path) -> None:
    cases = choice_random.cases(24, 20261123, tmp_path)
    assert choice_random.cases(24, 20261123, tmp_path) == cases != choice_random.cases(24, 20261124, tmp_path / "next")
    assert {case.world_size for case in cases} == {1, 2}
    assert len({case.model.rpartition(":")[2].split("_")[0] for case in cases}) >= 6


@pytest.mark.exhaustive
def test_a_days_models_can_be_made(tmp_path: Path) -> None:
    for case in choice_random.cases(24, 20261123, tmp_path):
        with torch.device("meta"):
            assert sum(p.numel() for p in import_callable(case.model)().parameters()) > 10_000
