"""`frugal measure --calibrate`: what this machine does, kept for the plans to come."""

import os
import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import msgspec

from frugal.cli import launcher
from frugal.cli.plan import waiting
from frugal.dryrun.measurement import Measurement
from frugal.errors import FrugalError, RequestError
from frugal.planning.calibration import Calibration, Probe, format_flops, read_all
from frugal.planning.cards import DeviceKind, recognise
from frugal.training import calibrations, circumstances
from frugal.units import format_bytes

STDERR = 2


def calibrate(kind: DeviceKind, num_ranks: int, of_plan: Measurement | None = None) -> Calibration:
    """Probe this machine with `num_ranks` ranks; add what a measured plan took more than was predicted.

    Raises:
        FrugalError: a rank failed, and has said why.
    """
    with TemporaryDirectory(prefix="frugal-") as folder, waiting("calibrating"):
        out = Path(folder) / "probe.json"
        arguments = ["--kind", kind, "--out", str(out)]
        code = launcher.start_ranks(kind, num_ranks, "frugal.training.probe", arguments, stdout=STDERR)
        if code:
            raise FrugalError(f"the calibration ended with exit code {code}", because="its own message is above")
        probe = msgspec.json.decode(out.read_bytes(), type=Probe)
    device, card = _device(kind)
    found = Calibration(
        kind=kind,
        device=device,
        card=card,
        driver=circumstances.cuda_driver() if kind == "cuda" else "",
        torch=calibrations.torch_version(),
        num_ranks=num_ranks,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=shlex.join(["frugal", *sys.argv[1:]]),
        probe=probe,
    )
    return _with_plans(found, of_plan)


def _with_plans(found: Calibration, of_plan: Measurement | None) -> Calibration:
    """What measured plans took, this one and those before: kernels that no probe loads, and bytes nobody foresaw."""
    before = [each for each in read_all(calibrations.folder())[0] if each.file_name == found.file_name]
    for each in before:
        found = replace(found, slack_bytes=max(found.slack_bytes, each.slack_bytes))
    context = None if of_plan is None else of_plan.measured.context_bytes
    if of_plan is None or context is None:
        return found
    expected, measured = of_plan.predicted, of_plan.measured
    return found.of_plan(
        context + measured.workspace_bytes,
        max(0, measured.peak_reserved_bytes - measured.workspace_bytes - expected.peak_reserved_bytes),
    )


def _device(kind: DeviceKind) -> tuple[str, str | None]:
    if kind == "cpu":
        return circumstances.cpu_name(), None
    import torch

    properties = torch.cuda.get_device_properties(0)
    return properties.name, recognise(properties.name, properties.total_memory)


def what_is_here(device: DeviceKind | None, num_ranks: int | None) -> tuple[DeviceKind, int]:
    """What to calibrate where no plan says so: all GPUs, or two CPU ranks, so that a link is measured, too.

    Raises:
        RequestError: GPUs are asked for that are not here.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    kind: DeviceKind = device or ("cuda" if num_gpus else "cpu")
    if kind == "cpu":
        return kind, num_ranks or min(2, len(os.sched_getaffinity(0)))
    if not num_gpus or (num_ranks or 1) > num_gpus:
        raise RequestError(
            f"{num_ranks or 1} GPUs are to be calibrated, there are {num_gpus} here",
            hint="calibrate what is here: frugal measure --calibrate",
        )
    return kind, num_ranks or num_gpus


def report(found: Calibration) -> list[str]:
    """The calibration for people."""
    probe = found.probe
    rows = [(f"matrix, {name}", format_flops(flops)) for name, flops in probe.matrix_flops.items()]
    rows.append(("memory", f"{probe.memory_bandwidth / 1e9:.3g} GB/s"))
    if probe.link_bandwidth is not None:
        rows.append(("between ranks", f"{probe.link_bandwidth / 1e9:.3g} GB/s"))
    if probe.hop_seconds is not None:
        rows.append(("a collective", f"{probe.hop_seconds * 1e6:.1f} microseconds"))
    rows.append(("host optimizer", f"{probe.host_bandwidth / 1e9:.3g} GB/s"))
    if probe.host_link_bandwidth is not None:
        rows.append(("to the host", f"{probe.host_link_bandwidth / 1e9:.3g} GB/s"))
    rows.append(("an operator", f"{probe.operator_seconds * 1e6:.1f} microseconds"))
    if probe.context_bytes is not None:
        rows += [("context", format_bytes(probe.context_bytes)), ("slack", format_bytes(found.slack_bytes))]
    ranks = f"{found.num_ranks} rank{'s' * (found.num_ranks > 1)}"
    driver = f", driver {found.driver}" if found.driver else ""
    return [
        f"{found.device} with {ranks}{driver}, torch {found.torch}",
        *(f"  {name:<16} {value:>18}" for name, value in rows),
    ]


def keep(found: Calibration) -> None:
    """Write it where the next plan looks, and say so on standard error."""
    path = found.write(calibrations.folder())
    click.echo(f"kept in {path}; plans for this device use it unless given --no-calibration", err=True)
