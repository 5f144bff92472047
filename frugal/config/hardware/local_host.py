"""The host that this process runs on: installed versions, processor, GPU driver, and host memory. No torch here."""

import ctypes
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no types

from frugal.errors import logger
from frugal.units import MIB

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (  # limit, use, and what of the use can be dropped, of versions 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)

HELD_BYTES = 64 * MIB
"""Less than this is used by the driver: the smallest CUDA context takes a few hundred MiB."""

_CPU_INFO, _DRIVER = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


PACKAGES = {"frugal": "frugal-trainer", "torch": "torch", "deepspeed": "deepspeed", "transformers": "transformers"}
"""Packages whose versions must be the same on all ranks: name for people, and name as a package."""

LIBRARIES = ("torch", "deepspeed", "transformers")
"""Packages that a plan's memory depends on."""


def versions() -> dict[str, str]:
    """Return the installed versions of `PACKAGES`; `none` if a package is not installed."""
    return {name: _version(package) for name, package in PACKAGES.items()}


def library_versions() -> dict[str, str]:
    """Return the installed versions of `LIBRARIES`; `none` if one is not installed."""
    return {name: _version(name) for name in LIBRARIES}


def other_versions(recorded: Mapping[str, str]) -> str:
    """Describe which packages were recorded with other versions than are installed; empty if none.

    A suffix such as `+cpu` names a build of torch, which changes no memory: a plan made where there is no GPU holds.
    """
    here = versions()
    others = [name for name in here if recorded.get(name, here[name]).partition("+")[0] != here[name].partition("+")[0]]
    planned, installed = (", ".join(f"{name} {each[name]}" for name in others) for each in (recorded, here))
    return f"the plan was made with {planned}; installed here: {installed}" if others else ""


def fused_kernels() -> str:
    """Return the installed versions of the fused kernels that a plan may use; empty if they cannot run."""
    installed = {name: _version(name) for name in ("liger-kernel", "triton")}
    return "" if "none" in installed.values() else ", ".join(f"{name} {number}" for name, number in installed.items())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _search(pattern: str, path: Path) -> str:
    """Return the first group of a pattern in a file; empty without such a file or text."""
    with suppress(OSError, IndexError):
        return str(re.findall(pattern, path.read_text(), re.MULTILINE)[0])
    return ""


def cpu_name() -> str:
    """Return the kernel's name of the processor, or else its architecture."""
    return _search(r"^model name\s*:\s*(.+)$", _CPU_INFO).strip() or f"CPU, {platform.machine()}"


def cuda_driver() -> str:
    """Return the version of NVIDIA's driver, such as `580.95.05`; empty if it is not known."""
    return _search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _DRIVER)


def has_cuda_driver() -> bool:
    """Return whether CUDA's driver is where torch looks for it: among the system's libraries, or beside torch's own."""
    with suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return any(Path(sys.prefix).glob("lib/python3.*/site-packages/nvidia/*/lib/libcuda.so.1"))


def available_bytes() -> int:
    """Return the host memory, bytes, that may be allocated before a process is killed: of machine and container.

    A container's limit is its control group's, of which page cache that can be dropped does not count.
    """
    available = int(psutil.virtual_memory().available)
    for limit, used, dropped in _LIMITS:
        with suppress(OSError, ValueError):  # no such file, or no limit: `max`
            stat = (_CGROUP / Path(limit).parent / "memory.stat").read_text()
            cache = re.search(rf"^{dropped} (\d+)$", stat, re.MULTILINE)
            left = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
            available = min(available, left + (int(cache[1]) if cache else 0))
    return max(0, available)


def held_on_gpus() -> dict[str, int]:
    """Return the bytes that processes use of each GPU now, by its UUID; empty if the driver's tool does not say.

    Asked of the tool, because asking CUDA makes a context on each GPU, which then holds some itself.
    """
    return held(asked_of_driver("uuid,memory.used"))


def asked_of_driver(fields: str) -> str:
    """Return a line for each GPU with these fields, sizes in MiB, as nvidia-smi says it; empty if it does not."""
    question = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(question, capture_output=True, text=True, timeout=20, check=True).stdout
    return ""


def held(answer: str) -> dict[str, int]:
    """Parse the tool's answer: a line `GPU-UUID, MiB` for each GPU; other lines are left out."""
    held = re.findall(r"^\s*(?:GPU-)?([0-9a-f-]{36}), (\d+)\s*$", answer, re.MULTILINE)
    return {uuid: int(number) * MIB for uuid, number in held if int(number) * MIB >= HELD_BYTES}


def peak_rss() -> int:
    """Return the highest resident set of this process since `forget_peak_rss`, bytes."""
    return int(_search(r"VmHWM:\s*(\d+) kB", _STATUS) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def forget_peak_rss() -> int:
    """Reset the peak, if the kernel allows it, and return the resident set now, bytes."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")  # man 5 proc: resets VmHWM
    return int(psutil.Process().memory_info().rss)


MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # parameters of mallopt, from malloc.h
LARGE_BYTES = 1 << 20


def give_back_large_blocks() -> None:
    """Have glibc map blocks from 1 MiB on by themselves, so that they return to the system when they are freed.

    By default it learns from blocks that are freed to keep those of up to 32 MiB on its heaps, of which every thread
    has its own: measured, a run that offloads 34M parameters then takes 100 to 160 MB more than its tensors, and 13 to
    37 MB more with this (bench/memory/host_memory.py). Mapping costs page faults, which only matter where tensors are
    made on the host all the time. Other allocators are left as they are.
    """
    try:
        set_parameter = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.debug("no glibc here: its allocator is left as it is")
        return
    set_parameter(MMAP_THRESHOLD, LARGE_BYTES)
    set_parameter(TRIM_THRESHOLD, LARGE_BYTES)
