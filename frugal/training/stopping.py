"""Being told to stop before the work is done: SIGTERM, which SLURM and Kubernetes send before they kill, or SIGUSR1.

A rank only notes it; the loop ends at the next step boundary, the same on all ranks, with a checkpoint.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Notice:
    """Whether this rank was told to stop."""

    def __init__(self) -> None:
        self.is_given = False

    def take(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.is_given = True


@contextmanager
def listening(notice: Notice) -> Iterator[None]:
    """Have signals reach the notice; afterwards they mean what they meant before."""
    before = {number: signal.signal(number, notice.take) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
