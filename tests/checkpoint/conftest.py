"""Checkpoints that several tests look at."""

from pathlib import Path

import pytest

from bench.ranks import Ranks
from tests.engine.checkpoints import two_saves


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory, two_ranks: Ranks) -> Path:
    """A folder with checkpoints at steps 2 and 4 of a ZeRO-2 run on two ranks."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    two_ranks.run(two_saves, folder)
    return folder
