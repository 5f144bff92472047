"""`frugal measure`, and `frugal measure --calibrate`, which keeps what it measures for the next plans."""

import os
import platform
import shlex
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import click
import msgspec

from frugal import files, temporary
from frugal.cli.terminal import print_json, waiting
from frugal.config.hardware import local_host
from frugal.config.hardware.calibration import Calibration, Probe, calibration_folder, format_flops, read_all
from frugal.config.hardware.cluster import DeviceKind, recognise_card
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.compare import Measurement, SharedRow, fullest, host_bytes_per_node, predicted
from frugal.engine.measure.record import Capped, Measured, Trial, timeline_name
from frugal.errors import FrugalError, OutOfMemoryError, RequestError, failure, refuse
from frugal.launch import local
from frugal.planning.memory import timeline_files
from frugal.planning.memory.timeline import Timeline
from frugal.planning.plan import Plan
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
    help=f"Also keep the measurement in this folder; predictions are tested against it.  [--record alone: {RECORDS}]",
)
@click.option(
    "--capped", is_flag=True, help="Run again with the GPU memory of the allocator limited to the prediction."
)
@click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    help="Write the live bytes after every event, predicted and measured, as a .pickle for torch's memory_viz.",
)
@click.option(
    "--share",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Show the measurement as a row without anything private, and write it to this file, to be given away.",
)
@click.option("--calibrate", "calibrating", is_flag=True, help="Measure this machine, for the next plans.")
@click.option("--device", type=click.Choice(get_args(DeviceKind)), help="What to calibrate without a plan.")
@click.option("--gpus", type=int, help="How many GPUs (or CPU ranks) to calibrate without a plan.  [default: all]")
def command(
    path: Path | None, as_json: bool, capped: bool, calibrating: bool, share: Path | None, record: Path | None,
    timeline: Path | None, **more: Any,
) -> int:  # fmt: skip
    """Run a plan for two optimizer steps on synthetic samples, and compare its memory with the prediction.

    On CPU ranks live tensor bytes are counted, on GPUs the caching allocator's and the driver's. More than two
    micro-steps count as two. With --calibrate the machine is measured as well, or alone.
    """
    of_a_plan = {"record": record, "capped": capped, "timeline": timeline, "share": share}
    wrong = next((name for name, value in (of_a_plan if path is None else more).items() if value), "")
    refuse(
        (
            path is None and not calibrating,
            "there is no plan to measure",
            "",
            "make one with `frugal plan -o DIR`, or add --calibrate",
        ),
        (wrong and path is None, f"--{wrong} was given without a plan", "", "measure one: frugal measure PLAN"),
        (wrong, f"--{wrong} was given together with a plan", "", f"leave --{wrong} out: the plan says it"),
    )
    if timeline is not None:
        timeline_files.check_file(timeline, has_table=False)
    content: dict[str, Any] = {}
    blocks: list[list[str]] = []
    measurement: Measurement | None = None
    if path is not None:
        measurement, written = _measured(Plan.read(path), path, record, capped, timeline)
        if share is not None and _shared(measurement, share):
            written.append(share)
        names = ("predicted", "error", "capped", "plan_digest", "device", "driver", "versions", "date", "command")
        content = msgspec.to_builtins(measurement.measured)
        content |= {name: msgspec.to_builtins(getattr(measurement, name)) for name in names}
        blocks = [_report(measurement), [f"wrote {each}" for each in written]]
    if calibrating:
        if measurement is None:
            kind, num_ranks = what_is_here(more["device"], more["gpus"])
        else:
            kind, num_ranks = measurement.cluster.devices[0].kind, measurement.batch.world_size
        calibration = calibrate(kind, num_ranks, measurement)
        kept = calibration.write(calibration_folder())
        click.echo(f"kept in {kept}; plans for this device use it until it is removed", err=True)
        content["calibration"] = msgspec.to_builtins(calibration)
        blocks.insert(1, report(calibration))
    if as_json:
        print_json(content)
    else:
        click.echo("\n\n".join("\n".join(block) for block in blocks if block))
    is_enough = measurement is None or measurement.capped is None or measurement.capped.survived
    return 0 if is_enough else OutOfMemoryError.exit_code


def _measured(
    plan: Plan, path: Path, record: Path | None, capped: bool, timeline: Path | None
) -> tuple[Measurement, list[Path]]:
    """Return the measurement, and the files it was written to.

    Raises:
        RequestError: the plan cannot be capped, or not be predicted again from its record alone.
        click.exceptions.Exit: the ranks failed, and have reported why.
    """
    kind, model, written = plan.cluster.devices[0].kind, plan.request.model, []
    refuse(
        (
            capped and kind == "cpu",
            "--capped was given, but the plan is for CPU ranks",
            "only the caching allocator of a GPU can be given less memory than there is",
            "leave --capped out",
        )
    )
    local.check_machine(plan.cluster, None)
    with closing(workers()) as pool:
        with waiting(f"dry-running {model}"), DryRunSource(plan.request, plan.cluster, pool=pool) as source:
            dry_runs = source.dry_runs(plan.strategy, plan.batch.largest_micro_batch, plan.batch.accumulation_steps)
        expected = predicted(dry_runs, plan.cluster, expandable_segments=plan.strategy.expandable_segments)
        with temporary.folder() as folder:
            trial = _run(plan, path, *(["--timelines", str(folder)] if timeline is not None else []))
            if timeline is not None:
                fullest_rank = max(range(len(trial.ranks)), key=lambda rank: max(trial.ranks[rank].phases.values()))
                measured = (folder / timeline_name(fullest_rank)).read_bytes()
                both = {
                    "predicted": fullest(dry_runs, kind).timeline,
                    "measured": msgspec.json.decode(measured, type=Timeline),
                }
                timeline_files.write(timeline, both)
                written.append(timeline)
        measurement = Measurement(
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
        if capped:
            measurement = replace(measurement, capped=_capped(plan, path, expected.smallest_capacity_bytes))
        if record is not None:
            again = measurement.predict(pool).peak_allocated_bytes
            refuse(
                (
                    again != expected.peak_allocated_bytes,
                    "the measurement cannot be recorded",
                    (
                        f"from the record alone its peak is {again:,} bytes, "
                        f"from the plan {expected.peak_allocated_bytes:,}"
                    ),
                    "a factory must be whole in one file, and give the same model every time",
                )
            )
            written.append(measurement.write(record))
    return measurement, written


def _run(plan: Plan, path: Path, *words: str) -> Trial:
    """Return what the plan's ranks measured.

    Raises:
        click.exceptions.Exit: with the exit code of the ranks.
    """
    with temporary.folder() as folder, waiting(f"measuring {plan.request.model}"):
        out = folder / "measured.json"
        arguments = ["--plan", str(path), "--out", str(out), *words]
        code = local.start(plan, "frugal.engine.measure.two_steps", arguments, to_stderr=True)
        if code:
            raise click.exceptions.Exit(code)
        return msgspec.json.decode(out.read_bytes(), type=Trial)


def _capped(plan: Plan, path: Path, limit_bytes: int) -> Capped:
    """Run fresh processes whose allocator may take what was predicted for it; the context is outside of it."""
    try:
        _run(plan, path, "--cap", str(limit_bytes))
    except click.exceptions.Exit as end:
        if end.exit_code == OutOfMemoryError.exit_code:
            return Capped(limit_bytes=limit_bytes, survived=False)
        raise RequestError(
            f"the capped run ended with exit code {end.exit_code}", because="its own message is above"
        ) from None
    return Capped(limit_bytes=limit_bytes, survived=True)


def _shared(measurement: Measurement, path: Path) -> bool:
    """Show the row that is to be given away and write it, at a terminal only if that is wanted; return whether it was.

    Raises:
        RequestError: it cannot be written.
    """
    row = SharedRow.of(measurement).encode()
    click.echo(f"{row.decode()}this is all of the row; a pull request can add it to bench/recordings/rows/", err=True)
    if sys.stdin.isatty() and not click.confirm(f"write it to {path}?", err=True):
        return False
    with failure(f"cannot write {path}", OSError):
        files.write_file(path, row)
    return True


def _report(measurement: Measurement) -> list[str]:
    expected, measured = measurement.predicted, measurement.measured
    device = min(measurement.cluster.devices, key=lambda device: device.usable_bytes)
    pairs = {name: (expected.phases[name], size) for name, size in measured.phases.items()}
    pairs["allocated"] = expected.peak_allocated_bytes, measured.peak_allocated_bytes
    if measured.context_bytes is not None and measured.device_bytes is not None:
        pairs |= {
            "reserved": (expected.peak_reserved_bytes, measured.peak_reserved_bytes),
            "context": (device.context_bytes, measured.context_bytes),
            "driver": (expected.peak_reserved_bytes + device.context_bytes, measured.device_bytes),
        }
    pairs["host"] = host_bytes_per_node(expected, measurement.cluster), measured.host_bytes_per_node
    on_cpu = measurement.kind == "cpu"
    lines = [f"{'':<16} {'predicted':>12} {'measured':>12}"]
    for name, (planned, real) in pairs.items():
        off = f"{planned / real - 1:+.3%}" if real else "none"
        shown = format_bytes(planned)
        if name == "host" and on_cpu:
            shown, off = f"> {shown}", ""
        lines.append(f"{name:<16} {shown:>12} {format_bytes(real):>12} {off:>9}".rstrip())
    grown = f"host: growth of the processes, from {format_bytes(measured.host_before_bytes_per_node)} on"
    alone = "; predicted are their tensors alone, without what malloc keeps and kernels take for a moment"
    lines += ["", grown + (alone if on_cpu else "")]
    if measurement.capped is not None:
        verdict = "enough" if measurement.capped.survived else "not enough: the prediction is too low"
        lines.append(f"capped at the prediction, {format_bytes(measurement.capped.limit_bytes)} for tensors: {verdict}")
    more = (measured.context_bytes or 0) - device.context_bytes
    margin = f"margin of {format_bytes(device.margin_bytes)}"
    if more > device.margin_bytes:
        lines.append(
            f"the context takes {format_bytes(more)} more than planned, beyond the {margin}: a full GPU may run out of "
            "memory; `frugal measure --calibrate` has plans count it"
        )
    elif more > 0:
        lines.append(f"the context takes {format_bytes(more)} more than planned, of a {margin} that is kept for it")
    return lines


def calibrate(kind: DeviceKind, num_ranks: int, of_plan: Measurement | None = None) -> Calibration:
    """Probe this machine with `num_ranks` ranks; add what a measured plan took more than was predicted, now and before.

    Raises:
        FrugalError: a rank failed, and has said why.
    """
    with temporary.folder() as folder, waiting("calibrating"):
        out = folder / "probe.json"
        arguments = ["--kind", kind, "--out", str(out)]
        code = local.start_ranks(kind, num_ranks, "frugal.engine.measure.hardware_probe", arguments, to_stderr=True)
        if code:
            raise FrugalError(f"the calibration ended with exit code {code}", because="its own message is above")
        content = out.read_bytes()
    device, card, capability = local_host.cpu_name(), None, None
    if kind == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        device, capability = properties.name, (properties.major, properties.minor)
        card = recognise_card(device, properties.total_memory)
    what = f"the calibration of {device} is not kept, and plans go on without it"
    with failure(what, ValueError, hint="calibrate a real card, when nothing else runs on it", raises=FrugalError):
        calibrated = Calibration(
            kind=kind,
            device=device,
            card=card,
            driver=local_host.cuda_driver() if kind == "cuda" else "",
            torch=local_host.library_versions()["torch"],
            num_ranks=num_ranks,
            probe=msgspec.json.decode(content, type=Probe),
            compute_capability=capability,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            command=shlex.join(["frugal", *sys.argv[1:]]),
        )
    before = [each for each in read_all(calibration_folder())[0] if each.file_name == calibrated.file_name]
    calibrated = replace(calibrated, slack_bytes=max((each.slack_bytes for each in before), default=0))
    if of_plan is None or of_plan.measured.context_bytes is None:
        return calibrated
    more_bytes = of_plan.measured.peak_reserved_bytes - of_plan.predicted.peak_reserved_bytes
    return calibrated.of_plan(of_plan.measured.context_bytes, max(0, more_bytes))


def what_is_here(device: DeviceKind | None, num_ranks: int | None) -> tuple[DeviceKind, int]:
    """Return what to calibrate without a plan: all GPUs, or two CPU ranks, so that their link is measured.

    Raises:
        RequestError: GPUs are asked for that are not here.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    kind: DeviceKind = device or ("cuda" if num_gpus else "cpu")
    if kind == "cpu":
        return kind, num_ranks or min(2, len(os.sched_getaffinity(0)))
    refuse(
        (
            not num_gpus or (num_ranks or 1) > num_gpus,
            f"{num_ranks or 1} GPUs are to be calibrated, there are {num_gpus} here",
            "",
            "calibrate what is here: frugal measure --calibrate",
        )
    )
    return kind, num_ranks or num_gpus


def report(calibrated: Calibration) -> list[str]:
    """Return the lines of a calibration."""
    probe = calibrated.probe
    speeds = {
        "memory": probe.memory_bandwidth,
        "between ranks": probe.link_bandwidth,
        "host optimizer": probe.host_bandwidth,
        "to the host": probe.host_link_bandwidth,
    }
    seconds = {"a collective": probe.hop_seconds, "an operator": probe.operator_seconds}
    rows = {f"matrix, {name}": format_flops(flops) for name, flops in probe.matrix_flops.items()}
    rows |= {name: f"{speed / 1e9:.3g} GB/s" for name, speed in speeds.items() if speed is not None}
    rows |= {name: f"{each * 1e6:.1f} microseconds" for name, each in seconds.items() if each is not None}
    if probe.context_bytes is not None:
        rows |= {"context": format_bytes(probe.context_bytes), "slack": format_bytes(calibrated.slack_bytes)}
    ranks = plural(calibrated.num_ranks, "rank")
    driver = f", driver {calibrated.driver}" if calibrated.driver else ""
    return [
        f"{calibrated.device} with {ranks}{driver}, torch {calibrated.torch}",
        *(f"  {name:<16} {value:>18}" for name, value in rows.items()),
    ]
