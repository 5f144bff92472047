"""Progress for people on rank 0's terminal, `metrics.jsonl` for programs.

Each line of `metrics.jsonl` is one JSON object with an `event`:

    start        step (those done before), total_steps, dropped_steps (of records that were dropped: they are done
                 again), resumed, plan_digest, model, task, strategy, world_size, devices (a count by name), versions,
                 changes (what is not as it was before), time
    step         step, loss (mean over targets), targets, samples, learning_rate, grad_norm (before clipping),
                 tokens_per_second (target tokens, all ranks), tokens and positions (of all samples and of all
                 micro-batches; null where samples are not of tokens), memory_bytes (rank 0's peak so far),
                 reserved_bytes (its allocator's on a GPU, else null), time (Unix seconds)
    evaluation   step, loss, perplexity, targets, samples, reserved_bytes, time; metrics (numbers of --metric by name);
                 during training also seconds, phase_bytes and phase_reserved_bytes (on a GPU: its own peak)
    checkpoint   step, seconds that training waited for it, phase_bytes, phase_reserved_bytes, time
    left_out     step, why, samples (their indices in the training data), time: nothing was updated
    recovery     step, message, phase (in which memory ran out; null: larger micro-batches are tried again), ranks, time
    memory       step, planned_bytes, measured_bytes (rank 0's peak over initialisation and two steps),
                 planned_micro_batch, largest_micro_batch (samples and tokens: planned, and run so far), phases (by
                 name: planned_bytes, null where the plan has none; measured_bytes, reserved_bytes), time
    tuned        step, gain (part of the planned step's seconds), strategy, micro_batch, accumulation_steps,
                 plan_digest, time: the way in which the run continues; ways (each way that was tried, the plan's first:
                 strategy, micro_batch, accumulation_steps, num_steps, seconds of a step or null, is_kept, dropped: why)
    end          step (the last that was done), status (done, stopped, interrupted, failed; lost: another rank was,
                 whoever started the run knows why and adds its own), why, time

A resumed run appends, after dropping the records beyond the step it resumes from; what the run went through stays:
starts, ends and recoveries. A number that is not finite is null.

The file is flushed (fsync) before each checkpoint, so that whoever has a checkpoint has the records of its steps. How
it is written: `metrics_file`.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard

import msgspec
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from frugal.config.run_settings import METRICS
from frugal.distributed import rank_logs
from frugal.distributed.first_failure import LostRankError, lost_connection
from frugal.errors import FrugalError, first_line
from frugal.training.losses.evaluation import Evaluation
from frugal.training.measure.run_gauge import EVALUATION, PhasePeak
from frugal.training.reports import progress_line
from frugal.training.reports.memory_record import FULL
from frugal.training.reports.metrics_file import Records
from frugal.training.reports.trackers import Trackers
from frugal.training.train_step import StepResult
from frugal.units import format_bytes

PLAIN_LINES = 40  # about so many lines of progress where there is no terminal
logger = logging.getLogger("frugal")
WINDOW = 20  # steps over which the speed is averaged


class _ToLog(logging.Handler):
    """What frugal logs during training, such as a recovery from out of memory, in one stream with the progress."""

    def __init__(self, log: "Log") -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record's message; one of a recovery is for programs, too."""
        self._log.say(record.getMessage())
        recovery: dict[str, Any] | None = getattr(record, "recovery", None)
        if recovery is not None:
            self._log.recovery(record.getMessage(), **recovery)


class Log:
    """One run's log, which `trackers` get, too. On other ranks than 0 nothing is written. Use it in a `with` block."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        planned_bytes: int,
        planned_size: tuple[int, int] | None = None,
        planned_phases: Mapping[str, int] | None = None,
        total_steps: int,
        first_step: int = 0,
        trackers: Trackers | None = None,
        console: Console | None = None,
    ) -> None:
        self.is_rank_0 = rank == 0
        self.memory_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self._planned_bytes, self._planned_size = planned_bytes, planned_size
        self._planned_phases = planned_phases or {}
        self._step = first_step  # the last that was done
        self._status: tuple[str, str] | None = None  # how the run ended, and why
        self._is_started = False
        self._total_steps = total_steps
        self._first_step = first_step
        self._last_line = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # (seconds, targets) of each step
        if not self.is_rank_0:
            return
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._trackers = trackers
        self._handler = _ToLog(self)
        self._metrics = Records(folder / METRICS, first_step)
        self._progress = Progress(
            _Line(self._console), console=self._console, transient=True, disable=not self._console.is_terminal
        )
        self._task = self._progress.add_task("", total=total_steps, completed=first_step, at=None)

    def __enter__(self) -> Self:
        """Show the progress."""
        if self.is_rank_0:
            self._progress.start()
            logger.addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        if self.is_rank_0:
            if self._trackers is not None:
                self._trackers.finish()
            logger.removeHandler(self._handler)
            self._progress.stop()
            self._end(error)
            self._metrics.close(in_error=error is not None)

    def say(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        if self.is_rank_0:
            self._console.print(text, markup=False)
            rank_logs.to_file(text)

    def start(self, **said: Any) -> None:
        """The run begins, or goes on; `said`: what the record of it has beside steps."""
        if self.is_rank_0:
            self._is_started = True
            self._record(
                event="start", step=self._first_step, total_steps=self._total_steps,
                dropped_steps=self._metrics.dropped_steps, **said,
            )  # fmt: skip

    def ends(self, status: str, why: str = "") -> None:
        """How the run ends, if nothing fails from here on."""
        self._status = status, why

    def _end(self, error: BaseException | None) -> None:
        if not self._is_started:
            return
        status, why = self._status or ("failed", "")
        if error is not None:
            is_lost = isinstance(error, LostRankError) or lost_connection(error)
            status = "lost" if is_lost else "failed"
            why = error.what if isinstance(error, FrugalError | LostRankError) else first_line(error)
        self._record(event="end", step=self._step, status=status, why=why)

    def takes(self, peak: PhasePeak) -> None:
        """What this rank's device has taken at most by now, where that is known."""
        self.memory_bytes = peak.allocated_bytes or self.memory_bytes
        self.reserved_bytes = peak.reserved_bytes or self.reserved_bytes

    def step(self, step: int, result: StepResult, seconds: float) -> None:
        """Step number `step` (from 1) took `seconds`."""
        self._step = step
        if not self.is_rank_0:
            return
        self._recent.append((seconds, result.targets))
        self._record(
            event="step", step=step, loss=result.loss, targets=result.targets, samples=result.samples,
            learning_rate=result.learning_rate, grad_norm=result.grad_norm,
            tokens_per_second=result.targets / seconds, tokens=result.tokens, positions=result.positions,
            memory_bytes=self.memory_bytes, reserved_bytes=self.reserved_bytes,
        )  # fmt: skip
        at = self._at(step, result)
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step, at=at)
        if self._is_due(step):
            (rank_logs.to_file if self._console.is_terminal else self.say)(
                f"step {step}/{self._total_steps}  {at.plain}"
            )
            self._last_line = time.monotonic()

    def evaluation(
        self,
        step: int,
        evaluation: Evaluation,
        *,
        of: str = "validation",
        seconds: float | None = None,
        peak: PhasePeak | None = None,
    ) -> None:
        """The model was evaluated after `step` steps on the samples named `of`; `peak`: of its memory meanwhile."""
        if self.is_rank_0:
            event = "evaluation" if of == "validation" else of
            measured = "".join(f"  {name} {value:.4g}" for name, value in evaluation.metrics.items())
            self._record(
                event=event, step=step, loss=evaluation.loss, perplexity=evaluation.perplexity,
                targets=evaluation.targets, samples=evaluation.samples, reserved_bytes=self.reserved_bytes,
                **_told(evaluation), **({} if seconds is None else {"seconds": round(seconds, 6), **_phase(peak)}),
            )  # fmt: skip
            self.say(
                f"step {step}/{self._total_steps}  {of} loss {evaluation.loss:.4f}"
                f"  perplexity {evaluation.perplexity:.2f}{measured}  ({evaluation.samples} samples)"
            )

    def event(self, **values: Any) -> None:
        """A record of its own kind: `event` and `step`, and whatever else it says."""
        if self.is_rank_0:
            self._record(**values)

    def checkpoint(self, step: int, seconds: float, peak: PhasePeak) -> None:
        """A checkpoint of `step` steps was saved, or its writing begun; training waited for it so long."""
        if self.is_rank_0:
            self._record(event="checkpoint", step=step, seconds=round(seconds, 6), **_phase(peak))

    def recovery(self, message: str, *, phase: str | None, ranks: list[int]) -> None:
        """Memory ran out in `phase` on `ranks`, and the step is done again; None: larger micro-batches are tried."""
        if self.is_rank_0:
            in_step = phase not in (None, EVALUATION)
            self._record(event="recovery", step=self._step + in_step, message=message, phase=phase, ranks=ranks)

    def left_out(self, step: int, why: str, samples: list[int], *, is_going_on: bool) -> None:
        """Step number `step` updated nothing, because of what `samples` gave."""
        if self.is_rank_0:
            self._record(event="left_out", step=step, why=why, samples=samples)
            if is_going_on:
                self.say(f"step {step}/{self._total_steps}  left out: {why}; its samples are listed in {METRICS}")

    def memory(
        self,
        step: int,
        measured_bytes: int,
        *,
        is_lowered: bool = False,
        largest: tuple[int, int] | None = None,
        phases: Mapping[str, PhasePeak] | None = None,
        is_resumed: bool = False,
    ) -> None:
        """Two steps are done, so everything that the plan counts has been allocated at least once.

        `is_lowered`: memory ran out in them, and what was measured is of smaller micro-batches than were planned.
        `largest`: samples and tokens of the largest micro-batch that was run; None: not known. Where it is smaller than
        the plan's, the two amounts are of different work, and no difference is claimed. `is_resumed`: it was said
        when the run began.
        """
        self.memory_bytes = measured_bytes
        if self.is_rank_0:
            self._record(
                event="memory", step=step, planned_bytes=self._planned_bytes, measured_bytes=measured_bytes,
                planned_micro_batch=self._planned_size, largest_micro_batch=largest,
                phases=self._phases(phases or {}),
            )  # fmt: skip
            if is_resumed:
                return None
            difference = (measured_bytes / self._planned_bytes - 1) * 100 if self._planned_bytes else math.inf
            why = ""
            if is_lowered:
                why = "; memory ran out, and micro-batches are smaller than planned"
            elif self._is_smaller(largest):
                return self._say_sizes(measured_bytes, largest, difference)
            elif difference < -2 and largest is None:
                why = "; the plan is for batches of full-length samples"
            self.say(
                f"memory: planned {format_bytes(self._planned_bytes)}, measured {format_bytes(measured_bytes)}"
                f" ({difference:+.1f} %{why})"
            )

    def _phases(self, measured: Mapping[str, PhasePeak]) -> dict[str, dict[str, int | None]]:
        """By phase, in the order of a step: what the plan says, and what was measured."""
        of_no_plan = PhasePeak()
        return {
            name: {
                "planned_bytes": self._planned_phases.get(name),
                "measured_bytes": measured.get(name, of_no_plan).allocated_bytes,
                "reserved_bytes": measured.get(name, of_no_plan).reserved_bytes,
            }
            for name in dict.fromkeys((*self._planned_phases, *measured))
        }

    def _is_smaller(self, largest: tuple[int, int] | None) -> TypeGuard[tuple[int, int]]:
        """Whether the largest micro-batch so far is known to have fewer tokens than the plan's."""
        if largest is None or self._planned_size is None:
            return False
        return math.prod(largest) < FULL * math.prod(self._planned_size)

    def _say_sizes(self, measured_bytes: int, largest: tuple[int, int], difference: float) -> None:
        assert self._planned_size is not None
        (planned_samples, planned_tokens), (samples, tokens) = self._planned_size, largest
        over = f" ({difference:+.1f} %)" if difference > 0 else ""
        self.say(
            f"memory: planned {format_bytes(self._planned_bytes)} for {planned_samples} x {planned_tokens} tokens;"
            f" largest micro-batch so far {samples} x {tokens}: measured {format_bytes(measured_bytes)}{over}"
        )

    def _is_due(self, step: int) -> bool:
        """Whether a plain line is: the first and the last, about `PLAIN_LINES` between, one a minute at least."""
        return (
            step % math.ceil(self._total_steps / PLAIN_LINES) == 0
            or step in (self._first_step + 1, self._total_steps)
            or time.monotonic() - self._last_line > 60
        )

    def _at(self, step: int, result: StepResult) -> progress_line.StepProgress:
        seconds = sum(seconds for seconds, _ in self._recent)
        return progress_line.StepProgress(
            step=step,
            total_steps=self._total_steps,
            loss=result.loss,
            learning_rate=result.learning_rate,
            tokens_per_second=sum(targets for _, targets in self._recent) / seconds,
            seconds_left=seconds / len(self._recent) * (self._total_steps - step),
            measured_bytes=self.memory_bytes,
            planned_bytes=self._planned_bytes,
        )

    def sync(self, folder: Path) -> None:
        """Have all records on the disk, in `folder`, where the run's folder is by now.

        Raises:
            OSError: they cannot be written.
        """
        if self.is_rank_0:
            self._metrics.sync(folder / METRICS)

    def _record(self, **values: Any) -> None:
        self._metrics.add(msgspec.json.encode({**values, "time": round(time.time(), 3)}) + b"\n")
        if self._trackers is not None:
            self._trackers.record(values["event"], values)


class _Line(ProgressColumn):
    """The one column: the line as it fits into the terminal, whose size may change."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def render(self, task: Task) -> Text:
        """The line after the last step."""
        at: progress_line.StepProgress | None = task.fields["at"]
        text = f"step {task.completed:.0f}/{task.total:.0f}" if at is None else at.fitted(self._console.width)
        return Text(text, no_wrap=True, overflow="ellipsis")


def _phase(peak: PhasePeak | None) -> dict[str, int | None]:
    """What a phase took that has a record of its own."""
    peak = peak or PhasePeak()
    return {"phase_bytes": peak.allocated_bytes, "phase_reserved_bytes": peak.reserved_bytes}


def _told(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """What a metric of the user's own says, where there is one."""
    return {"metrics": evaluation.metrics} if evaluation.metrics else {}
