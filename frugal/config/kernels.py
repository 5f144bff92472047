"""Whether a plan may use Liger's fused kernels: what `--kernels` asks for, what is installed, and what the GPUs can."""

import os
from collections.abc import Sequence

from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, Capability, Cluster
from frugal.config.hardware.local_host import fused_kernels
from frugal.config.request import Request
from frugal.errors import RequestError

LEAST_CAPABILITY: Capability = (8, 0)
"""The oldest GPUs that are planned for: Triton and Liger test on these and newer ones."""

INSTALL = "pip install 'frugal-trainer[kernels]', or leave --kernels out"


def are_to_be_fused(request: Request, cluster: Cluster) -> bool:
    """Return whether the plan takes fused kernels if the model has modules for them.

    Planning needs them installed as training does, also where there is no GPU: a dry run calls Liger's own functions.

    Raises:
        RequestError: `--kernels liger` asks for them, and they cannot be had.
    """
    if request.kernels == "plain":
        return False
    obstacle, hint = _obstacle(cluster)
    if obstacle and request.kernels == "liger":
        raise RequestError("--kernels liger is impossible here", because=obstacle, hint=hint)
    return not obstacle


def _obstacle(cluster: Cluster) -> tuple[str, str]:
    """Return what is in the way, and a way out; empty: nothing."""
    capability = min(device.compute_capability or ASSUMED_CAPABILITY for device in cluster.kinds)
    if not fused_kernels():
        return "the packages liger-kernel and triton are not installed", INSTALL
    if any(device.kind == "cpu" for device in cluster.kinds):
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return ("" if is_interpreted else "its kernels run on GPUs alone", "leave --kernels out")
    if capability < LEAST_CAPABILITY:
        number = "{}.{}".format(*capability)
        return f"they need compute capability 8.0 or newer, and there are GPUs of {number}", "leave --kernels out"
    return "", ""


def refuse_none(request: Request, fused: Sequence[str]) -> None:
    """Refuse `--kernels liger` for a model in which nothing would be fused.

    Raises:
        RequestError: it is one.
    """
    if request.kernels == "liger" and not fused:
        raise RequestError(
            f"--kernels liger changes nothing of {request.model}",
            because="none of its modules computes what one of Liger's kernels does",
            hint="leave --kernels out",
        )
