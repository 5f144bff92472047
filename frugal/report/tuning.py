"""What a run's tuning tried in its first steps, how long each way took, what was kept, and what trying cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from frugal.report.records import RunRecord

GROUPED = "samples grouped as if a micro-step cost {} tokens more"


@dataclass(frozen=True, kw_only=True)
class TriedWay:
    """One way of taking the same steps.

    `overhead_tokens`: what a micro-step is taken to cost besides its tokens, where samples are grouped by length.
    `rate`: the median of its steps' seconds for each token or sample; `seconds`: of a step of the typical work of all.
    `given_up`: why it was, if it was.
    """

    strategy: str
    micro_batch: int | None
    accumulation_steps: int | None
    overhead_tokens: int | None
    is_planned: bool
    is_kept: bool
    num_steps: int
    rate: float
    seconds: float
    given_up: str

    @property
    def name(self) -> str:
        """The strategy, and how samples are grouped."""
        grouped = "" if self.overhead_tokens is None else f", {GROUPED.format(self.overhead_tokens)}"
        return f"{self.strategy}{grouped}"

    @property
    def outcome(self) -> str:
        """What became of it."""
        if self.is_kept:
            return "planned, and kept" if self.is_planned else "kept"
        return "planned" if self.is_planned else f"given up: {self.given_up}" if self.given_up else "not faster"


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All of it.

    `lost_seconds`: what its steps took longer than the same work takes in the way that was kept, or, where it has not
    ended, as planned; None where that is not known.
    """

    ways: tuple[TriedWay, ...]
    first_step: int
    last_step: int
    is_over: bool
    lost_seconds: float | None


def tuning_of(records: Sequence[RunRecord]) -> Tuning | None:
    """From the `tuning` and `tuned` records of a run, in their order; None where nothing was tried."""
    steps = [each for each in records if each.event == "tuning" and each.seconds is not None and each.work]
    if not steps:
        return None
    end = next((each for each in reversed(records) if each.event == "tuned" and each.step >= steps[-1].step), None)
    typical = median(each.work or 0.0 for each in steps)
    grouped: dict[tuple[object, ...], list[RunRecord]] = {}
    for each in steps:
        grouped.setdefault(_way(each), []).append(each)
    ways = tuple(
        TriedWay(
            strategy=taken[0].strategy,
            micro_batch=taken[0].micro_batch,
            accumulation_steps=taken[0].accumulation_steps,
            overhead_tokens=taken[0].overhead_tokens,
            is_planned=taken[0].is_planned,
            is_kept=end is not None and _way(end) == way,
            num_steps=len(taken),
            rate=(rate := median(_rate(each) for each in taken)),
            seconds=rate * typical,
            given_up=taken[-1].given_up,
        )
        for way, taken in grouped.items()
    )
    compared = next((each for each in ways if (each.is_kept if end is not None else each.is_planned)), None)
    lost = None
    if compared is not None:
        lost = sum((each.seconds or 0.0) - compared.rate * (each.work or 0.0) for each in steps)
    return Tuning(
        ways=ways, first_step=steps[0].step, last_step=steps[-1].step, is_over=end is not None, lost_seconds=lost
    )


def _way(record: RunRecord) -> tuple[object, ...]:
    return record.strategy, record.micro_batch, record.accumulation_steps, record.overhead_tokens


def _rate(record: RunRecord) -> float:
    return (record.seconds or 0.0) / (record.work or 1.0)
