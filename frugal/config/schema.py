"""What can be set, under one name in flags, in frugal.toml and in Python, and what it means.

`frugal.toml`: the same settings as the flags, in a file.

Planning's settings stand at the top, under the flags' names (`global-batch` or `global_batch`). A table `[train]`
holds what only `frugal train` knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import msgspec

from frugal.config import cluster, sample_lengths
from frugal.config.build_cluster import machines
from frugal.config.calibration import Calibration
from frugal.config.cluster import Cluster
from frugal.config.learning_rate import Rule
from frugal.config.optimizers import OptimizerImplementation, OptimizerName
from frugal.config.request import (
    AccumulationDtype,
    ActivationCheckpointingChoice,
    LossChoice,
    OffloadChoice,
    Precision,
    Request,
    Task,
)
from frugal.errors import RequestError

REQUEST_NAMES = tuple(field.name for field in fields(Request))
CLUSTER_NAMES = (
    "gpus", "nodes", "hostfile", "mem", "gpu", "held", "host_mem", "host_disk", "device", "calibration",
)  # fmt: skip
NAMES = REQUEST_NAMES + CLUSTER_NAMES

_CHOICES = {
    "task": get_args(Task),
    "precision": get_args(Precision),
    "optimizer": get_args(OptimizerName),
    "optimizer_implementation": get_args(OptimizerImplementation),
    "activation_checkpointing": get_args(ActivationCheckpointingChoice),
    "loss": get_args(LossChoice),
    "gradient_accumulation_dtype": get_args(AccumulationDtype),
    "lr_rule": get_args(Rule),
    "offload": get_args(OffloadChoice),
    "device": get_args(cluster.DeviceKind),
}
_TEXT = {"model", "gpu", "hostfile", "nvme_path"}
_FLOATS = {"learning_rate", "weight_decay", "gradient_clipping", "momentum"}
_MEMORY = {"mem", "held", "host_mem", "host_disk"}
_SWITCHES = {"calibration", "overlap_comm", "pack"}


def understand(
    settings: Mapping[str, Any], calibration: Calibration | None = None
) -> tuple[Request, Cluster, tuple[str, ...]]:
    """The request, the cluster, and the names of the request's fields that were left to their defaults.

    `settings` maps names in `NAMES` to values; None is the same as not given. Memory and disk are bytes, or text such
    as `12G`; `mem` may be one value a GPU of the node, `12G,24G` or a list, and so may `held`, what others keep of it;
    `gpu` is a card, or one a GPU: `a100-40g,a100-80g`. `hostfile` is a path, see `frugal.config.hostfile`.
    `calibration` is that of the devices, if they have one and it is wanted.

    Raises:
        RequestError: an unknown name, a value of the wrong kind, or no GPUs or memory given.
    """
    request, defaults = requested(settings)
    given = {name: value for name, value in settings.items() if value is not None}
    return request, machines(given, request.precision, calibration), defaults


def requested(settings: Mapping[str, Any]) -> tuple[Request, tuple[str, ...]]:
    """Of `understand` what is asked for, without what there is to run it on. Raises as `understand`."""
    for name, value in settings.items():
        check(name, value)
    given = {name: value for name, value in settings.items() if value is not None}
    if given.get("pack") and not isinstance(given.get("lengths"), sample_lengths.Lengths | None):
        raise RequestError(
            "--pack was given together with --lengths",
            because="packed samples have other lengths than the documents in them",
            hint="leave --lengths out, or give the documents themselves with --data",
        )
    if "lengths" in given:
        given["lengths"] = sample_lengths.of(given["lengths"])
    request = Request(**{name: value for name, value in given.items() if name in REQUEST_NAMES})
    defaults = tuple(
        field.name
        for field in fields(Request)
        if field.name not in given
        and (field.default is not None or (field.name == "global_batch" and "global_tokens" not in given))
    )
    return request, defaults


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
            isinstance(value, str | int) or (name in ("mem", "held") and isinstance(value, list | tuple)),
        )
    elif name == "lengths":
        kind = "a file, a list of tokens or a table of tokens and samples"
        right = isinstance(value, str | list | tuple | Mapping | sample_lengths.Lengths)
    elif name in _TEXT:
        kind, right = "text", isinstance(value, str)
    elif name in _FLOATS:
        kind, right = "a number", isinstance(value, int | float)
    else:
        kind, right = "a whole number", isinstance(value, int)
    if not right or isinstance(value, bool):
        raise RequestError(f"`{name}`{place} is {value!r}", because=f"it must be {kind}")


FILE_NAME = "frugal.toml"


@dataclass(frozen=True)
class TomlFile:
    """What a file sets. `path` is None where there is no file."""

    path: Path | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


def read_toml(path: Path | None) -> TomlFile:
    """The settings in `path`; without one, in `frugal.toml` here, if there is one.

    Raises:
        RequestError: no such file, no TOML, or a setting that is unknown or of the wrong kind.
    """
    if path is None:
        path = Path(FILE_NAME)
        if not path.is_file():
            return TomlFile()
    try:
        content = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise RequestError(f"cannot read {path}", because=str(error.strerror)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not TOML", because=str(error)) from None
    train = content.pop("train", {})
    if not isinstance(train, dict):
        raise RequestError(f"`train` in {path} is {train!r}", because="it must be a table", hint="write [train]")
    plan = {_name(key): value for key, value in content.items()}
    for name, value in plan.items():
        check(name, value, source=str(path))
    return TomlFile(path, plan, {_name(key): value for key, value in train.items()})


def _name(key: str) -> str:
    """A flag's spelling, as a Python name."""
    return key.replace("-", "_")
