"""Imports of large libraries without what takes longest in them, and a search, which makes no garbage either."""

import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

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


def python_words() -> list[str]:
    """Return the words that start Python on a module with the path of this process: where this folder does not lead it,
    as of the command `frugal`, files in it, such as a random.py, do not stand for libraries' (`-P`)."""
    return [sys.executable] if Path(sys.path[0]).resolve() == Path.cwd() else [sys.executable, "-P"]


def uncompiled() -> AbstractContextManager[Any]:
    """Leave functions as they are that libraries compile when they are imported inside the `with` block.

    torch.compile imports Inductor: a second of a planner's start, three of a rank's, for functions that none runs.
    """
    from unittest.mock import patch  # with asyncio and ssl, which a plan from the cache does not need

    import torch

    def leave(function: Any = None, **_options: Any) -> Any:
        return leave if function is None else function

    return patch.object(torch, "compile", leave)
