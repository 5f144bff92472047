"""torch's caching allocator for GPUs as its environment variable sets it, for plans and for ranks.

`PYTORCH_ALLOC_CONF` holds options such as `max_split_size_mb:512,expandable_segments:True`. Its older name,
`PYTORCH_CUDA_ALLOC_CONF`, wins where both are set (torch 2.13.0, tried). A plan says whether segments are expandable,
and every rank is started so; the user's other options stay, and are not modelled.
"""

import platform
import re
from collections.abc import Mapping
from dataclasses import replace

from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request

NAME, OLDER_NAME = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""If it is set, every tensor is a `cudaMalloc` of its own."""

_OPTION = re.compile(r"\s*(\w+)\s*:\s*(\[[^]]*\]|[^,]*?)\s*(?:,|$)")


def variable(environment: Mapping[str, str]) -> str:
    """Return the name of the variable that torch reads here."""
    return OLDER_NAME if OLDER_NAME in environment else NAME


def options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator's options by name, as text."""
    return dict(_OPTION.findall(environment.get(variable(environment), "")))


def expandable(environment: Mapping[str, str]) -> bool | None:
    """Return whether the environment asks for expandable segments; None if it does not say."""
    said = options(environment).get("expandable_segments")
    return None if said is None else said == "True"


def settings(cluster: Cluster, environment: Mapping[str, str], expandable_segments: bool) -> dict[str, str]:
    """Return the variable that makes torch's segments as planned, with the user's other options; empty if they are.

    Torch's own default is not to have them expandable.
    """
    if cluster.devices[0].kind != "cuda" or bool(expandable(environment)) == expandable_segments:
        return {}
    given = options(environment) | {"expandable_segments": str(expandable_segments)}
    return {variable(environment): ",".join(f"{name}:{value}" for name, value in given.items())}


def planned(request: Request, cluster: Cluster, environment: Mapping[str, str]) -> Request:
    """Return the request with the segments that this environment asks for, or can have, if it does not say."""
    if cluster.devices[0].kind != "cuda" or request.expandable_segments is not None:
        return request
    said = expandable(environment)
    is_wsl = "microsoft" in platform.release().lower()  # its driver refuses them on some cards, pytorch/pytorch#192330
    if said is None and (is_wsl or options(environment).get("backend") == "cudaMallocAsync"):
        said = False
    return request if said is None else replace(request, expandable_segments=said)


def notes(expandable_segments: bool, cluster: Cluster, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return notes on the environment's options that a plan for GPUs does not follow or does not model."""
    if cluster.devices[0].kind != "cuda":
        return ()
    said, name = expandable(environment), variable(environment)
    others = [
        f"{option}:{value}"
        for option, value in options(environment).items()
        if option != "expandable_segments" and (option, value) != ("backend", "native")
        if not option.startswith("pinned_")  # those of the allocator for pinned memory
    ]
    notes = {
        f"{name} says expandable_segments:{said}, and the plan was made for {expandable_segments}: ranks run with "
        "what was planned; a new plan follows it": said not in (None, expandable_segments),
        f"{name} has {','.join(others)}, which plans do not model: the allocator may add more": others,
        f"{UNCACHED} is set: tensors are allocated one by one, which plans do not model, and which is far "
        "slower": environment.get(UNCACHED),
    }
    return tuple(note for note, holds in notes.items() if holds)
