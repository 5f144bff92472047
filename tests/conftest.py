"""Fixtures shared by all tests."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from bench.ranks import Ranks, freeze_what_was_imported
from tests import forked, kernels
from tests.browser import browser  # noqa: F401 - a fixture

os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
os.environ["TORCH_EXTENSIONS_DIR"] = str(kernels.FOLDER)
os.environ["XDG_CONFIG_HOME"] = os.devnull  # plans are to be the same on a machine that was calibrated

hypothesis.settings.register_profile("any machine", deadline=None)  # tests say nothing about time
hypothesis.settings.load_profile("any machine")

forked.use()
gc.disable()  # until the tests begin: what is imported stays
gc.set_threshold(700, 10, 100)  # a whole collection, which looks at a million objects, a tenth as often


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that forks for all of xdist's workers, and have nothing outlive a worker in its name.

    A worker has ended for xdist when its pipe is closed. A process that it forked has that pipe, too, and xdist would
    wait for a worker that is gone.
    """
    plugins = config.pluginmanager.get_plugins()
    if (interactor := next((each for each in plugins if hasattr(each, "workerid")), None)) is not None:
        nowhere, pipes = os.open(os.devnull, os.O_RDWR), interactor.channel.gateway._io
        numbers = [pipes.infile.fileno(), pipes.outfile.fileno()]
        os.register_at_fork(after_in_child=lambda: [os.dup2(nowhere, number, inheritable=False) for number in numbers])
    elif config.getoption("numprocesses", None):
        forked.start()


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C, and so would ours

SLOWEST = (
    "multinode/test_restarts.py", "multinode/test_strangers.py", "models/fused/test_kernels.py", "test_tutorials.py",
    "multinode/test_nodes.py", "cli/test_train.py", "cli/test_export.py", "engine/test_adapters.py",
    "multinode/test_doctor.py", "deepspeed_adapter/test_simulate.py", "engine/test_exactness.py",
    "dryrun/test_truth.py", "dryrun/test_frozen.py",
    "checkpoint/test_mirror.py", "dryrun/test_loop.py", "launch/test_signals.py",
    "engine/test_oom_retry.py", "dryrun/test_shipped.py", "test_ds_configs.py", "faults/test_out_of_memory.py",
)  # fmt: skip
"""The slowest files, here or in `make test-all`; the first to begin, so that none is left for one worker at the end."""

FASTEST = ("config", "planning", "html", "report")
"""Folders whose tests start no process: they fill the end."""


BEFORE_COLLECTION = dict(os.environ)


def pytest_collection_finish() -> None:
    """Forget the variables that modules of bench/ set for their own processes where tests import them."""
    os.environ.update({name: value for name, value in BEFORE_COLLECTION.items() if os.environ.get(name) != value})
    for name in os.environ.keys() - BEFORE_COLLECTION.keys() - {forked.SOCKET, "PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    freeze_what_was_imported()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, then as they are collected."""
    folder = Path(__file__).parent
    assert all((folder / name).exists() for name in SLOWEST)

    def place(item: pytest.Item) -> int:
        path = Path(os.path.relpath(item.path, folder))
        if path.as_posix() in SLOWEST:
            return SLOWEST.index(path.as_posix())
        return len(SLOWEST) + (path.parts[0] in FASTEST)

    items.sort(key=place)


OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _nothing_is_said_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the line about a command that takes its time out of outputs that are compared: the machine may be busy."""
    monkeypatch.setattr("frugal.cli.terminal.PATIENCE", 3600.0)


@pytest.fixture(autouse=True)
def _names_no_network() -> Iterator[None]:
    """Forget the interface that an engine of this process took, here or for a fixture: launchers would send it on."""
    _forget_networks()
    yield
    _forget_networks()


def _forget_networks() -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _is_no_rank_afterwards() -> Iterator[None]:
    """Forget what a command run in this process took for a rank alone; fail the test that leaves a process group.

    Nor does an exception on a thread end this process any more, as it ends a rank.
    """
    before = {name: os.environ[name] for name in OF_A_RANK if name in os.environ}
    usual = threading.excepthook
    yield
    threading.excepthook = usual
    for name in OF_A_RANK:
        os.environ.pop(name, None)
    os.environ.update(before)
    if (torch := sys.modules.get("torch")) and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("left torch's process group initialized")


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
    made = Ranks(world_size)
    yield made
    made.close()
