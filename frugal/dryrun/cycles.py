"""Reference cycles, which Python collects when it likes, and with them storages of a rehearsal."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_collected() -> Iterator[None]:
    """Inside the `with` block cycles are collected between phases only, so that two rehearsals free in the same order.

    What is there before is frozen, because going through all of transformers takes longer than a phase.
    """
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
