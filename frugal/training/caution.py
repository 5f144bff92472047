"""What a run has learnt of the memory there is: how small its cells have to be, and when to try larger ones again.

Where memory runs out, cells are halved, down to one sample, then activation checkpointing is switched on. After
`PATIENCE` steps without a failure the last halving is taken back, one at a time; where that was too early, the next
attempt waits twice as long. All of it follows from what all ranks saw, and a checkpoint keeps it, so that a resumed
run cuts its batches as the run that was never stopped.
"""

from dataclasses import dataclass

from torch import nn

from frugal.errors import OutOfMemoryError
from frugal.planning.plan import Plan
from frugal.training import activation_checkpointing
from frugal.training.cells import Limits
from frugal.training.shortage import Shortage
from frugal.units import format_bytes

PATIENCE = 100  # optimizer steps


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What a checkpoint keeps.

    Attributes:
        planned: the plan's limits; under another plan nothing was learnt.
        limits: those in force in training.
        larger: those they were lowered from, the plan's first.
        evaluation: those in force in evaluation, where memory ran out in it.
        clean_steps: optimizer steps since they last changed.
        patience: clean steps until the next larger ones are tried.
        has_grown: whether the last change was to larger ones.
        recomputes: whether activation checkpointing was switched on.
    """

    planned: Limits
    limits: Limits
    larger: tuple[Limits, ...] = ()
    evaluation: Limits | None = None
    clean_steps: int = 0
    patience: int = PATIENCE
    has_grown: bool = False
    recomputes: bool = False


class Caution:
    """The limits of one engine's micro-batches. What is done here is the same on all ranks."""

    def __init__(self, plan: Plan, module: nn.Module) -> None:
        self.limits = self.planned = Limits.of(plan)
        self._plan = plan
        self._module = module
        self._larger: tuple[Limits, ...] = ()
        self._evaluation: Limits | None = None
        self._clean_steps = 0
        self._patience = PATIENCE
        self._has_grown = False
        self._recomputes = False

    @property
    def evaluation(self) -> Limits:
        """Limits of evaluation, which keeps no activations for backward."""
        return self._evaluation or self.limits

    def learnt(self) -> Learnt | None:
        """For a checkpoint; None: nothing but what the plan says."""
        if self.limits == self.planned and self._evaluation is None and not self._recomputes:
            return None
        return Learnt(
            planned=self.planned, limits=self.limits, larger=self._larger, evaluation=self._evaluation,
            clean_steps=self._clean_steps, patience=self._patience, has_grown=self._has_grown,
            recomputes=self._recomputes,
        )  # fmt: skip

    def recall(self, learnt: Learnt | None) -> None:
        """Go on with what a checkpoint kept, if it was learnt under this plan."""
        if learnt is None or learnt.planned != self.planned:
            return
        self.limits, self._larger, self._evaluation = learnt.limits, learnt.larger, learnt.evaluation
        self._clean_steps, self._patience, self._has_grown = learnt.clean_steps, learnt.patience, learnt.has_grown
        if learnt.recomputes and not self._recomputes:
            self._recompute()

    def after_step(self) -> str | None:
        """An optimizer step went well; what to say if larger cells are tried again from here on."""
        if not self._larger:
            return None
        self._clean_steps += 1
        if self._clean_steps < self._patience:
            return None
        self.limits, self._larger = self._larger[-1], self._larger[:-1]
        done, self._clean_steps, self._has_grown = self._clean_steps, 0, True
        return f"{done} steps without running out of memory: {_cells(self.limits)} again"

    def lower(self, shortage: Shortage, largest: int) -> str:
        """Memory ran out in training, where the largest cell took as much as `largest` samples; what to say.

        Raises:
            OutOfMemoryError: there is nothing left to lower.
        """
        refuse_mistake(shortage, self._plan)
        if self._has_grown:
            self._patience *= 2
        self._clean_steps, self._has_grown = 0, False
        limits = self.limits.halved(largest)
        if limits is not None:
            self._larger = (*self._larger, self.limits)
            self.limits = limits
            return f"out of memory: the global batch is run again with {_cells(limits)}"
        if self._can_recompute():
            self._recompute()
            self.limits, self._larger = self.planned, ()
            return (
                "out of memory with a micro-batch of one sample: from here on activation checkpointing is full, "
                f"with {_cells(self.limits)}"
            )
        raise self._exhausted(shortage, "with a micro-batch of one sample")

    def lower_evaluation(self, shortage: Shortage, largest: int) -> str:
        """The same in evaluation, which leaves the cells of training alone."""
        refuse_mistake(shortage, self._plan)
        limits = self.evaluation.halved(largest)
        if limits is None:
            raise self._exhausted(shortage, "in evaluation with one sample at a time")
        self._evaluation = limits
        return f"out of memory in evaluation: it is run again with {_cells(limits)}"

    def retry_update(self, shortage: Shortage, attempts: int, *, is_begun: bool) -> str:
        """Memory ran out in the optimizer step; what to say if the same cells may be run again, once.

        Smaller cells would not help: no activation lives then.

        Raises:
            OutOfMemoryError: it happened before, or weights may have been written to.
        """
        refuse_mistake(shortage, self._plan)
        if is_begun:
            raise self._exhausted(shortage, "in the midst of writing weights")
        if attempts > 1:
            raise self._exhausted(shortage, "in the optimizer step")
        return "out of memory in the optimizer step, before a weight was written: the global batch is run again"

    def _can_recompute(self) -> bool:
        mode = self._plan.strategy.activation_checkpointing
        return (
            mode in ("off", "selective")
            and not self._recomputes
            and activation_checkpointing.is_supported(self._module)
        )

    def _recompute(self) -> None:
        activation_checkpointing.apply(self._module, "full")
        self._recomputes = True

    def _exhausted(self, shortage: Shortage, when: str) -> OutOfMemoryError:
        memory, most = self._plan.memory, max(self._plan.batch.micro_batch)
        planned = f"the plan promised {format_bytes(memory.total_bytes)} with {most} samples"
        beside = f", of {format_bytes(memory.usable_bytes)} that may be used"
        return OutOfMemoryError(
            f"out of memory {when}",
            because=[*map(str, shortage.reports), planned + beside],
            hint="plan again with less memory, a shorter --seq-len, or --activation-checkpointing full",
        )


def refuse_mistake(shortage: Shortage, plan: Plan) -> None:
    """Do not try again what no plan would fit.

    Raises:
        OutOfMemoryError: a single request was for more than all that was planned.
    """
    report = shortage.beyond(plan.memory.total_bytes)
    if report is not None:
        planned = f"{format_bytes(plan.memory.total_bytes)} are planned for everything together, at the peak"
        raise OutOfMemoryError(
            "a single request for more memory than the whole plan",
            because=[str(report), planned],
            hint=f"look at {report.where}: smaller cells would not help; or plan with the data's own lengths",
        )


def _cells(limits: Limits) -> str:
    most = max(limits.max_samples)
    return f"at most {most} sample{'s' * (most != 1)} a cell"
