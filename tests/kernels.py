"""Kernels of DeepSpeed that tests need compiled; `python -m tests.kernels` compiles the one that all of them share.

They lie beside the packages that they were compiled against, whatever is compiled elsewhere on the machine.
"""

import os
import shutil
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "torch_extensions"


def is_compiled(*names: str) -> bool:
    """Return whether all of them are."""
    return all(any(FOLDER.rglob(f"{name}.so")) for name in names)


needs_cpu_adam = pytest.mark.skipif(
    not is_compiled("cpu_adam"), reason="DeepSpeed's CPUAdam is not compiled: python -m tests.kernels"
)
needs_adams = pytest.mark.skipif(
    not is_compiled("fused_adam", "cpu_adam"),
    reason="DeepSpeed's kernels are not compiled: train once with --optimizer adamw,implementation=deepspeed and "
    f"TORCH_EXTENSIONS_DIR={FOLDER}",
)
needs_nvme_io = pytest.mark.skipif(
    find_library("aio") is None or not is_compiled("async_io"),
    reason="DeepSpeed's asynchronous I/O takes libaio and minutes to compile: train once with --offload nvme and "
    f"TORCH_EXTENSIONS_DIR={FOLDER}",
)


def main() -> None:
    """Compile CPUAdam where there is a compiler."""
    if is_compiled("cpu_adam"):
        return
    if not (shutil.which("ninja") and (shutil.which("c++") or shutil.which("g++"))):
        print("no C++ compiler or no ninja: tests of DeepSpeed's CPUAdam will be skipped")
        return
    os.environ.update(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(FOLDER))
    from frugal.deepspeed_adapter.kernels import compile_adam  # after the device was chosen

    compile_adam(on_host=True)


if __name__ == "__main__":
    main()
