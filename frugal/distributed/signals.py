"""Being told to stop before the work is done: SIGTERM, which SLURM and Kubernetes send before they kill, or SIGUSR1.

A rank only notes it; the loop ends at the next step boundary, the same on all ranks, with a checkpoint. Launchers send
SIGTERM, too, when another rank has failed: then there is no next boundary, and the rank ends where it notices.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_is_told = False  # signals are the process's, and so is this


def is_told() -> bool:
    """Whether this rank was told to stop."""
    return _is_told


def end_at_once() -> None:
    """Have signals end the process, as they do where nobody listens."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def listening() -> Iterator[None]:
    """Take note of signals; afterwards they mean what they meant before."""

    def note(_number: int, _frame: FrameType | None) -> None:
        global _is_told
        _is_told = True

    global _is_told
    with handled(SIGNALS, note):
        try:
            yield
        finally:
            _is_told = False


@contextmanager
def handled(signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside the `with` block `signals` call `handler`; afterwards they mean what they meant before."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
