"""Progress for people on rank 0's terminal, `metrics.jsonl` for programs.

Each line of `metrics.jsonl` is one JSON object with an `event`:

    step         step, loss (mean over targets), targets, samples, learning_rate, grad_norm (before clipping),
                 tokens_per_second (target tokens, all ranks), memory_bytes (rank 0's peak so far), reserved_bytes (its
                 allocator's on a GPU, else null), time (Unix seconds)
    evaluation   step, loss, perplexity, targets, samples, reserved_bytes, time; metrics (numbers of --metric by name)
    left_out     step, why, samples (their indices in the training data), time: nothing was updated
    memory       step, planned_bytes, measured_bytes (rank 0's peak over initialisation and two steps),
                 planned_micro_batch, largest_micro_batch (samples and tokens: planned, and run so far), time
    tuning       step, seconds, work (tokens, or samples), strategy, micro_batch, accumulation_steps, is_planned,
                 given_up (why, if it is), time: this step was taken in one of several ways
    tuned        step, gain (part of the planned step's seconds), strategy, micro_batch, accumulation_steps,
                 plan_digest, time: the way in which the run goes on

A resumed run appends, after dropping the records beyond the step it resumes from. A number that is not finite is null.

The file is never shortened in place: what is dropped at a resume is left out of a new file, which replaces the old one
when it is on the disk. It is flushed (fsync) before each checkpoint, so that whoever has a checkpoint has the records
of its steps. Where the disk is full, records wait in memory for room until the next checkpoint.
"""

import logging
import math
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard

import msgspec
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from frugal import file_errors, files
from frugal.config.run_settings import METRICS
from frugal.distributed import rank_logs
from frugal.errors import CheckpointError
from frugal.training.losses.evaluation import Evaluation
from frugal.training.reports import progress_line
from frugal.training.reports.memory_record import FULL
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
        """Print the record's message."""
        self._log.say(record.getMessage())


class Log:
    """One run's log, which `trackers` get, too. On other ranks than 0 nothing is written. Use it in a `with` block."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        planned_bytes: int,
        planned_size: tuple[int, int] | None = None,
        total_steps: int,
        first_step: int = 0,
        trackers: Trackers | None = None,
        console: Console | None = None,
    ) -> None:
        self.is_rank_0 = rank == 0
        self.memory_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self._planned_bytes, self._planned_size = planned_bytes, planned_size
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
            self._metrics.close(in_error=error is not None)

    def say(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        if self.is_rank_0:
            self._console.print(text, markup=False)
            rank_logs.to_file(text)

    def step(self, step: int, result: StepResult, seconds: float) -> None:
        """Step number `step` (from 1) took `seconds`."""
        if not self.is_rank_0:
            return
        self._recent.append((seconds, result.targets))
        self._record(
            event="step", step=step, loss=result.loss, targets=result.targets, samples=result.samples,
            learning_rate=result.learning_rate, grad_norm=result.grad_norm,
            tokens_per_second=result.targets / seconds, memory_bytes=self.memory_bytes,
            reserved_bytes=self.reserved_bytes,
        )  # fmt: skip
        at = self._at(step, result)
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step, at=at)
        if self._is_due(step):
            (rank_logs.to_file if self._console.is_terminal else self.say)(
                f"step {step}/{self._total_steps}  {at.plain}"
            )
            self._last_line = time.monotonic()

    def evaluation(self, step: int, evaluation: Evaluation, *, of: str = "validation") -> None:
        """The model was evaluated after `step` steps on the samples named `of`."""
        if self.is_rank_0:
            event = "evaluation" if of == "validation" else of
            measured = "".join(f"  {name} {value:.4g}" for name, value in evaluation.metrics.items())
            self._record(
                event=event, step=step, loss=evaluation.loss, perplexity=evaluation.perplexity,
                targets=evaluation.targets, samples=evaluation.samples, reserved_bytes=self.reserved_bytes,
                **_told(evaluation),
            )  # fmt: skip
            self.say(
                f"step {step}/{self._total_steps}  {of} loss {evaluation.loss:.4f}"
                f"  perplexity {evaluation.perplexity:.2f}{measured}  ({evaluation.samples} samples)"
            )

    def event(self, **values: Any) -> None:
        """A record of its own kind: `event` and `step`, and whatever else it says."""
        if self.is_rank_0:
            self._record(**values)

    def left_out(self, step: int, why: str, samples: list[int], *, is_going_on: bool) -> None:
        """Step number `step` updated nothing, because of what `samples` gave."""
        if self.is_rank_0:
            self._record(event="left_out", step=step, why=why, samples=samples)
            if is_going_on:
                self.say(f"step {step}/{self._total_steps}  left out: {why}; its samples are listed in {METRICS}")

    def memory(
        self, step: int, measured_bytes: int, *, is_lowered: bool = False, largest: tuple[int, int] | None = None
    ) -> None:
        """Two steps are done, so everything that the plan counts has been allocated at least once.

        `is_lowered`: memory ran out in them, and what was measured is of smaller micro-batches than were planned.
        `largest`: samples and tokens of the largest micro-batch that was run; None: not known. Where it is smaller than
        the plan's, the two amounts are of different work, and no difference is claimed.
        """
        self.memory_bytes = measured_bytes
        if self.is_rank_0:
            self._record(
                event="memory", step=step, planned_bytes=self._planned_bytes, measured_bytes=measured_bytes,
                planned_micro_batch=self._planned_size, largest_micro_batch=largest,
            )  # fmt: skip
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


def _told(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """What a metric of the user's own says, where there is one."""
    return {"metrics": evaluation.metrics} if evaluation.metrics else {}


class Records:
    """`metrics.jsonl`, open to append to, without records of steps after `last_step` or half a record.

    Raises:
        CheckpointError: it cannot be read or written; it is what it was.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path
        self._unwritten = bytearray()
        self._is_failing = False
        try:
            self._descriptor = files.append(path)  # first, as it refuses what is not a file
            kept, is_all = _records_until(files.read_regular(path), last_step)
            if not is_all:
                os.close(self._descriptor)
                files.write_file(path, kept)
                self._descriptor = files.append(path)
        except OSError as error:
            raise _cannot_write(path, error) from None

    def add(self, line: bytes) -> None:
        """Append a record, or keep it until there is room."""
        self._unwritten += line
        try:
            self._write()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                because, remedy = file_errors.explain(error, self._path)
                logger.warning("cannot write %s, it is kept for the next checkpoint: %s; %s", METRICS, because, remedy)
            self._is_failing = True

    def sync(self, path: Path) -> None:
        """Have all on the disk, under the name `path`. A file that was deleted is made again, with all its records.

        Raises:
            OSError: it cannot be written.
        """
        self._path = path
        try:
            self._write()
            os.fsync(self._descriptor)
            if not path.exists():
                files.write_file(path, Path(f"/proc/self/fd/{self._descriptor}").read_bytes())
                os.close(self._descriptor)
                self._descriptor = files.append(path)
                logger.warning("%s is written anew, with all records of this run: the file was deleted", path)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise

    def close(self, *, in_error: bool) -> None:
        """The end, with what was kept; an error that is on its way is the one to tell."""
        try:
            self._write()
        except OSError as error:
            if not in_error:
                raise _cannot_write(self._path, error) from None
        finally:
            os.close(self._descriptor)

    def _write(self) -> None:
        """A disk that is nearly full takes a part; the next part is appended to it."""
        while self._unwritten:
            del self._unwritten[: os.write(self._descriptor, self._unwritten)]


class _Record(msgspec.Struct):
    step: int


def _records_until(text: bytes, last_step: int) -> tuple[bytes, bool]:
    """The records of steps up to `last_step`, and whether that is all there is."""
    kept = []
    lines = text.splitlines(keepends=True)
    for line in lines:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # half a line, killed in it
            if msgspec.json.decode(line, type=_Record).step <= last_step and line.endswith(b"\n"):
                kept.append(line)
    return b"".join(kept), len(kept) == len(lines)


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    because, remedy = file_errors.explain(error, path)
    return CheckpointError(f"cannot write {path}", because=because, hint=file_errors.then_resume(remedy))
