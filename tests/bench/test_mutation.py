"""Mutants of planning follow the code, and the tests of planning kill nearly all of them."""

import json

import pytest

from bench.planning.mutation import MUTANTS, PART_OF_GOAL, RESULTS, ROOT, Mutant, applied


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.means)
def test_what_a_mutant_replaces_is_in_the_code_once(mutant: Mutant) -> None:
    source = (ROOT / "frugal" / mutant.file).read_text()
    assert applied(mutant, source) != source


def test_a_mutant_that_lost_its_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"units\.py has `no such line` 0 times"):
        applied(Mutant("units.py", "no such line", "", "nothing"), "GIB = 1 << 30\n")


def test_tests_of_planning_killed_nearly_all_mutants() -> None:
    kept = json.loads(RESULTS.read_text())
    survived = [row["means"] for row in kept["rows"] if row["killed_by"] is None]
    assert len(kept["rows"]) >= 16
    assert len(survived) <= PART_OF_GOAL * len(kept["rows"]), survived
