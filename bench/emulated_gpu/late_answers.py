"""Imports `emulated_gpu_answers` in a process that imports DeepSpeed, when torch has been imported.

Not in the workers of dry runs, which answer themselves and look at who asks.

A .pth file of the virtual environment imports this module at the start of each process, before anything is known of it.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _BeforeDeepSpeed(importlib.abc.MetaPathFinder):
    """Finds nothing; is asked first for each module."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name == "deepspeed":
            sys.meta_path.remove(self)
            import emulated_gpu_answers  # noqa: F401
        return None


if "frugal.dryrun.worker" not in sys.orig_argv:
    sys.meta_path.insert(0, _BeforeDeepSpeed())
