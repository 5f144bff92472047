"""What can be set, under one name in flags, in frugal.toml and in Python, and what it means."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_args

from frugal.errors import RequestError
from frugal.planning import cards
from frugal.planning.calibration import Calibration
from frugal.planning.cluster import MOST_RANKS, Cluster, Device, Node
from frugal.planning.learning_rate import Rule
from frugal.planning.optimizers import OptimizerImplementation, OptimizerName
from frugal.planning.request import (
    ActivationCheckpointingChoice,
    LossChoice,
    OffloadChoice,
    Precision,
    Preference,
    Request,
    Task,
)
from frugal.units import parse_bytes

REQUEST_NAMES = tuple(field.name for field in fields(Request))
CLUSTER_NAMES = ("gpus", "nodes", "mem", "gpu", "host_mem", "device", "calibration")
NAMES = REQUEST_NAMES + CLUSTER_NAMES

_CHOICES = {
    "task": get_args(Task),
    "precision": get_args(Precision),
    "optimizer": get_args(OptimizerName),
    "optimizer_implementation": get_args(OptimizerImplementation),
    "activation_checkpointing": get_args(ActivationCheckpointingChoice),
    "loss": get_args(LossChoice),
    "prefer": get_args(Preference),
    "lr_rule": get_args(Rule),
    "offload": get_args(OffloadChoice),
    "device": get_args(cards.DeviceKind),
}
_TEXT = {"model", "gpu", "nvme_path"}
_FLOATS = {"learning_rate", "weight_decay", "gradient_clipping", "momentum"}
_MEMORY = {"mem", "host_mem"}
_SWITCHES = {"calibration", "overlap_comm"}


def understand(
    settings: Mapping[str, Any], calibration: Calibration | None = None
) -> tuple[Request, Cluster, tuple[str, ...]]:
    """The request, the cluster, and the names of the request's fields that were left to their defaults.

    `settings` maps names in `NAMES` to values; None is the same as not given. `mem` and `host_mem` are bytes, or text
    such as `12G`; `mem` may be one value a GPU of the node, `12G,24G` or a list. `calibration` is that of the devices,
    if they have one and it is wanted.

    Raises:
        RequestError: an unknown name, a value of the wrong kind, or no GPUs or memory given.
    """
    for name, value in settings.items():
        check(name, value)
    given = {name: value for name, value in settings.items() if value is not None}
    request = Request(**{name: value for name, value in given.items() if name in REQUEST_NAMES})
    defaults = tuple(
        field.name
        for field in fields(Request)
        if field.name not in given
        and (field.default is not None or (field.name == "global_batch" and "global_tokens" not in given))
    )
    return request, _cluster(given, request.precision, calibration), defaults


def check(name: str, value: Any, *, source: str = "") -> None:
    """Whether a setting of this name may have this value; `source` names the file it stands in.

    Raises:
        RequestError: it may not.
    """
    place = f" in {source}" if source else ""
    if name not in NAMES:
        close = get_close_matches(name, NAMES, n=1)
        raise RequestError(
            f"unknown setting `{name}`{place}",
            hint=f"did you mean `{close[0]}`?" if close else "see `frugal plan --help`",
        )
    if value is None:
        return
    choices = _CHOICES.get(name)
    if choices is not None:
        if value not in choices:
            raise RequestError(f"`{name}`{place} is {value!r}", because=f"it must be one of {', '.join(choices)}")
        return
    if name in _SWITCHES:
        if not isinstance(value, bool):
            raise RequestError(f"`{name}`{place} is {value!r}", because="it must be true or false")
        return
    if name in _MEMORY:
        kind, right = (
            "an amount such as 12G",
            isinstance(value, str | int) or (name == "mem" and isinstance(value, list | tuple)),
        )
    elif name in _TEXT:
        kind, right = "text", isinstance(value, str)
    elif name in _FLOATS:
        kind, right = "a number", isinstance(value, int | float)
    else:
        kind, right = "a whole number", isinstance(value, int)
    if not right or isinstance(value, bool):
        raise RequestError(f"`{name}`{place} is {value!r}", because=f"it must be {kind}")


def _cluster(given: Mapping[str, Any], precision: Precision, calibration: Calibration | None) -> Cluster:
    for name in ("gpus", "nodes"):
        if given.get(name, 1) < 1:
            raise RequestError(f"--{name} is {given[name]}", because="it must be at least 1")
    num_ranks = given.get("gpus", 1) * given.get("nodes", 1)
    if num_ranks > MOST_RANKS:
        raise RequestError(
            f"{given.get('nodes', 1)} node{'s' * (given.get('nodes', 1) > 1)} with {given.get('gpus', 1)} GPUs is more "
            "than frugal plans for",
            because=f"a plan names every GPU, and can do so for {MOST_RANKS:,}",
        )
    card = cards.find(given["gpu"]) if "gpu" in given else None
    if "mem" not in given and given.get("device") == "cpu":
        raise RequestError(
            "the memory of a CPU rank is not known",
            because="--mem was not given",
            hint=f"frugal plan --device cpu --gpus {given.get('gpus', 2)} --mem 2G",
        )
    if "mem" not in given and card is None:
        raise RequestError(
            "the memory of a GPU is not known",
            because="--mem was not given, and no GPU was found here",
            hint="frugal plan --gpus 4 --mem 12G",
        )
    memory = _memory(given["mem"]) if "mem" in given else None
    if memory is not None and len(memory) > 1 and given.get("gpus", len(memory)) != len(memory):
        raise RequestError(
            f"--gpus {given['gpus']} does not go with {len(memory)} amounts of memory",
            because="--mem names one amount for all GPUs of a node, or one for each",
        )
    num_gpus = given.get("gpus", len(memory) if memory is not None and len(memory) > 1 else None)
    if num_gpus is None:
        raise RequestError(
            "the number of GPUs is not known",
            because="--gpus was not given, and no GPU was found here",
            hint="frugal plan --gpus 4 --mem 12G",
        )
    num_nodes = given.get("nodes", 1)
    world_size = num_gpus * num_nodes
    amounts = memory * num_gpus if memory is not None and len(memory) == 1 else memory
    host_memories = _memory(given["host_mem"]) if "host_mem" in given else (None,)
    if len(host_memories) > 1:
        raise RequestError(
            f"--host-mem names {len(host_memories)} amounts",
            because="all nodes are alike",
            hint="give one, such as --host-mem 64G",
        )
    (host_memory,) = host_memories
    devices: tuple[Device, ...]
    if given.get("device", "cuda") == "cpu":
        if amounts is None:
            raise RequestError(
                "--gpu names a card, but --device is cpu", hint="give the budget of a CPU rank: --mem 2G"
            )
        devices = tuple(cards.cpu_rank(amount) for amount in amounts)
        intra = cards.CPU_LINK_BANDWIDTH
    else:
        known = card or cards.GENERIC
        devices = tuple(
            known.device(precision, num_gpus=world_size, memory_bytes=amount)
            for amount in amounts or (None,) * num_gpus
        )
        intra = known.link_bandwidth
    link = None
    if calibration is not None:
        link = calibration.probe.link_bandwidth
        devices = tuple(
            calibration.apply(device, precision, num_ranks=world_size, ranks_per_node=num_gpus) for device in devices
        )
    node = Node(devices=devices, host_memory_bytes=host_memory)
    return Cluster(
        nodes=(node,) * num_nodes,
        intra_bandwidth=intra if link is None else link,
        inter_bandwidth=cards.INTER_NODE_BANDWIDTH,
        links_measured=link is not None,
    )


def _memory(value: str | int | list[str | int] | tuple[str | int, ...]) -> tuple[int, ...]:
    """Bytes of each amount in `value`."""
    if isinstance(value, str):
        return tuple(parse_bytes(part) for part in value.split(","))
    if isinstance(value, int):
        return (value,)
    return tuple(part if isinstance(part, int) else parse_bytes(part) for part in value)
