"""Ways of taking a run's optimizer steps, with the seconds they really took on this machine: a file for each device.

`frugal train --calibrate` adds what a run has measured in its first steps; plans of the same training on as many
devices of the same kind take it into account (`by_measurement`). One run says nothing of another model, another batch
or other sample lengths, so that each is only used for the question that it answers: see `question_of`.

A file keeps the newest `MOST_RUNS`. It is written atomically, by one process at a time. What cannot be read is left as
it is, by plans and by runs.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import hypot
from pathlib import Path
from typing import Any

import msgspec

from frugal import files
from frugal.config.hardware.calibration import calibration_folder
from frugal.config.hardware.cluster import Cluster, DeviceKind
from frugal.config.hardware.local_host import cpu_name, cuda_driver, library_versions, versions
from frugal.config.request import Request
from frugal.errors import RequestError
from frugal.planning.batch import BatchPlan
from frugal.planning.plan import ModelSummary
from frugal.planning.strategy import Strategy

SCHEMA = 1

MOST_RUNS = 64
"""Of one device; older ones are dropped."""

LEAST_GAIN = 0.01
"""A way is only faster than another by more than this part of its seconds."""

STANDARD_ERRORS = 3
"""And by more than so many of the difference: few steps say what they are, and the best of several ways is taken."""

NOT_TIMED = ("learning_rate", "reference_batch", "lr_rule", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Settings of a request on which the seconds of a step do not depend."""


def noise(first: float, second: float) -> float:
    """What two ways may differ by though none is faster, from the standard errors of both."""
    return STANDARD_ERRORS * hypot(first, second)


@dataclass(frozen=True, kw_only=True)
class MeasuredWay:
    """One way of taking steps, and the seconds of one: the median, for the typical work of all steps of its run.

    `error`: standard error of `seconds`, as a part of them; None where too few steps were measured to say.
    """

    strategy: Strategy
    batch: BatchPlan
    seconds: float
    error: float | None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf") or (self.error is not None and not 0 <= self.error < float("inf")):
            raise ValueError(f"{self.seconds} seconds a step are none")

    @property
    def name(self) -> tuple[object, ...]:
        """What makes it another way than others of its question."""
        batch = self.batch
        return self.strategy, batch.micro_batch, batch.accumulation_steps, batch.overhead_tokens


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What one run has measured in its first steps, one way after the other: compared under the same load.

    `question`: see `question_of`. `model` and `num_ranks` are in it, and here for whoever looks for it. `date` is that
    of the measurement, `folder` the run's.
    """

    question: str
    model: str
    num_ranks: int
    date: str
    folder: str
    ways: tuple[MeasuredWay, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredDevice:
    """A file: the runs of one device under one driver and torch, the newest last."""

    schema: int = SCHEMA
    kind: DeviceKind
    device: str
    card: str | None
    driver: str
    torch: str
    runs: tuple[MeasuredRun, ...] = ()

    @property
    def file_name(self) -> str:
        """Its place in the folder: one file a key."""
        key = msgspec.json.encode([self.kind, self.device, self.driver, self.torch])
        return f"{self.kind}-{hashlib.sha256(key).hexdigest()[:12]}.json"

    def is_of(self, cluster: Cluster) -> bool:
        """Whether the cluster's devices are such, as far as it can be known here."""
        kind, names = cluster.devices[0].kind, {device.name for device in cluster.kinds}
        if kind != self.kind or self.torch != library_versions()["torch"]:
            return False
        if kind == "cpu":
            return self.device == cpu_name()
        return names <= {self.card, self.device} and cuda_driver() in ("", self.driver)


def question_of(request: Request, model: ModelSummary, cluster: Cluster) -> str:
    """A digest of all that the seconds of a way depend on, besides the way and the load of the machine.

    The request with its pins, as they say which ways there are; the model; devices and how many a node has; versions.
    How much memory there is, is not part of it: a way that does not fit is not taken.
    """
    asked: dict[str, Any] = {each.name: getattr(request, each.name) for each in fields(request)}
    asked = {name: value for name, value in asked.items() if name not in NOT_TIMED}
    if request.global_tokens is None:
        asked["global_batch"] = request.batch_samples  # also where it was left to its default
    if request.lengths is not None:
        asked["lengths"] = replace(request.lengths, source="")
    what = (model.task, model.parameters, model.trainable_parameters, model.largest_parameter)
    where = [len(node.devices) for node in cluster.nodes], sorted({device.name for device in cluster.kinds})
    return hashlib.sha256(msgspec.json.encode([asked, what, where, versions()], order="sorted")).hexdigest()


def measured_folder() -> Path:
    """Beside the calibrations. Raises as `calibration_folder`."""
    return calibration_folder().with_name("measured")


def known(request: Request, cluster: Cluster) -> tuple[tuple[MeasuredRun, ...], list[str]]:
    """Runs of the model on so many such devices, the newest last, and a note for each file that cannot be read."""
    runs, notes = [], []
    try:
        paths = sorted(measured_folder().glob("*.json"))
    except (OSError, RequestError):  # none may be read, or a user without a home
        return (), []
    for path in paths:
        try:
            kept = _read(path)
        except RequestError as error:
            notes.append(f"what was measured on a device is ignored: {error.what}: {'; '.join(error.because)}")
            continue
        if kept.is_of(cluster):
            runs += [run for run in kept.runs if (run.model, run.num_ranks) == (request.model, cluster.world_size)]
    return tuple(runs), notes


def keep(run: MeasuredRun, device: MeasuredDevice) -> Path:
    """Add a run to the file of its device; the file. `device` has no runs of its own.

    Raises:
        RequestError: the file cannot be read, or not be written. It is what it was.
    """
    path = measured_folder() / device.file_name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.alone(path.with_suffix(".lock")):
            before = _read(path).runs if path.exists() else ()
            text = msgspec.json.encode(replace(device, runs=(*before, run)[-MOST_RUNS:]))
            files.write_file(path, msgspec.json.format(text, indent=1) + b"\n")
    except OSError as error:
        raise RequestError(f"cannot write {path}", because=str(error.strerror)) from None
    return path


def _read(path: Path) -> MeasuredDevice:
    """Raises RequestError: it cannot be read, is damaged, or of another version."""
    try:
        text = files.read_regular(path)
        schema = msgspec.json.decode(text, type=dict[str, Any]).get("schema")
        if schema != SCHEMA:
            raise RequestError(
                f"cannot read {path}",
                because=f"it has schema {schema}, this frugal reads schema {SCHEMA}",
                hint="move it away to begin a new one",
            )
        return msgspec.json.decode(text, type=MeasuredDevice)
    except (OSError, msgspec.DecodeError, ValueError, AssertionError, RecursionError) as error:
        because = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RequestError(f"cannot read {path}", because=because, hint="move it away to begin a new one") from None


def newest_first(runs: Sequence[MeasuredRun], question: str) -> list[MeasuredRun]:
    """Those that answer a question."""
    return [run for run in reversed(runs) if run.question == question]
