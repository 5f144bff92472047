"""Calibrations: measured speeds and memory of this machine, which plans use instead of assumptions. No torch here."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from frugal import files
from frugal.config.hardware.cluster import CARDS, GENERIC, Capability, Cluster, Device, DeviceKind, margin_bytes
from frugal.config.hardware.context import LATER_KERNELS_BYTES, among_ranks
from frugal.config.hardware.local_host import cpu_name, cuda_driver, library_versions
from frugal.config.request import Precision
from frugal.errors import RequestError, failure
from frugal.units import GIB, format_bytes

MOST_CONTEXT_BYTES = 8 * GIB
"""More than any driver takes: such a measurement was made on a device that others used too."""

MOST_MATRIX_FLOPS, MOST_BANDWIDTH = 5e15, 2e13
"""FLOP/s and bytes/s of memory that no device reaches (a B200: 2.25e15 and 8e12, by its data sheet)."""

FASTER_CLOCKS, CACHE_BEFORE_MEMORY = 1.5, 10
"""How far a known card may exceed its data sheet: FLOP/s by its clocks, bytes/s of memory where its cache of up to 128
MiB serves some of the probe's tensors of 64 MiB."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A short measurement of one rank while all ranks of the machine do the same.

    Attributes:
        matrix_flops: FLOP/s of a layer's matrix products, forward and backward, by precision; fp16 only on a GPU.
        memory_bandwidth: bytes/s read and written by operators between them.
        link_bandwidth: bytes/s that a rank sends in a ring; None with one rank.
        hop_seconds: latency of a collective for each doubling of the ranks; None with one rank.
        operator_seconds: host time of one tiny operator, with its share of autograd.
        host_bandwidth: bytes/s that all ranks of the node reach together in AdamW on the host.
        host_link_bandwidth: on a GPU bytes/s of copies to pinned host memory and back.
        context_bytes: on a GPU what the driver counts beyond the allocator's segments.
    """

    matrix_flops: dict[Precision, float]
    memory_bandwidth: float
    link_bandwidth: float | None
    hop_seconds: float | None
    operator_seconds: float
    host_bandwidth: float
    host_link_bandwidth: float | None
    context_bytes: int | None

    def __post_init__(self) -> None:
        speeds = [*self.matrix_flops.values(), self.memory_bandwidth, self.operator_seconds, self.host_bandwidth]
        some = (self.link_bandwidth, self.hop_seconds, self.host_link_bandwidth)
        speeds += [speed for speed in some if speed is not None]
        if not self.matrix_flops or not all(isfinite(speed) and speed > 0 for speed in speeds):
            raise ValueError("a speed is not positive")
        if not 0 <= (self.context_bytes or 0) <= MOST_CONTEXT_BYTES:
            raise ValueError(f"a context of {self.context_bytes} bytes is none")

    @classmethod
    def slowest(cls, ranks: Sequence["Probe"]) -> "Probe":
        """Return the worst number of any rank in each respect: the one that all others wait for."""
        worst: dict[str, Any] = {
            "matrix_flops": {name: min(rank.matrix_flops[name] for rank in ranks) for name in ranks[0].matrix_flops}
        }
        for name in (each.name for each in fields(cls) if each.name not in worst):
            measured = [getattr(rank, name) for rank in ranks if getattr(rank, name) is not None]
            is_better_small = name in ("hop_seconds", "operator_seconds", "context_bytes")
            worst[name] = (max if is_better_small else min)(measured, default=None)
        return cls(**worst)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A probe and where it was made. Device, driver and torch are its key.

    Attributes:
        kind: of device.
        device: its name by the driver, or for a CPU by the kernel.
        card: its name in the table of known cards.
        driver: its version; empty on a CPU.
        torch: its version.
        num_ranks: ranks that were measured at the same time.
        date: of the measurement.
        command: that made it.
        probe: what was measured.
        slack_bytes: the most by which a measured plan took more from the allocator than was predicted.
        compute_capability: of a GPU, as its driver says; None in calibrations of before it was kept.
    """

    kind: DeviceKind
    device: str
    card: str | None
    driver: str
    torch: str
    num_ranks: int
    date: str
    command: str
    probe: Probe
    slack_bytes: int = 0
    compute_capability: Capability | None = None

    def __post_init__(self) -> None:
        card = CARDS.get(self.card or "")
        flops = MOST_MATRIX_FLOPS if card is None else FASTER_CLOCKS * max(card.half_flops, card.fp32_flops)
        bandwidth = MOST_BANDWIDTH if card is None else CACHE_BEFORE_MEMORY * card.memory_bandwidth
        for reached, most, unit in (
            (max(self.probe.matrix_flops.values()) / 1e12, flops / 1e12, "TFLOP/s"),
            (self.probe.memory_bandwidth / 1e9, bandwidth / 1e9, "GB/s"),
        ):
            if reached > most:
                raise ValueError(f"{reached:,.0f} {unit} were measured, and {most:,.0f} are the most possible")

    @property
    def file_name(self) -> str:
        """Name of its file: one per key."""
        key = msgspec.json.encode([self.kind, self.device, self.driver, self.torch])
        return f"{self.kind}-{hashlib.sha256(key).hexdigest()[:12]}.json"

    def of_plan(self, context_bytes: int, slack_bytes: int) -> "Calibration":
        """Return it with the memory that a whole plan took, which loads more kernels than a probe."""
        return replace(
            self,
            probe=replace(self.probe, context_bytes=max(self.probe.context_bytes or 0, context_bytes)),
            slack_bytes=max(self.slack_bytes, slack_bytes),
        )

    def apply(self, device: Device, precision: Precision, *, num_ranks: int, ranks_per_node: int) -> Device:
        """Return `device` with measured numbers.

        Ranks on CPUs share one machine: its FLOP/s and bytes/s are divided anew among as many as are planned. Measured
        on one GPU, NCCL's buffers are still those assumed. What was measured can only grow, by kernels loaded later.
        """
        probe = self.probe
        share = self.num_ranks / ranks_per_node if self.kind == "cpu" else 1.0
        if probe.context_bytes is not None:
            nccl = among_ranks(num_ranks if self.num_ranks == 1 else 1, CARDS.get(device.name, GENERIC).nccl)
            above = LATER_KERNELS_BYTES + nccl.most - nccl.planned
            device = replace(
                device,
                context_bytes=probe.context_bytes + nccl.planned,
                context_below_bytes=nccl.planned - nccl.least,
                context_above_bytes=above,
                margin_bytes=max(
                    margin_bytes(device.memory_bytes, above, is_known_card=device.name in CARDS),
                    above + self.slack_bytes,
                ),
            )
        return replace(
            device,
            matrix_flops=probe.matrix_flops.get(precision, min(probe.matrix_flops.values())) * share,
            memory_bandwidth=probe.memory_bandwidth * share,
            operator_seconds=probe.operator_seconds,
            host_link_bandwidth=probe.host_link_bandwidth or device.host_link_bandwidth,
            measured_on=self.date,
            compute_capability=self.compute_capability or device.compute_capability,
        )

    def of_cluster(self) -> dict[str, float]:
        """Return the measured fields of a `Cluster`, besides its link."""
        hop = {} if self.probe.hop_seconds is None else {"hop_seconds": self.probe.hop_seconds}
        return {"host_bandwidth": self.probe.host_bandwidth, **hop}

    def write(self, folder: Path) -> Path:
        """Write it into `folder`, and return the file.

        Raises:
            RequestError: the folder cannot be written to.
        """
        path = folder / self.file_name
        with failure(f"cannot keep the calibration in {folder}", OSError):
            folder.mkdir(parents=True, exist_ok=True)
            files.write_file(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        return path


def read_all(folder: Path) -> tuple[list[Calibration], list[str]]:
    """Return the calibrations in `folder`, and a note for each damaged file."""
    calibrations, notes = [], []
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError as error:
        return [], [f"the calibrations in {folder} cannot be read and are ignored: {error.strerror}"]
    for path in paths:
        try:
            calibrations.append(msgspec.json.decode(files.read_regular(path), type=Calibration))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            notes.append(f"the calibration {path} cannot be read and is ignored: {error}")
    return calibrations, notes


def format_flops(flops: float) -> str:
    """Format a speed: `412 TFLOP/s`, `15.1 GFLOP/s`."""
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def notes(cluster: Cluster) -> list[str]:
    """Return the note of a plan on a calibrated cluster."""
    device = cluster.devices[0]
    if device.measured_on is None:
        return []
    is_gpu = device.kind == "cuda"
    parts = {
        f"context {format_bytes(device.context_bytes)}": is_gpu,
        format_flops(device.matrix_flops): True,
        f"{device.memory_bandwidth / 1e9:.3g} GB/s of memory": True,
        f"{device.operator_seconds * 1e6:.1f} microseconds an operator": True,
        f"{cluster.host_bandwidth / 1e9:.3g} GB/s in an optimizer on the host": True,
        f"{device.host_link_bandwidth / 1e9:.3g} GB/s to the host": is_gpu,
        f"{cluster.intra_bandwidth / 1e9:.3g} GB/s between {'GPUs' if is_gpu else 'ranks'}": cluster.links_measured,
    }
    measured = ", ".join(text for text, is_measured in parts.items() if is_measured)
    return [f"{measured}: as measured on this machine on {device.measured_on}"]


def calibration_folder() -> Path:
    """Return the folder of calibrations: the user's configuration folder, as nothing repeats them automatically.

    Raises:
        RequestError: this user has none.
    """
    with failure("there is no folder for calibrations", RuntimeError):
        return platformdirs.user_config_path("frugal") / "calibration"


def chosen(settings: Mapping[str, Any], gpu_name: str | None = None) -> tuple[Calibration | None, list[str]]:
    """Return the newest calibration for a cluster of these settings, and notes about damaged ones.

    It was made on this device under this driver and torch. `gpu_name` is the driver's name of the GPUs found here;
    without it the card that `settings` name is looked up.
    """
    try:
        known, notes = read_all(calibration_folder())
    except RequestError:  # a user without a home
        return None, []
    kind, card, torch = settings.get("device") or "cuda", settings.get("gpu"), library_versions()["torch"]
    here = (cpu_name(), "") if kind == "cpu" else (gpu_name, cuda_driver())
    matching = [
        each
        for each in known
        if (each.kind, each.torch) == (kind, torch)
        and ((each.device, each.driver) == here if here[0] is not None else each.card == card is not None)
    ]
    return max(matching, key=lambda each: each.date, default=None), notes
