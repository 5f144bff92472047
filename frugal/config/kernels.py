"""The conditions of Liger's fused kernels in a plan: what was asked for, what is installed, what the GPUs can."""

import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, Capability, Cluster
from frugal.config.hardware.local_host import fused_kernels
from frugal.config.request import Request
from frugal.errors import refuse

LEAST_CAPABILITY: Capability = (8, 0)
"""The oldest GPUs that are planned for: Triton and Liger test on these and newer ones."""


def are_to_be_fused(request: Request, cluster: Cluster) -> bool:
    """Return whether the plan takes fused kernels if the model has modules for them.

    Planning needs them installed as training does, also where there is no GPU: a dry run calls Liger's own functions.

    Raises:
        RequestError: `--kernels liger` asks for them, and they cannot be had.
    """
    if request.kernels == "plain":
        return False
    capability = min(device.compute_capability or ASSUMED_CAPABILITY for device in cluster.kinds)
    missing, obstacle, hint = what_is_missing(), "", "leave --kernels out"
    if missing is not None:
        obstacle, hint = missing[0], f"{missing[1]}, or leave --kernels out"
    elif any(device.kind == "cpu" for device in cluster.kinds):
        obstacle = "" if are_interpreted() else "its kernels run on GPUs alone"
    elif capability < LEAST_CAPABILITY:
        obstacle = "they need compute capability 8.0 or newer, and there are GPUs of {}.{}".format(*capability)
    refuse((obstacle and request.kernels == "liger", "--kernels liger is impossible here", obstacle, hint))
    return not obstacle


def what_is_missing() -> tuple[str, str] | None:
    """Return what this machine lacks to run the kernels, and how to get it; None: nothing.

    Triton compiles a program in C for each kernel, which starts it (triton/runtime/build.py).
    """
    if not fused_kernels():
        return "the packages liger-kernel and triton are not installed", "pip install 'frugal-trainer[kernels]'"
    compilers = os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")
    if not any(compilers) or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs a C compiler and Python's headers", "install gcc and python3-dev"
    return None


def are_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, which is slow, and for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refuse_none(request: Request, fused: Sequence[str]) -> None:
    """Refuse `--kernels liger` for a model in which nothing would be fused.

    Raises:
        RequestError: it is one.
    """
    refuse(
        (
            request.kernels == "liger" and not fused,
            f"--kernels liger changes nothing of {request.model}",
            "none of its modules computes what one of Liger's kernels does",
            "leave --kernels out",
        )
    )
