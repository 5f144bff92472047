"""Fixtures of the tests of `frugal check`."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from frugal.dryrun.client import workers
from frugal.dryrun.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers that dry-run, started once."""
    with closing(workers()) as pool:
        yield pool
