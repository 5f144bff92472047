"""`frugal train --max-restarts`: starts a run again when it ended for something that may not happen again.

Launchers do not always pass on how a rank ended, so a run is judged by what its ranks reported (`training.failure`)
before the exit code counts. Not started again: what is done or was told to stop, what ended with a message for the
user, and what ended at the same step in the same way as the time before.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import msgspec

from frugal.cli.launcher import INTERRUPTED, ended_by, start, visible_gpus
from frugal.planning.files import write_plan
from frugal.planning.plan import Plan
from frugal.training import failure
from frugal.training.manifest import newest
from frugal.training.settings import METRICS, Settings
from frugal.training.working_gpus import working

FOR_THE_USER = (2, 3, 4, 5, 6, 7, INTERRUPTED)  # exit codes of `frugal.errors`: these would come again

Start = Callable[[Plan, Settings], tuple[int, "failure.Report | None"]]
"""Starts a run and waits: 0 if it came to its end, otherwise an exit code and what the rank said that failed first."""


@dataclass(frozen=True)
class End:
    """How a run ended: after `step`, with `checkpoint` as its newest, for the reason `why`, in words.

    `is_final`: whether it would be no use to start it again.
    """

    code: int
    why: str
    is_final: bool
    step: int
    checkpoint: str | None


def supervise(
    start: Start, plan: Plan, asked: Settings, max_restarts: int, plan_for_rest: Callable[[Plan], Plan]
) -> int:
    """Run a plan until it is done, starting it again at most `max_restarts` times; the last exit code.

    `plan_for_rest` gives the plan to go on with, for the devices that are left.
    """
    before: End | None = None
    for restart in range(max_restarts + 1):
        end = ended(*start(plan, asked), asked)
        if end.is_final:
            return end.code
        if before is not None and (end.why, end.step, end.checkpoint) == (before.why, before.step, before.checkpoint):
            click.echo(f"error: {end.why} again, after step {end.step} as before: not started again", err=True)
            return end.code
        if restart == max_restarts:
            hint = f"\n\nhint: continue from {end.checkpoint} with --resume" if end.checkpoint else ""
            click.echo(f"error: {end.why}, and all {max_restarts} restarts are used up{hint}", err=True)
            return end.code
        where = f"going on from {end.checkpoint}" if end.checkpoint else "starting anew, as there is no checkpoint"
        click.echo(f"restart {restart + 1} of {max_restarts}: {end.why} after step {end.step}; {where}", err=True)
        asked = replace(asked, resume=end.checkpoint is not None)
        plan, failed = plan_for_rest(plan), plan
        before = end if plan.digest == failed.digest else None  # the same again on other devices is another failure
    raise AssertionError("the loop returns")


def on_this_machine(master_port: int | None) -> Start:
    """Starts ranks here; a run that is told to be over by an exit code, and not by its ranks, is not."""

    def run(plan: Plan, asked: Settings) -> tuple[int, failure.Report | None]:
        with TemporaryDirectory(prefix="frugal-") as folder:
            written, _ = write_plan(plan, Path(folder))
            os.environ[failure.REPORT] = folder
            try:
                code = start(plan, "frugal.training.run", ["--plan", str(written), *asked.arguments()], master_port)
            finally:
                del os.environ[failure.REPORT]
            is_done = failure.is_done(Path(folder))
            return (0 if is_done else code or 1), failure.reported(Path(folder))

    return run


def ended(code: int, report: "failure.Report | None", asked: Settings) -> End:
    """What an exit code and the report of the rank that failed first amount to."""
    saved = newest(asked.checkpoints)
    step, checkpoint = _last_step(asked.out / METRICS), None if saved is None else saved.name
    if code == 0:
        return End(0, "", True, step, checkpoint)
    if report is not None and report.code in FOR_THE_USER:
        return End(report.code, "", True, step, checkpoint)
    if number := ended_by(code):
        return End(128 + number, f"a rank was ended by {number.name}", False, step, checkpoint)
    if report is not None:
        return End(report.code, _why(report), False, step, checkpoint)
    if code in FOR_THE_USER:  # refused before there was a rank
        return End(code, "", True, step, checkpoint)
    return End(code, "the run ended without a word from its ranks", False, step, checkpoint)


def _why(report: "failure.Report") -> str:
    """A message for people is about a rank that is gone; of a traceback the exception, above its last line."""
    lines = report.text.splitlines()
    if lines[0].startswith("error: "):
        return lines[0].removeprefix("error: ")
    return f"rank {report.rank} failed ({lines[max(0, len(lines) - 2)]})"


def _last_step(metrics: Path) -> int:
    """The last step that was logged; 0 if none was."""
    step = 0
    if metrics.exists():
        for line in metrics.read_bytes().splitlines():
            try:
                step = max(step, int(msgspec.json.decode(line)["step"]))
            except (msgspec.DecodeError, KeyError):  # half a line, of a run that was killed
                continue
    return step


def devices_left(plan: Plan) -> int:
    """How many of a plan's devices on this machine still work; those that do not are hidden from what is started."""
    if plan.cluster.devices[0].kind == "cpu":
        return plan.batch.world_size
    left = working(visible_gpus())
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(left)
    return min(len(left), plan.batch.world_size)
