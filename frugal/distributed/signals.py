"""Requests to stop before the run is done: SIGTERM, which SLURM and Kubernetes send before they kill, or SIGUSR1.

A rank only records the request; the loop ends at the next step boundary, the same on all ranks, with a checkpoint.
Launchers also send SIGTERM when another rank has failed: then there is no next boundary, and the rank ends where it
notices.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_stop_requested = False  # signals are the process's, and so is this


def stop_requested() -> bool:
    """Whether this rank was asked to stop."""
    return _stop_requested


@contextmanager
def recorded() -> Iterator[None]:
    """Inside the `with` block stop signals are recorded instead of ending the process."""

    def record(_number: int, _frame: FrameType | None) -> None:
        global _stop_requested
        _stop_requested = True

    global _stop_requested
    with handled(STOP_SIGNALS, record):
        try:
            yield
        finally:
            _stop_requested = False


@contextmanager
def handled(signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside the `with` block `signals` call `handler`; afterwards they do what they did before."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def restore_defaults() -> None:
    """From now on stop signals end the process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
