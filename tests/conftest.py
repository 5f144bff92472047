"""Fixtures shared by all tests."""

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from bench.ranks import Ranks
from tests import kernels
from tests.browser import browser  # noqa: F401 - a fixture

os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
os.environ["TORCH_EXTENSIONS_DIR"] = str(kernels.FOLDER)
os.environ["XDG_CONFIG_HOME"] = os.devnull  # plans are to be the same on a machine that was calibrated

hypothesis.settings.register_profile("any machine", deadline=None)  # tests say nothing about time
hypothesis.settings.load_profile("any machine")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C, and so would ours


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    """One real rank."""
    yield from _ranks(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two real ranks on gloo."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """Three real ranks on gloo."""
    yield from _ranks(3)


def _ranks(world_size: int) -> Iterator[Ranks]:
    ranks = Ranks(world_size)
    yield ranks
    ranks.close()
