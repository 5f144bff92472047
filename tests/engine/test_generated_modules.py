"""Modules as people write them are trained exactly, or refused, or it is said what differs; drawn from seeds.

One that fails alone, or more of them: `python -m tests.engine.generated_runs SEED [NUMBER]`.
"""

import pytest

from bench.ranks import Ranks
from tests.engine.generated_modules import draw_case
from tests.engine.generated_runs import judge

FIRST, NUMBER, AT_ONCE = 0, 300, 20
IN_EVERY_RUN = (0, 5, 14, 22, 48)


def failures(seeds: tuple[int, ...] | range, of_size: dict[int, Ranks]) -> list[str]:
    """Return what went wrong, each with the command that shows it again."""
    failed = []
    for seed in seeds:
        case = draw_case(seed)
        verdict = judge(case, of_size[case.world_size])
        if verdict.kind == "failed":
            failed.append(f"python -m tests.engine.generated_runs {seed}\n{case}\n{verdict.reason}")
    return failed


@pytest.fixture
def of_size(one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks) -> dict[int, Ranks]:
    """Ranks by their number."""
    return {1: one_rank, 2: two_ranks, 3: three_ranks}


def test_a_generated_module_is_exact_or_refused_or_it_is_said(of_size: dict[int, Ranks]) -> None:
    assert not failures(IN_EVERY_RUN, of_size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(FIRST, FIRST + NUMBER, AT_ONCE))
def test_so_are_many(first: int, of_size: dict[int, Ranks]) -> None:
    assert not failures(range(first, first + AT_ONCE), of_size)
