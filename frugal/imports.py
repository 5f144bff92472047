"""Work that makes many objects and no garbage: importing torch, DeepSpeed and transformers, and a search."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (100_000, 50, 1000)
"""Objects made before the youngest are looked at, and of the older generations how often; Python's: 700, 10, 10."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Collect garbage less often inside the `with` block.

    The libraries make a million objects at import, which all stay. To look at them again and again took 0.9 of the 4.3
    seconds until a process could dry-run, and an eighth of a search.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
