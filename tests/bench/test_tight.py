"""Where activation checkpointing alone does not fit, frugal's plan does, trains, and learns the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.memory.tight import CASES, compare, is_shown
from bench.ranks import Ranks
from frugal.dryrun.client import workers
from frugal.dryrun.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Processes that dry-run."""
    made = workers()
    yield made
    made.close()


IN_EVERY_RUN = ("long sequence",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in CASES]
)
@pytest.mark.exhaustive
def test_what_does_not_fit_with_full_activation_checkpointing_trains(
    name: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ranks: Ranks = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[CASES[name].ranks])
    row = compare(CASES[name], ranks, tmp_path, pool)
    assert is_shown(row), row
    assert row["planned_bytes"] == pytest.approx(row["measured_bytes"], rel=0.005)
