"""`frugal measure`.

`frugal measure --calibrate`: what this machine does, kept for the plans to come.
"""

import os
import platform
import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import click
import msgspec

from frugal import temporary
from frugal.cli.display.terminal import waiting
from frugal.config.hardware import calibration, local_host
from frugal.config.hardware.calibration import Calibration, Probe, format_flops, read_all
from frugal.config.hardware.cluster import Capability, Device, DeviceKind, recognise_card
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.compare import Measurement, host_bytes_per_node, predicted
from frugal.dryrun.figures import Figures, fullest
from frugal.dryrun.messages import DryRun
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError, OutOfMemoryError, RequestError
from frugal.launch import local
from frugal.planning.memory import timeline_files
from frugal.planning.memory.timeline import Timeline
from frugal.planning.plan import Plan
from frugal.training.measure.record import Capped, Measured, Trial, timeline_name
from frugal.units import format_bytes, plural

RECORDS = Path("tests/measured")


@click.command("measure")
@click.argument("path", metavar="[PLAN]", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print what was measured for programs.")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    is_flag=False,
    flag_value=RECORDS,
    help=f"Keep the measurement in this folder, too; predictions are tested against it.  [--record alone: {RECORDS}]",
)
@click.option(
    "--capped", is_flag=True, help="Run again with an allocator that may take no more of the GPUs than was predicted."
)
@click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    help="Write what lives after every event, predicted and measured: a .pickle for torch's memory_viz, or a "
    ".trace.json for Perfetto.",
)
@click.option("--calibrate", "calibrating", is_flag=True, help="Keep what this machine can do, for the next plans.")
@click.option("--device", type=click.Choice(get_args(DeviceKind)), help="What to calibrate without a plan.")
@click.option("--gpus", type=int, help="How many GPUs (or CPU ranks) to calibrate without a plan.  [default: all]")
def command(
    path: Path | None,
    as_json: bool,
    record: Path | None,
    capped: bool,
    timeline: Path | None,
    calibrating: bool,
    device: DeviceKind | None,
    gpus: int | None,
) -> int:
    """Run a plan for two optimizer steps on synthetic samples, and hold its memory against the dry run.

    Live tensor bytes on CPU ranks; on GPUs what the caching allocator and the driver count. More than two micro-steps
    count as two. With --calibrate the machine is measured, too, or alone.
    """
    _check(path, record=record, capped=capped, timeline=timeline, calibrating=calibrating, device=device, gpus=gpus)
    if timeline is not None:
        timeline_files.check_file(timeline, has_tables=False)
    measurement: Measurement | None = None
    written: list[Path] = []
    calibration: Calibration | None = None
    if path is not None:
        measured = _measured(Plan.read(path), path, record, capped, timeline)
        if isinstance(measured, int):
            return measured
        measurement, written = measured
    if calibrating:
        if measurement is not None:
            kind, num_ranks = measurement.cluster.devices[0].kind, measurement.batch.world_size
        else:
            kind, num_ranks = what_is_here(device, gpus)
        calibration = calibrate(kind, num_ranks, measurement)
        keep(calibration)
    if as_json:
        content = {} if measurement is None else _summary(measurement)
        content |= {} if calibration is None else {"calibration": msgspec.to_builtins(calibration)}
        click.echo(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
    else:
        blocks = [] if measurement is None else [_report(measurement)]
        blocks += [] if calibration is None else [report(calibration)]
        blocks += [[f"wrote {each}" for each in written]] if written else []
        click.echo("\n\n".join("\n".join(block) for block in blocks))
    enough = measurement is None or measurement.capped is None or measurement.capped.survived
    return 0 if enough else OutOfMemoryError.exit_code


def _check(path: Path | None, *, calibrating: bool, **others: Any) -> None:
    """Refuse what does not go together."""
    if path is None and not calibrating:
        raise RequestError("there is no plan to measure", hint="make one with `frugal plan -o DIR`, or add --calibrate")
    excluded = ("record", "capped", "timeline") if path is None else ("device", "gpus")
    for name in excluded:
        if others[name]:
            raise RequestError(
                f"--{name} was given {'without' if path is None else 'together with'} a plan",
                hint="measure one: frugal measure PLAN" if path is None else f"leave --{name} out: the plan says it",
            )


def _measured(
    plan: Plan, path: Path, record: Path | None, capped: bool, timeline: Path | None
) -> tuple[Measurement, list[Path]] | int:
    """The measurement and the files it was written to; or the exit code that the ranks ended with."""
    kind = plan.cluster.devices[0].kind
    if capped and kind == "cpu":
        raise RequestError(
            "--capped was given, but the plan is for CPU ranks",
            because="only the caching allocator of a GPU can be given less memory than there is",
            hint="leave --capped out",
        )
    local.check_machine(plan, None)
    pool = workers()
    try:
        with waiting(f"dry-running {plan.request.model}"):
            dry_runs = _dry_runs(plan, pool)
        expected = predicted(dry_runs, plan.cluster, expandable_segments=plan.strategy.expandable_segments)
        with temporary.folder() as folder:
            trial = _run(plan, path, None, folder if timeline is not None else None)
            if isinstance(trial, int):
                return trial
            if timeline is not None:
                measured = _timeline_of_fullest(trial, folder)
                timeline_files.write(timeline, {"predicted": fullest(dry_runs, kind).timeline, "measured": measured})
        measurement = _measurement(plan, expected, trial)
        if capped:
            measurement = replace(measurement, capped=_capped(plan, path, measurement))
        written = [] if timeline is None else [timeline]
        written += [_record(measurement, record, pool)] if record is not None else []
    finally:
        pool.close()
    return measurement, written


def _dry_runs(plan: Plan, pool: Pool) -> list[DryRun]:
    with DryRunSource(plan.request, plan.cluster, pool=pool) as source:
        return source.dry_runs(plan.strategy, plan.batch.largest_micro_batch, plan.batch.accumulation_steps)


def _timeline_of_fullest(trial: Trial, folder: Path) -> Timeline:
    """Of the rank with the highest peak."""
    rank = max(range(len(trial.ranks)), key=lambda rank: max(trial.ranks[rank].phases.values()))
    return msgspec.json.decode((folder / timeline_name(rank)).read_bytes(), type=Timeline)


def _run(plan: Plan, path: Path, cap_bytes: int | None, timelines: Path | None = None) -> Trial | int:
    """What the plan's ranks measured, or the exit code they ended with. `timelines`: a folder for one of each rank."""
    with temporary.folder() as folder, waiting(f"measuring {plan.request.model}"):
        out = folder / "measured.json"
        arguments = ["--plan", str(path), "--out", str(out)]
        if cap_bytes is not None:
            arguments += ["--cap", str(cap_bytes)]
        if timelines is not None:
            arguments += ["--timelines", str(timelines)]
        code = local.start(plan, "frugal.training.measure.two_steps", arguments, to_stderr=True)
        return code or msgspec.json.decode(out.read_bytes(), type=Trial)


def _capped(plan: Plan, path: Path, measurement: Measurement) -> Capped:
    """Fresh processes whose allocator may take what was predicted for it, and no more.

    What the context takes is no matter here: it is compared apart, and lies outside of the allocator.
    """
    limit = measurement.predicted.smallest_capacity_bytes
    again = _run(plan, path, limit)
    if isinstance(again, int) and again != OutOfMemoryError.exit_code:
        raise RequestError(f"the capped run ended with exit code {again}", because="its own message is above")
    return Capped(limit_bytes=limit, survived=not isinstance(again, int))


def _measurement(plan: Plan, expected: Figures, trial: Trial) -> Measurement:
    kind = plan.cluster.devices[0].kind
    model = plan.request.model
    return Measurement(
        plan_digest=plan.digest,
        request=replace(plan.request, model=Path(model).name if Path(model).exists() else model),
        definition=trial.model,
        cluster=plan.cluster,
        strategy=plan.strategy,
        batch=plan.batch,
        predicted=expected,
        measured=Measured.of(trial.ranks, kind),
        device=trial.device,
        driver=trial.driver,
        versions={
            "python": platform.python_version(),
            "frugal-trainer": local_host.versions()["frugal"],
            **local_host.library_versions(),
        },
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=shlex.join(["frugal", *sys.argv[1:]]),
    )


def _record(measurement: Measurement, folder: Path, pool: Pool) -> Path:
    """Write it, if it can be predicted from what it holds."""
    again = measurement.predict(pool).peak_allocated_bytes
    if again != measurement.predicted.peak_allocated_bytes:
        raise RequestError(
            "the measurement cannot be recorded",
            because=f"from the record alone its peak is {again:,} bytes, "
            f"from the plan {measurement.predicted.peak_allocated_bytes:,}",
            hint="a factory must be whole in one file, and give the same model every time",
        )
    return measurement.write(folder)


def _summary(measurement: Measurement) -> dict[str, Any]:
    """The measured figures under the names of `frugal dryrun`, and the dry-run ones beside them."""
    return {
        **msgspec.to_builtins(measurement.measured),
        "predicted": msgspec.to_builtins(measurement.predicted),
        "error": measurement.error,
        "capped": msgspec.to_builtins(measurement.capped),
        **{
            name: getattr(measurement, name)
            for name in ("plan_digest", "device", "driver", "versions", "date", "command")
        },
    }


def _report(measurement: Measurement) -> list[str]:
    expected, measured = measurement.predicted, measurement.measured
    device = min(measurement.cluster.devices, key=lambda device: device.usable_bytes)
    rows = [("", "predicted", "measured", "")]
    for name, size in measured.phases.items():
        rows.append(_row(name, expected.phases[name], size))
    rows.append(_row("allocated", expected.peak_allocated_bytes, measured.peak_allocated_bytes))
    if measured.context_bytes is not None and measured.device_bytes is not None:
        rows.append(_row("reserved", expected.peak_reserved_bytes, measured.peak_reserved_bytes))
        rows.append(_row("context", device.context_bytes, measured.context_bytes))
        rows.append(_row("driver", expected.peak_reserved_bytes + device.context_bytes, measured.device_bytes))
    host = _row("host", host_bytes_per_node(expected, measurement.cluster), measured.host_bytes_per_node)
    on_cpu = measurement.kind == "cpu"
    rows.append((host[0], f"> {host[1]}", host[2], "") if on_cpu else host)
    lines = [f"{name:<16} {planned:>12} {real:>12} {off:>9}".rstrip() for name, planned, real, off in rows]
    grown = f"host: what the processes grew by, from {format_bytes(measured.host_before_bytes_per_node)} on"
    alone = "; predicted are their tensors alone, without what malloc keeps and kernels take for a moment"
    lines += ["", grown + (alone if on_cpu else "")]
    if measurement.capped is not None:
        verdict = "enough" if measurement.capped.survived else "not enough: the prediction is too low"
        lines.append(f"capped at the prediction, {format_bytes(measurement.capped.limit_bytes)} for tensors: {verdict}")
    return lines + _context_remark(device, measured)


def _context_remark(device: Device, measured: Measured) -> list[str]:
    """What to say of a context that is larger than planned: the margin is for that, and holds only so much of it."""
    more = (measured.context_bytes or 0) - device.context_bytes
    if more <= 0:
        return []
    if more <= device.margin_bytes:
        return [
            f"the context takes {format_bytes(more)} more than planned, of a margin of "
            f"{format_bytes(device.margin_bytes)} that is kept for it"
        ]
    return [
        f"the context takes {format_bytes(more)} more than planned, beyond the margin of "
        f"{format_bytes(device.margin_bytes)}: a full GPU may run out of memory; `frugal measure --calibrate` has "
        "plans count it"
    ]


def _row(name: str, expected: int, measured: int) -> tuple[str, str, str, str]:
    off = f"{expected / measured - 1:+.3%}" if measured else "none"
    return name, format_bytes(expected), format_bytes(measured), off


def calibrate(kind: DeviceKind, num_ranks: int, of_plan: Measurement | None = None) -> Calibration:
    """Probe this machine with `num_ranks` ranks; add what a measured plan took more than was predicted.

    Raises:
        FrugalError: a rank failed, and has said why.
    """
    with temporary.folder() as folder, waiting("calibrating"):
        out = folder / "probe.json"
        arguments = ["--kind", kind, "--out", str(out)]
        code = local.start_ranks(kind, num_ranks, "frugal.training.measure.hardware_probe", arguments, to_stderr=True)
        if code:
            raise FrugalError(f"the calibration ended with exit code {code}", because="its own message is above")
        probe = msgspec.json.decode(out.read_bytes(), type=Probe)
    device, card, capability = _device(kind)
    calibrated = Calibration(
        kind=kind,
        device=device,
        card=card,
        driver=local_host.cuda_driver() if kind == "cuda" else "",
        torch=local_host.library_versions()["torch"],
        num_ranks=num_ranks,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=shlex.join(["frugal", *sys.argv[1:]]),
        probe=probe,
        compute_capability=capability,
    )
    return _with_plans(calibrated, of_plan)


def _with_plans(calibrated: Calibration, of_plan: Measurement | None) -> Calibration:
    """What measured plans took, this one and those before: kernels that no probe loads, and bytes nobody foresaw."""
    before = [each for each in read_all(calibration.calibration_folder())[0] if each.file_name == calibrated.file_name]
    for each in before:
        calibrated = replace(calibrated, slack_bytes=max(calibrated.slack_bytes, each.slack_bytes))
    context = None if of_plan is None else of_plan.measured.context_bytes
    if of_plan is None or context is None:
        return calibrated
    expected, measured = of_plan.predicted, of_plan.measured
    return calibrated.of_plan(context, max(0, measured.peak_reserved_bytes - expected.peak_reserved_bytes))


def _device(kind: DeviceKind) -> tuple[str, str | None, Capability | None]:
    """Its name, the card that it is, and its compute capability."""
    if kind == "cpu":
        return local_host.cpu_name(), None, None
    import torch

    properties = torch.cuda.get_device_properties(0)
    card = recognise_card(properties.name, properties.total_memory)
    return properties.name, card, (properties.major, properties.minor)


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


def report(calibrated: Calibration) -> list[str]:
    """The calibration for people."""
    probe = calibrated.probe
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
        rows += [("context", format_bytes(probe.context_bytes)), ("slack", format_bytes(calibrated.slack_bytes))]
    ranks = plural(calibrated.num_ranks, "rank")
    driver = f", driver {calibrated.driver}" if calibrated.driver else ""
    return [
        f"{calibrated.device} with {ranks}{driver}, torch {calibrated.torch}",
        *(f"  {name:<16} {value:>18}" for name, value in rows),
    ]


def keep(calibrated: Calibration) -> None:
    """Write it where the next plan looks, and say so on standard error."""
    path = calibrated.write(calibration.calibration_folder())
    click.echo(f"kept in {path}; plans for this device use it unless given --set calibration=false", err=True)
