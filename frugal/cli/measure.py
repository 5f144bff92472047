"""`frugal measure`."""

import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import msgspec

from frugal.cli import launcher
from frugal.cli.plan import waiting
from frugal.dryrun.client import Rehearsals
from frugal.dryrun.figures import Figures, figures
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.planning.strategy import Strategy
from frugal.units import format_bytes

STDERR = 2


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Two optimizer steps for real, beside their rehearsal. Sizes are the fullest rank's, in bytes."""

    plan_digest: str
    model: str
    seq_len: int
    precision: str
    strategy: Strategy
    world_size: int
    micro_batch: int
    accumulation_steps: int
    measured_bytes: int
    measured_phases: dict[str, int]
    planned_bytes: int
    planned_phases: dict[str, int]
    device: str
    versions: dict[str, str]
    date: str
    command: str

    @property
    def error(self) -> float:
        """How much more was planned than measured, as a share of what was measured."""
        return self.planned_bytes / self.measured_bytes - 1


@click.command("measure")
@click.argument("path", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print what was measured for programs.")
@click.option("--record", type=click.Path(path_type=Path), help="Write the measurement into this folder, too.")
def command(path: Path, as_json: bool, record: Path | None) -> int:
    """Run a plan for two optimizer steps on synthetic samples, and hold its memory against the rehearsal.

    Live tensor bytes on CPU ranks, the caching allocator's count on GPUs. More than two micro-steps count as two.
    """
    plan = Plan.read(path)
    launcher.check(plan, None)
    kind = plan.cluster.devices[0].kind
    with waiting(f"rehearsing {plan.request.model}"), Rehearsals(plan.request, plan.cluster) as source:
        rehearsals = source.rehearsals(plan.strategy, plan.batch.largest_cell, plan.batch.accumulation_steps)
    planned = figures(rehearsals, kind, len(plan.cluster.devices))
    with TemporaryDirectory(prefix="frugal-") as folder, waiting(f"measuring {plan.request.model}"):
        out = Path(folder) / "measured.json"
        code = launcher.start(plan, "frugal.training.trial", ["--plan", str(path), "--out", str(out)], stdout=STDERR)
        if code:
            return code
        ranks = msgspec.json.decode(out.read_bytes(), type=list[dict[str, int]])
    found = _measurement(plan, planned, ranks)
    written = _write(found, record) if record is not None else None
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_summary(found, kind)), indent=2).decode())
    else:
        click.echo(_report(found))
        if written is not None:
            click.echo(f"\nwrote {written}")
    return 0


def _measurement(plan: Plan, planned: Figures, ranks: list[dict[str, int]]) -> Measurement:
    measured = {name: max(phases[name] for phases in ranks) for name in ranks[0]}
    return Measurement(
        plan_digest=plan.digest,
        model=plan.request.model,
        seq_len=plan.request.seq_len,
        precision=plan.request.precision,
        strategy=plan.strategy,
        world_size=plan.batch.world_size,
        micro_batch=plan.batch.largest_cell,
        accumulation_steps=min(plan.batch.accumulation_steps, 2),
        measured_bytes=max(measured.values()),
        measured_phases=measured,
        planned_bytes=planned.peak_allocated_bytes,
        planned_phases=planned.phases,
        device=_device(plan),
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("frugal-trainer", "torch", "deepspeed", "transformers")},
        },
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=shlex.join(["frugal", *sys.argv[1:]]),
    )


def _device(plan: Plan) -> str:
    if plan.cluster.devices[0].kind == "cpu":
        return f"CPU, {platform.machine()}"
    import torch

    return torch.cuda.get_device_name(0)


def _summary(found: Measurement, kind: str) -> dict[str, object]:
    """The names of `frugal rehearse`. A CPU caches nothing; on CUDA only what is allocated is measured."""
    all_there_is = found.measured_bytes if kind == "cpu" else None
    return {
        "peak_allocated_bytes": found.measured_bytes,
        "peak_reserved_bytes": all_there_is,
        "smallest_capacity_bytes": all_there_is,
        "phases": found.measured_phases,
        "phase": max(found.measured_phases, key=found.measured_phases.__getitem__),
        "planned": {"peak_allocated_bytes": found.planned_bytes, "phases": found.planned_phases},
        "error": found.error,
    }


def _report(found: Measurement) -> str:
    rows = [("", "planned", "measured", "")]
    for name, measured in found.measured_phases.items():
        rows.append(_row(name, found.planned_phases[name], measured))
    rows.append(_row("peak", found.planned_bytes, found.measured_bytes))
    return "\n".join(f"{name:<16} {planned:>12} {real:>12} {error:>9}".rstrip() for name, planned, real, error in rows)


def _row(name: str, planned: int, measured: int) -> tuple[str, str, str, str]:
    return name, format_bytes(planned), format_bytes(measured), f"{planned / measured - 1:+.3%}"


def _write(found: Measurement, folder: Path) -> Path:
    path = folder / f"{found.plan_digest[:12]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    except OSError as error:
        raise RequestError(f"cannot write to {folder}", because=str(error.strerror)) from None
    return path
