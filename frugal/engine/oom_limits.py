"""Out of memory: whether an error says so, what it says of the device, and how small micro-batches have to be then.

Where memory runs out, micro-batches are halved, down to one sample, then activation checkpointing is switched on. After
`PATIENCE` steps without a failure the last halving is taken back, one at a time; where that was too early, the next
attempt waits twice as long. All of it follows from what all ranks saw, and a checkpoint keeps it, so that a resumed
run cuts its batches as the run that was never stopped.
"""

import re
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frugal.checkpoint.progress import LearntLimits
from frugal.data.batches import MicroBatchLimits
from frugal.errors import OutOfMemoryError
from frugal.models import activation_checkpointing
from frugal.planning.plan import Plan
from frugal.units import format_bytes, plural

UPDATE = "the optimizer step"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_REQUEST = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)")
_OTHERS_CODE = ("torch", "deepspeed", "contextlib.py", "functools.py")


@dataclass(frozen=True)
class OutOfMemoryReport:
    """The knowledge of one rank that ran out of memory.

    Attributes:
        rank: which one.
        request_bytes: what it had asked for; None where the error does not say.
        allocated_bytes: what its tensors took.
        reserved_bytes: what torch's allocator had reserved of the device; 0 on the host, which has no such allocator.
        phase: forward, backward, the optimizer step or evaluation.
        where: the line of code that asked.
    """

    rank: int
    request_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    phase: str
    where: str

    @property
    def is_fragmentation(self) -> bool:
        """Return whether enough of the reserved memory was free, only not in one block."""
        return self.request_bytes is not None and self.reserved_bytes - self.allocated_bytes >= self.request_bytes

    def __str__(self) -> str:
        failure = "could not be given memory"
        if self.request_bytes is not None:
            failure = f"asked for {format_bytes(self.request_bytes)}"
        if self.reserved_bytes:
            failure += f" with {format_bytes(self.allocated_bytes)} of {format_bytes(self.reserved_bytes)} in use"
        return f"rank {self.rank} {failure} in {self.phase}, {self.where}"


@dataclass(frozen=True)
class OutOfMemory:
    """Memory ran out on some ranks; the same on all of them."""

    reports: tuple[OutOfMemoryReport, ...]

    @property
    def is_fragmentation(self) -> bool:
        """Return whether the same work may succeed once the allocators have emptied their caches."""
        return all(report.is_fragmentation for report in self.reports)


def recovery(shortage: OutOfMemory | None) -> dict[str, Any]:
    """Return the fields of a message about `shortage` in the log; for None those of a run that fits again."""
    reports = () if shortage is None else shortage.reports
    phases = ", ".join(dict.fromkeys(report.phase for report in reports))
    return {"recovery": {"phase": phases or None, "ranks": [report.rank for report in reports]}}


def report_of(error: BaseException, rank: int) -> OutOfMemoryReport:
    """Return what this rank reports of `error`, before its memory is freed.

    The phase is known by the functions of frugal.engine that were running, the place is the innermost line that is
    neither torch's nor DeepSpeed's.
    """
    request = _REQUEST.search(str(error))
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    frames = traceback.extract_tb(error.__traceback__)
    running = {frame.name for frame in frames if Path(__file__).parent in Path(frame.filename).parents}
    phase = "backward" if any(frame.name == "backward" for frame in frames) else "forward"
    if "update" in running:  # Update.update in oom_retry
        phase = UPDATE
    elif "_evaluated" in running:  # in train_step; what called it is not in the traceback
        phase = "evaluation"
    own = [frame for frame in frames if not set(Path(frame.filename).parts) & set(_OTHERS_CODE)] or list(frames)
    where = "an unknown place"
    if own:
        where = f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno} ({own[-1].name})"
    return OutOfMemoryReport(
        rank=rank,
        request_bytes=None if request is None else int(float(request[1]) * _UNITS[request[2]]),
        allocated_bytes=torch.cuda.memory_allocated() if on_gpu else 0,
        reserved_bytes=torch.cuda.memory_reserved() if on_gpu else 0,
        phase=phase,
        where=where,
    )


PATIENCE = 100  # optimizer steps


class AdaptiveLimits:
    """The limits of one engine's micro-batches. What is done here is the same on all ranks."""

    def __init__(self, plan: Plan, module: nn.Module) -> None:
        planned = MicroBatchLimits.of(plan)
        self._plan, self._module = plan, module
        self._now = LearntLimits(planned=planned, limits=planned)

    @property
    def limits(self) -> MicroBatchLimits:
        """Return the limits of training."""
        return self._now.limits

    @limits.setter
    def limits(self, limits: MicroBatchLimits) -> None:
        self._now = replace(self._now, limits=limits)

    @property
    def evaluation(self) -> MicroBatchLimits:
        """Return the limits of evaluation, which keeps no activations for backward."""
        return self._now.evaluation or self.limits

    @property
    def is_lowered(self) -> bool:
        """Return whether a training step takes less than planned, because memory ran out."""
        return self.limits != self._now.planned or self._now.recomputes

    def learnt(self) -> LearntLimits | None:
        """Return what a checkpoint keeps; None: nothing but what the plan says."""
        return self._now if self.is_lowered or self._now.evaluation is not None else None

    def recall(self, learnt: LearntLimits | None) -> None:
        """Continue with what a checkpoint kept, if it was learnt under this plan."""
        if learnt is not None and learnt.planned == self._now.planned:
            if learnt.recomputes and not self._now.recomputes:
                activation_checkpointing.apply(self._module, "full")
            self._now = replace(learnt, recomputes=learnt.recomputes or self._now.recomputes)

    def after_step(self) -> str | None:
        """Note a successful optimizer step; return what to say if larger micro-batches are tried again from here on."""
        now = self._now
        if not now.larger:
            return None
        self._now = replace(now, clean_steps=now.clean_steps + 1)
        if self._now.clean_steps < now.patience:
            return None
        self._now = replace(now, limits=now.larger[-1], larger=now.larger[:-1], clean_steps=0, has_grown=True)
        return f"{now.patience} steps without running out of memory: {_micro_batches(self.limits)} again"

    def lower(self, shortage: OutOfMemory, largest: int) -> str:
        """Lower the limits of training, whose largest micro-batch took as much as `largest` samples; what to say.

        Raises:
            OutOfMemoryError: there is nothing left to lower.
        """
        refuse_mistake(shortage, self._plan)
        now = self._now
        patience = 2 * now.patience if now.has_grown else now.patience
        self._now = replace(now, patience=patience, clean_steps=0, has_grown=False)
        limits = now.limits.halved(largest)
        if limits is not None:
            self._now = replace(self._now, limits=limits, larger=(*now.larger, now.limits))
            return f"out of memory: the global batch is run again with {_micro_batches(limits)}"
        can_recompute = self._plan.strategy.activation_checkpointing in ("off", "selective", "budget")
        if now.recomputes or not can_recompute or not activation_checkpointing.is_supported(self._module):
            raise self._exhausted(shortage, "with a micro-batch of one sample")
        activation_checkpointing.apply(self._module, "full")
        self._now = replace(self._now, limits=now.planned, larger=(), recomputes=True)
        return (
            "out of memory with a micro-batch of one sample: from here on activation checkpointing is full, "
            f"with {_micro_batches(self.limits)}"
        )

    def lower_evaluation(self, shortage: OutOfMemory, largest: int) -> str:
        """Lower the limits of evaluation, and leave the micro-batches of training alone. Raises as `lower`."""
        refuse_mistake(shortage, self._plan)
        limits = self.evaluation.halved(largest)
        if limits is None:
            raise self._exhausted(shortage, "in evaluation with one sample at a time")
        self._now = replace(self._now, evaluation=limits)
        return f"out of memory in evaluation: it is run again with {_micro_batches(limits)}"

    def retry_update(self, shortage: OutOfMemory, attempts: int, *, is_begun: bool) -> str:
        """Allow the same micro-batches once more after memory ran out in the optimizer step; return what to say.

        Smaller micro-batches would not help: no activation lives then.

        Raises:
            OutOfMemoryError: it happened before, or weights may have been written to.
        """
        refuse_mistake(shortage, self._plan)
        if is_begun:
            raise self._exhausted(shortage, "in the midst of writing weights")
        if attempts > 1:
            raise self._exhausted(shortage, "in the optimizer step")
        return "out of memory in the optimizer step, before a weight was written: the global batch is run again"

    def _exhausted(self, shortage: OutOfMemory, when: str) -> OutOfMemoryError:
        memory, most = self._plan.memory, max(self._plan.batch.micro_batch)
        planned = f"the plan promised {format_bytes(memory.total_bytes)} with {most} samples"
        beside = f", of {format_bytes(memory.usable_bytes)} that may be used"
        return OutOfMemoryError(
            f"out of memory {when}",
            because=[*map(str, shortage.reports), planned + beside],
            hint="plan again with less memory, a shorter --seq-len, or --activation-checkpointing full",
        )


def refuse_mistake(shortage: OutOfMemory, plan: Plan) -> None:
    """Do not try again what no plan would fit.

    Raises:
        OutOfMemoryError: a single request was for more than all that was planned.
    """
    total_bytes = plan.memory.total_bytes
    beyond = (report for report in shortage.reports if total_bytes and (report.request_bytes or 0) > total_bytes)
    if (report := next(beyond, None)) is not None:
        planned = f"{format_bytes(total_bytes)} are planned for everything together, at the peak"
        raise OutOfMemoryError(
            "a single request for more memory than the whole plan",
            because=[str(report), planned],
            hint=f"look at {report.where}: smaller micro-batches would not help; or plan with the data's own lengths",
        )


def _micro_batches(limits: MicroBatchLimits) -> str:
    return f"at most {plural(max(limits.max_samples), 'sample')} a micro-batch"
