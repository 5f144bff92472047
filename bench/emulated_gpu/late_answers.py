"""Imports `emulated_gpu_answers` in a process that imports DeepSpeed, when torch has been imported.

Not in the workers of dry runs, which answer themselves and look at who asks.

What is compiled here, by Triton or torch.compile, finds the emulated driver by environment variables. torch.compile
launches with Triton's own launcher: torch's would read kernels that do nothing.

A .pth file of the virtual environment imports this module at the start of each process, before anything is known of it.
"""

import importlib.abc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class _BeforeDeepSpeed(importlib.abc.MetaPathFinder):
    """Finds nothing; is asked first for each module."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name == "deepspeed":
            sys.meta_path.remove(self)
            import emulated_gpu_answers  # noqa: F401
        return None


COMPILED = {
    "TRITON_LIBCUDA_PATH": str(Path(__file__).parent / "nvidia" / "cu13" / "lib"),
    "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",
    "TORCHINDUCTOR_USE_STATIC_TRITON_LAUNCHER": "0",
}
for _name, _value in COMPILED.items():
    os.environ.setdefault(_name, _value)

if "frugal.dryrun.worker" not in sys.orig_argv:
    sys.meta_path.insert(0, _BeforeDeepSpeed())
