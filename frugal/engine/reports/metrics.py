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
    end          step (the last that was done), status (done, stopped, interrupted, failed; lost: another rank was,
                 whoever started the run knows why and adds its own), why, time

A resumed run appends, after dropping the records beyond the step it resumes from; what the run went through stays:
starts, ends and recoveries. A number that is not finite is null.

The file is flushed (fsync) before each checkpoint, so that a checkpoint never exists without the records of its steps.
It is never shortened in place: what is dropped at a resume is left out of a new file, which replaces the old one when
it is on the disk. Where the disk is full, records wait in memory for room until the next checkpoint.
"""

import errno
import logging
import math
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from frugal import file_errors, files
from frugal.config.run_settings import METRICS
from frugal.distributed import rank_logs
from frugal.distributed.first_failure import LostRankError, lost_connection
from frugal.engine.evaluation import Evaluation
from frugal.engine.measure.run_gauge import EVALUATION, PhasePeak
from frugal.engine.reports.trackers import Trackers
from frugal.engine.train_step import StepResult
from frugal.errors import CheckpointError, FrugalError, first_line, logger
from frugal.report.records import has_fewer_tokens
from frugal.units import format_bytes, format_number, format_rate, format_seconds, plural

PLAIN_LINES = 40  # about as many lines of progress where there is no terminal
WINDOW = 20  # steps over which the speed is averaged
BAR_WIDTH = 20


class _Record(msgspec.Struct):
    step: int
    event: str = ""


_HISTORY = ("start", "end", "recovery")
"""Events that stay, whatever becomes of their step: they did happen."""


class Records:
    """`metrics.jsonl`, without records of steps after `last_step` and without half a record, to append to.

    Each write opens the file of that name, which another program may have replaced, and begins on a line of its own.

    Attributes:
        dropped_steps: steps after `last_step` that had records.

    Raises:
        CheckpointError: it cannot be read or written; it is what it was.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path = path.absolute()
        self._unwritten: list[bytes] = []
        self._is_failing = False
        with self._writing():
            self._append()
            self._folder = path.parent.stat()
            if sum(map(len, self._kept(last_step))) != path.stat().st_size:
                files.write_file(path, self._kept(last_step))
        if self._num_broken:
            number = plural(self._num_broken, "line")
            logger.warning("%s: %s of it cannot be read as records, and are left out", path, number)

    def _kept(self, last_step: int) -> Iterator[bytes]:
        """Yield the lines to keep, and count the others."""
        self.dropped_steps = self._num_broken = 0
        for line in files.read_lines(self._path):
            record = None
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                record = msgspec.json.decode(line, type=_Record)
            if record is None:
                self._num_broken += line.endswith(b"\n") and not line.isspace()  # half a line: of a killed run
                continue
            if record.event == "step":
                self.dropped_steps = max(self.dropped_steps, record.step - last_step)
            if line.endswith(b"\n") and (record.step <= last_step or record.event in _HISTORY):
                yield line

    @property
    def is_folder_gone(self) -> bool:
        """Return whether the run's folder was deleted or moved."""
        try:
            return not os.path.samestat(self._path.parent.stat(), self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # it is not known: the next write says why
            return False

    def add(self, line: bytes) -> None:
        """Append a record, or keep it until there is room."""
        self._unwritten.append(line)
        try:
            if not self.is_folder_gone:
                self._append()
        except OSError as error:
            if not self._is_failing:
                because, remedy = file_errors.explain(error, self._path)
                logger.warning("cannot write %s, it is kept for the next checkpoint: %s; %s", METRICS, because, remedy)
            self._is_failing = True

    def sync(self) -> None:
        """Have all records on the disk.

        Raises:
            OSError: they cannot be written, or the run's folder was deleted or moved.
        """
        if self.is_folder_gone:
            what = "the run's folder was deleted or moved (moved back, it can be resumed)"
            raise FileNotFoundError(errno.ENOENT, what, str(self._path.parent))
        try:
            self._append(durable=True)
        except OSError as error:
            error.filename = error.filename or str(self._path)
            raise

    def close(self, *, in_error: bool) -> None:
        """Write what was kept. `in_error`: another error is on its way, which is reported."""
        with suppress(CheckpointError) if in_error else nullcontext(), self._writing():
            if not self.is_folder_gone:
                self._append()

    def _append(self, *, durable: bool = False) -> None:
        """Append all that is unwritten or nothing of it; what is no file in the place of one is moved aside."""
        if os.path.lexists(self._path) and not stat.S_ISREG(self._path.lstat().st_mode):
            files.move_aside(self._path)
        files.append_lines(self._path, b"".join(self._unwritten), durable=durable)
        self._unwritten.clear()
        self._is_failing = False

    def _writing(self) -> AbstractContextManager[None]:
        return file_errors.failure(
            f"cannot write {self._path}", self._path, file_errors.THEN_RESUME, raises=CheckpointError
        )


@dataclass(frozen=True)
class PlannedMemory:
    """The peak in bytes that the plan has, its largest micro-batch (samples and tokens; None: not known), phases."""

    peak_bytes: int
    micro_batch: tuple[int, int] | None = None
    phase_bytes: Mapping[str, int] = field(default_factory=dict)


class Log(logging.Handler):
    """One run's log, which `trackers` get, too. Use it in a `with` block. Ranks other than 0 write nothing.

    Inside the block it prints what frugal logs, such as a recovery, in one stream with the progress. `published` is
    called after a checkpoint is complete.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        planned: PlannedMemory,
        total_steps: int,
        first_step: int = 0,
        trackers: Trackers | None = None,
        console: Console | None = None,
    ) -> None:
        super().__init__()
        self.is_rank_0 = rank == 0
        self.published: Callable[[], None] = lambda: None
        self.memory_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self._planned = planned
        self._first_step = self._step = first_step  # `_step`: the last that was done
        self._total_steps = total_steps
        self._status: tuple[str, str] | None = None  # of a run that was started: how it ended, and why
        self._last_line = time.monotonic()
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=WINDOW)  # (seconds, tokens, targets) of each
        if self.is_rank_0:
            self._console = console or Console(highlight=False, soft_wrap=True)
            self._trackers = trackers
            self._metrics = Records(folder / METRICS, first_step)
            self._line = Live(console=self._console, transient=True)

    def __enter__(self) -> Self:
        """Show the progress."""
        if self.is_rank_0:
            if self._console.is_terminal:
                self._line.start()
            logger.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record how the run ended, and leave the terminal as it was."""
        if self.is_rank_0:
            if self._trackers is not None:
                self._trackers.finish()
            logger.removeHandler(self)
            self._line.stop()
            if self._status is not None:
                status, why = self._status
                if error is not None:
                    is_lost = isinstance(error, LostRankError) or lost_connection(error)
                    status = "lost" if is_lost else "failed"
                    why = error.what if isinstance(error, FrugalError | LostRankError) else first_line(error)
                self.event(event="end", step=self._step, status=status, why=why)
            self._metrics.close(in_error=error is not None)

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record's message; a recovery from out of memory is recorded, too."""
        self.say(record.getMessage())
        recovery: dict[str, Any] | None = getattr(record, "recovery", None)
        if recovery is not None:
            self.recovery(record.getMessage(), **recovery)

    def say(self, text: str) -> None:
        """Print a line, above the line of progress."""
        if self.is_rank_0:
            self._console.print(text, markup=False)
            rank_logs.to_file(text)

    def event(self, **values: Any) -> None:
        """Add a record: `event`, `step`, and whatever else it has."""
        if self.is_rank_0:
            self._metrics.add(msgspec.json.encode({**values, "time": round(time.time(), 3)}) + b"\n")
            if self._trackers is not None:
                self._trackers.record(values["event"], values)

    def start(self, **said: Any) -> None:
        """Record that the run begins, or is resumed; `said`: what else is in the record."""
        self._status = "failed", ""
        if self.is_rank_0:
            self.event(
                event="start", step=self._first_step, total_steps=self._total_steps,
                dropped_steps=self._metrics.dropped_steps, **said,
            )  # fmt: skip

    def ends(self, status: str, why: str = "") -> None:
        """Note how the run ends, if nothing fails from here on."""
        self._status = status, why

    def takes(self, peak: PhasePeak) -> None:
        """Note the peak of this rank's device so far, where it is known."""
        self.memory_bytes = peak.allocated_bytes or self.memory_bytes
        self.reserved_bytes = peak.reserved_bytes or self.reserved_bytes

    def step(self, step: int, result: StepResult, seconds: float) -> None:
        """Record step number `step` (from 1), which took `seconds`."""
        self._step = step
        if not self.is_rank_0:
            return
        self._recent.append((seconds, result.tokens or 0, result.targets))
        self.event(
            event="step", step=step, loss=result.loss, targets=result.targets, samples=result.samples,
            learning_rate=result.learning_rate, grad_norm=result.grad_norm,
            tokens_per_second=result.targets / seconds, tokens=result.tokens, positions=result.positions,
            memory_bytes=self.memory_bytes, reserved_bytes=self.reserved_bytes,
        )  # fmt: skip
        window, tokens, targets = map(sum, zip(*self._recent, strict=True))
        lines = progress_lines(
            step, self._total_steps, result, tokens_per_second=tokens / window, targets_per_second=targets / window,
            seconds_left=window / len(self._recent) * (self._total_steps - step),
            measured_bytes=self.memory_bytes, planned_bytes=self._planned.peak_bytes,
        )  # fmt: skip
        if self._console.is_terminal:
            fitting = next((line for line in lines if len(line) <= self._console.width), lines[-1])
            self._line.update(Text(fitting, no_wrap=True, overflow="ellipsis"))
        if (  # a plain line: the first, the last, about `PLAIN_LINES` between, one a minute
            step % math.ceil(self._total_steps / PLAIN_LINES) == 0
            or step in (self._first_step + 1, self._total_steps)
            or time.monotonic() - self._last_line > 60
        ):
            (rank_logs.to_file if self._console.is_terminal else self.say)(lines[1])
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
        """Record an evaluation after `step` steps on the samples named `of`; `peak`: of its memory meanwhile."""
        values = {"metrics": evaluation.metrics} if evaluation.metrics else {}
        measured = {} if seconds is None else {"seconds": round(seconds, 6), **_phase(peak)}
        self.event(
            event="evaluation" if of == "validation" else of, step=step, loss=evaluation.loss,
            perplexity=evaluation.perplexity, targets=evaluation.targets, samples=evaluation.samples,
            reserved_bytes=self.reserved_bytes, **values, **measured,
        )  # fmt: skip
        numbers = ""
        if evaluation.targets > evaluation.samples:  # with one target a sample, as of classes, it says nothing
            numbers += f"  perplexity {format_number(evaluation.perplexity, 2)}"
        for name, value in evaluation.metrics.items():
            numbers += f"  {name} {value:.4g}"
        self.say(
            f"step {step}/{self._total_steps}  {of} loss {format_number(evaluation.loss)}{numbers}"
            f"  ({evaluation.samples} samples)"
        )

    def checkpoint(self, step: int, seconds: float, peak: PhasePeak) -> None:
        """Record a checkpoint after `step` steps, for which training waited `seconds`."""
        self.event(event="checkpoint", step=step, seconds=round(seconds, 6), **_phase(peak))

    def recovery(self, message: str, *, phase: str | None, ranks: list[int]) -> None:
        """Record that a step is done again since memory ran out in `phase`; None: larger micro-batches are tried."""
        step = self._step + (phase not in (None, EVALUATION))
        self.event(event="recovery", step=step, message=message, phase=phase, ranks=ranks)

    def left_out(self, step: int, why: str, samples: list[int], *, is_going_on: bool) -> None:
        """Record that step number `step` updated nothing, because of `samples`."""
        self.event(event="left_out", step=step, why=why, samples=samples)
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
        """Compare measured memory with the plan's, after two steps: all that the plan counts was allocated once.

        `is_lowered`: memory ran out in them, and smaller micro-batches than planned were measured. `largest`: samples
        and tokens of the largest micro-batch that was run; None: not known. If it is smaller than the plan's, the two
        amounts are of different work, and no difference is claimed. `is_resumed`: only a record is added.
        """
        self.memory_bytes = measured_bytes
        nothing = PhasePeak()
        self.event(
            event="memory", step=step, planned_bytes=self._planned.peak_bytes, measured_bytes=measured_bytes,
            planned_micro_batch=self._planned.micro_batch, largest_micro_batch=largest,
            phases={
                name: {
                    "planned_bytes": self._planned.phase_bytes.get(name),
                    "measured_bytes": (phases or {}).get(name, nothing).allocated_bytes,
                    "reserved_bytes": (phases or {}).get(name, nothing).reserved_bytes,
                }
                for name in dict.fromkeys((*self._planned.phase_bytes, *(phases or {})))
            },
        )  # fmt: skip
        if is_resumed:
            return
        planned_bytes, size = self._planned.peak_bytes, self._planned.micro_batch
        difference = (measured_bytes / planned_bytes - 1) * 100 if planned_bytes else math.inf
        planned, measured = format_bytes(planned_bytes), format_bytes(measured_bytes)
        if not is_lowered and has_fewer_tokens(largest, size):
            assert largest is not None and size is not None
            planned += f" for {size[0]} x {size[1]} tokens"
            over = f" ({difference:+.1f} %)" if difference > 0 else ""
            self.say(
                f"memory: planned {planned}; largest micro-batch so far {largest[0]} x {largest[1]}: "
                f"measured {measured}{over}"
            )
            return
        why = ""
        if is_lowered:
            why = "; memory ran out, and micro-batches are smaller than planned"
        elif difference < -2 and largest is None:
            why = "; the plan is for batches of full-length samples"
        self.say(f"memory: planned {planned}, measured {measured} ({difference:+.1f} %{why})")

    @property
    def is_folder_gone(self) -> bool:
        """Return whether rank 0 knows that the run's folder was deleted or moved."""
        return self.is_rank_0 and self._metrics.is_folder_gone

    def sync(self) -> None:
        """Have all records on the disk.

        Raises:
            OSError: they cannot be written, or the run's folder was deleted or moved.
        """
        if self.is_rank_0:
            self._metrics.sync()


def _phase(peak: PhasePeak | None) -> dict[str, int | None]:
    peak = peak or PhasePeak()
    return {"phase_bytes": peak.allocated_bytes, "phase_reserved_bytes": peak.reserved_bytes}


def progress_lines(
    step: int,
    total_steps: int,
    result: StepResult,
    *,
    tokens_per_second: float,
    targets_per_second: float,
    seconds_left: float,
    measured_bytes: int | None,
    planned_bytes: int,
) -> list[str]:
    """Return the line after `step` steps in forms from long to short; the second has every number and no bar.

    `result` is that of the last step, `tokens_per_second` all that ranks process, without padding (0: samples are not
    of tokens), `targets_per_second` those with a loss, `measured_bytes` rank 0's peak so far.
    """
    processed = f"{format_rate(tokens_per_second)} tokens/s, " if tokens_per_second else ""
    memory = "" if measured_bytes is None else f"{format_bytes(measured_bytes)} of "
    numbers = [
        f"loss {format_number(result.loss)}",
        f"{format_seconds(seconds_left)} left",
        f"{processed}{format_rate(targets_per_second)} target tokens/s",
        f"memory {memory}{format_bytes(planned_bytes)}",
        f"lr {result.learning_rate:.2e}",
    ]
    count = f"step {step}/{total_steps}"
    done = BAR_WIDTH * step // max(total_steps, 1)
    rows = [[count, "━" * done + "─" * (BAR_WIDTH - done), *numbers]]
    rows += [[count, *numbers[:number]] for number in range(len(numbers), 0, -1)]
    return ["  ".join(row) for row in rows]
