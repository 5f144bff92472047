"""Supervision of a run: its end is judged, and with `--max-restarts` it is started again where that may help.

Launchers do not always pass on how a rank ended, so a run is judged by what its ranks reported (`first_failure`) before
the exit code counts. Not started again: runs that are done or were asked to stop, that ended with a message for the
user (but for a port that was taken), or that ended at the same step in the same way as the time before.
"""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from frugal.checkpoint.manifest import newest_checkpoint
from frugal.checkpoint.run_folder import make_folder
from frugal.config.run_settings import CHECKPOINTS, RunSettings
from frugal.distributed import stop
from frugal.distributed.first_failure import FailureReport
from frugal.distributed.rank_logs import to_console
from frugal.errors import INTERRUPTED, CheckpointError, RequestError
from frugal.planning.plan import Plan
from frugal.report import after_run
from frugal.report.records import read_history

FINAL_CODES = (2, 3, 4, 5, 6, 7, INTERRUPTED)
"""Codes of runs that ended with a message for the user (`frugal.errors`): it would come again."""

Start = Callable[[Plan, RunSettings], tuple[int, FailureReport | None]]
"""Starts a run and waits: 0 if it came to its end, otherwise an exit code and what the rank said that failed first."""


@dataclass(frozen=True)
class RunEnd:
    """The end of a run: after `step`, with `checkpoint` as its newest, for the reason `why`, in words.

    `is_final`: whether starting it again would be of no use.
    """

    code: int
    why: str
    is_final: bool
    step: int
    checkpoint: str | None


def supervise(
    start: Start, plan: Plan, settings: RunSettings, max_restarts: int, plan_for_rest: Callable[[Plan], Plan]
) -> int:
    """Run a plan until it is done, starting it again at most `max_restarts` times; return the last exit code.

    `plan_for_rest` returns the plan to continue with, for the devices that are left.
    """
    before: RunEnd | None = None
    make_folder(settings, settings.out)
    for restart in range(max_restarts + 1):
        began = time.time()
        code, report = start(plan, settings)
        if not settings.out.is_dir():
            if code and code not in FINAL_CODES:  # otherwise the ranks have reported it
                to_console(f"error: {settings.out}, the run's folder, was deleted or moved: not started again")
                code = CheckpointError.exit_code
            return code
        end = judge(code, report, settings.out)
        if code:
            after_run.note_end(settings.out, began, end.why)
        if end.is_final:
            return end.code
        hint = (
            "\n  because somebody sent it, or Linux: `dmesg` says which processes it ended for want of host memory"
            if end.code == 128 + signal.SIGKILL
            else ""
        )
        hint += f"\n\nhint: continue from {end.checkpoint} with --resume" if end.checkpoint else ""
        if stop.requested() is not None or not max_restarts:
            if report is None or stop.requested() is not None:  # otherwise the rank has reported it
                to_console(f"error: {end.why}{hint}")
            return end.code
        if before is not None and (end.why, end.step, end.checkpoint) == (before.why, before.step, before.checkpoint):
            to_console(f"error: {end.why} again, after step {end.step} as before: not started again")
            return end.code
        if restart == max_restarts:
            to_console(f"error: {end.why}, and all {max_restarts} restarts are used up{hint}")
            return end.code
        where = f"resuming from {end.checkpoint}" if end.checkpoint else "starting over, as there is no checkpoint"
        to_console(f"restart {restart + 1} of {max_restarts}: {end.why} after step {end.step}; {where}")
        settings = replace(settings, resume=end.checkpoint is not None)
        plan, failed = plan_for_rest(plan), plan
        before = end if plan.digest == failed.digest else None  # the same again on other devices is another failure
    raise AssertionError("the loop returns")


def judge(code: int, report: FailureReport | None, out: Path) -> RunEnd:
    """Return how the run in `out` ended, from its exit code and the report of the rank that failed first."""
    saved = newest_checkpoint(out / CHECKPOINTS)
    # of the signal, if one ended it, as Python says it, or the shell, or `sys.exit(-n)`
    signals = [-code] if code < 0 else [each for each in (256 - code, code - 128) if each in _ENDS_A_RANK]
    number, is_final = next(iter(signals), None), code == 0
    if report is not None and (report.code in FINAL_CODES or report.code > 128):  # a signal to stop, or a second one
        code, why = report.code, _why(report)
        is_final = not report.text.startswith("error: port ")  # the next start chooses another
    elif number is not None:
        named = [each.name for each in signal.Signals if each == number]
        code, why = 128 + number, f"a rank was ended by {named[0] if named else f'signal {number}'}"
    elif report is not None:
        code, why = report.code, _why(report)
    elif code in FINAL_CODES:  # refused before there was a rank
        why, is_final = after_run.INTERRUPTED if code == INTERRUPTED else f"exit code {code}", True
    else:
        why = "the run ended without a message from its ranks"
    step = 0
    with suppress(RequestError):  # there is no record of one
        step = next((each.step for each in reversed(read_history(out).steps)), 0)
    return RunEnd(code, why, is_final, step, None if saved is None else saved.name)


def _why(report: FailureReport) -> str:
    """Return the first line of a message, or the exception of a traceback, which is above its last line."""
    lines = report.text.splitlines()
    if lines[0].startswith("error: "):
        return lines[0].removeprefix("error: ")
    return f"rank {report.rank} failed ({lines[max(0, len(lines) - 2)]})"


_ENDS_A_RANK = {signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS} | set(
    range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
)
