"""What DeepSpeed compiles on first use: its Adam of host and device, and its asynchronous I/O."""

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no types
from deepspeed.accelerator import get_accelerator

from frugal.errors import RequestError

logger = logging.getLogger("frugal")


def compile_adam(*, on_host: bool, in_part: bool = False) -> None:
    """Compile DeepSpeed's Adam, or load what was compiled before: minutes the first time on a machine.

    Raises:
        RequestError: it cannot be compiled.
    """
    name, called = ("CPUAdamBuilder", "DeepSpeedCPUAdam") if on_host else ("FusedAdamBuilder", "FusedAdam")
    try:
        _load(name)
    except Exception as error:  # whatever a compiler, a linker or a missing CUDA toolkit makes torch raise
        other_way = "plan with --offload-ratio 1" if in_part else "leave out --optimizer-implementation"
        raise RequestError(
            f"DeepSpeed's {called} cannot be compiled here",
            because=str(error).strip().splitlines()[0],
            hint=f"install a C++ compiler, ninja and, for GPUs, the CUDA toolkit; or {other_way}: torch's fused "
            "kernels need none of them",
        ) from None


def compile_nvme_io() -> None:
    """Compile DeepSpeed's asynchronous I/O, or load what was compiled before: minutes the first time on a machine.

    Raises:
        RequestError: it cannot be compiled.
    """
    try:
        _load("AsyncIOBuilder")
    except Exception as error:  # whatever a compiler, a linker or a missing library makes torch raise
        raise RequestError(
            "DeepSpeed's asynchronous I/O cannot be compiled here",
            because=str(error).strip().splitlines()[0],
            hint="install libaio with its headers (`apt install libaio-dev`), a C++ compiler and ninja; or plan "
            "without --nvme-path",
        ) from None


def _load(builder_name: str) -> None:
    from torch.utils.cpp_extension import get_default_build_root  # of no use to who compiles nothing

    builder = get_accelerator().create_op_builder(builder_name)
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.glob(f"**/{builder.name}/lock"):
        wait_for_compiler(lock)
    builder.load(verbose=False)


QUIET_SECONDS = 180.0
"""A source of DeepSpeed takes about a minute of a core to compile, after which its object is written."""


def wait_for_compiler(lock: Path, quiet_seconds: float = QUIET_SECONDS) -> None:
    """Return once the file `lock` is gone, or remove it where nobody compiles any more.

    While torch compiles an extension a file of that name lies in the extension's folder, and others wait for its end,
    without a word and without a limit. A process that is killed meanwhile leaves it behind. So it is removed when no
    process here has it open, as torch has while it compiles, and nothing in its folder has changed for
    `quiet_seconds`: another host may have the same home.
    """
    told = False
    while lock.exists():
        with (lock.parent / _GUARD).open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)  # of two ranks the second would remove the new file of the first
            if lock.exists() and _is_left_behind(lock, quiet_seconds):
                lock.unlink(missing_ok=True)
                logger.warning("removed %s: the process that compiled there has ended", lock)
                return
        if not told:
            logger.warning("waiting for another process to compile %s", lock.parent)
            told = True
        time.sleep(0.5)


_GUARD = ".frugal-lock"


def _is_left_behind(lock: Path, quiet_seconds: float) -> bool:
    last = 0.0
    for each in lock.parent.iterdir():
        with suppress(FileNotFoundError):  # the compiler has removed it
            last = max(last, each.stat().st_mtime if each.name != _GUARD else 0.0)
    return time.time() - last > quiet_seconds and not _is_open(lock.resolve())


def _is_open(path: Path) -> bool:
    for process in psutil.process_iter():
        try:
            if any(each.path == str(path) for each in process.open_files()):
                return True
        except (psutil.Error, OSError):  # it has ended, or belongs to somebody else
            continue
    return False
