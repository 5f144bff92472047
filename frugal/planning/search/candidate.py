"""What a search looks at, and what it finds.

In which order a search looks at strategies, so that most are never traced: the plain first, then what saves more.

What a search asks of whoever knows the model: dry runs, or formulas in their place.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from frugal.config.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.planning import cost
from frugal.planning.batch import BatchPlan
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.plan import ModelSummary, Rejected, StepTime
from frugal.planning.strategy import ActivationCheckpointing, Place, Strategy

TIE = 1.02
"""Times within 2 % are equal: the cost model is no better than that."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One strategy, looked at.

    Without `memory` it was left unprofiled: it could not be faster (`time` is then the best it could do), or it could
    not fit (`least_shortfall_bytes`).

    `memory` is that of the fullest device: with `batch` where it fits, otherwise with the smallest micro-batch the
    request allows. `largest_micro_batch` is the most that fits; one more would lack `shortfall_of_next_bytes`, or is
    not wanted where that is None. `is_draft`: `memory` and `time` leave out what the allocator wastes, so that they
    are bounds from below.
    """

    strategy: Strategy
    micro_batch: int
    batch: BatchPlan | None
    memory: MemoryBreakdown | None
    time: StepTime | None
    host_shortfall_bytes: int = 0
    disk_shortfall_bytes: int = 0
    least_shortfall_bytes: int | None = None
    largest_micro_batch: int = 0
    shortfall_of_next_bytes: int | None = None
    is_draft: bool = False

    @property
    def fits(self) -> bool:
        """Whether there is a batch that fits."""
        return self.batch is not None

    @property
    def headroom_bytes(self) -> int | None:
        """What is left of the scarcer memory, or disk; negative: the shortfall."""
        if self.memory is None:
            return None if self.least_shortfall_bytes is None else -self.least_shortfall_bytes
        return -(self.host_shortfall_bytes or self.disk_shortfall_bytes) or self.memory.headroom_bytes

    @property
    def seconds(self) -> float:
        """Of one optimizer step."""
        return self.time.total_seconds if self.time else float("inf")

    @property
    def simplicity(self) -> tuple[int, bool, float]:
        """Sorts equally fast options: fewer mechanisms, then even micro-batches, then time."""
        return self.strategy.num_mechanisms, not (self.batch and self.batch.is_uniform), self.seconds

    def rules_out(self, draft: "Option") -> bool:
        """Whether this one, which fits, is no slower and no less simple than `draft` turns out at best."""
        at_best = (draft.strategy.num_mechanisms, False)
        return self.seconds <= draft.seconds and self.simplicity[:2] <= at_best


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was found. `memory` is dry-run; `options` are all that were looked at, the chosen one included."""

    option: Option
    memory: MemoryBreakdown
    model: ModelSummary
    options: tuple[Option, ...]
    warnings: tuple[str, ...]

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The others, fastest first, those that do not fit last."""
        others = [option for option in self.options if option.strategy != self.option.strategy]
        others.sort(key=lambda option: (option.seconds, -(option.headroom_bytes or 0)))
        return tuple(
            Rejected(
                strategy=option.strategy,
                micro_batch=option.micro_batch,
                reason=self._reason(option),
                headroom_bytes=None if option.is_draft and option.fits else option.headroom_bytes,
                step_seconds=option.time.total_seconds if option.time else None,
                accumulation_steps=option.batch.accumulation_steps if option.batch else None,
                peak_bytes=option.memory.total_bytes if option.memory else None,
                time=option.time,
                is_bound=option.is_draft or option.memory is None,
            )
            for option in others
        )

    def _reason(self, option: Option) -> str:
        if option.least_shortfall_bytes is not None:
            return "cannot fit: what does not depend on it is too much already"
        is_bound = option.memory is None or (option.is_draft and option.fits)
        if is_bound and option.seconds >= self.option.seconds:
            return "cannot be faster"
        if not (option.fits or is_bound):
            if option.disk_shortfall_bytes:
                return "does not fit on a node's disk"
            return "does not fit into host memory" if option.host_shortfall_bytes else "does not fit"
        if option.seconds > self.option.seconds * TIE:
            return "slower"
        return f"not faster by {100 * (TIE - 1):.0f} %, and less simple"


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """None of `num_strategies` fits: `options` are those that were looked at, the nearest first, `seen` are all."""

    options: tuple[Option, ...]
    num_strategies: int
    seen: tuple[Option, ...] = ()

    @property
    def nearest(self) -> Option:
        """The option that misses by least."""
        return self.options[0]

    @property
    def by_level(self) -> dict[tuple[Place, Place], dict[int, Option]]:
        """What misses by least, for every ZeRO stage under every place of optimizer and parameters."""
        exact = {option.strategy: option for option in self.options}
        nearest: dict[tuple[Place, Place], dict[int, Option]] = {}
        for option in (exact.get(option.strategy, option) for option in self.seen):
            strategy = option.strategy
            level = nearest.setdefault((strategy.offload_optimizer, strategy.offload_parameters), {})
            before = level.get(strategy.zero_stage)
            if before is None or (option.headroom_bytes or 0) > (before.headroom_bytes or 0):
                level[strategy.zero_stage] = option
        return {places: dict(sorted(level.items())) for places, level in nearest.items()}


SEARCH_ORDER: tuple[tuple[ActivationCheckpointing, ...], ...] = (("off",), ("full", "selective"), ("offloaded",))
"""Modes of activation checkpointing, in the order they are looked at."""

LIKE: dict[ActivationCheckpointing, tuple[ActivationCheckpointing, ...]] = {
    "off": ("off",),
    "full": ("full", "off"),
    "selective": ("selective", "off"),
    "offloaded": ("offloaded", "full", "off"),
}
"""Whose work a mode's best case is taken from: its own, or that of one which does no more."""

BUCKET_SHARE = 0.05
"""Of a device's memory: where buckets take more, smaller ones are tried, too."""


def search_order(strategies: Sequence[Strategy]) -> list[list[Strategy]]:
    """The strategies of each turn, in their order."""
    return [[each for each in strategies if each.activation_checkpointing in modes] for modes in SEARCH_ORDER]


def buckets_matter(options: Sequence[Option], request: Request, usable_bytes: int) -> bool:
    """Whether smaller buckets could make something fit where nothing does, or make much room on a small device."""
    usual = next((option.strategy for option in options if option.strategy.zero_stage), None)
    if usual is None or request.reduce_bucket_elements or usual.offload_optimizer == "nvme":
        return False
    elements = usual.reduce_bucket_elements * (2 if usual.overlap_comm else 1)
    if any(option.strategy.zero_stage == 3 for option in options):
        elements += usual.prefetch_bucket_elements + min(usual.max_live_elements, usual.prefetch_bucket_elements)
    saved_bytes = elements * (4 if request.precision == "fp32" else 2)
    if any(option.fits for option in options):
        return saved_bytes > BUCKET_SHARE * usable_bytes
    known = [option.headroom_bytes for option in options if option.headroom_bytes is not None]
    return bool(known) and -max(known) < saved_bytes


class Facts(Protocol):
    """What is known of a model before it runs, in elements.

    `max_positions`: tokens it can read, None: any number. `can_recompute`: whether it takes activation checkpointing,
    `can_tile`: whether it takes the tiled loss.
    """

    @property
    def task(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def trainable_parameters(self) -> int: ...
    @property
    def largest_parameter(self) -> int: ...
    @property
    def max_positions(self) -> int | None: ...
    @property
    def can_recompute(self) -> bool: ...
    @property
    def can_tile(self) -> bool: ...


class Profile(cost.Model, Protocol):
    """What one model costs under one strategy, for any micro-batch. `draft`: without the allocator's part."""

    @property
    def draft(self) -> "Profile": ...
    def memory(self, micro_batch: int, device: Device) -> MemoryBreakdown: ...
    def largest_micro_batch(self, device: Device, cap: int) -> int: ...


class Source(Protocol):
    """Where profiles come from. `accumulates`: whether there is more than one micro-step.

    `prepare` is told what will be asked for. `draft` is a profile without the allocator's part, found by arithmetic;
    None where only a dry run could tell. `distrust` has a strategy profiled by dry runs from now on; false if it
    already is. `notes`: what the last dry run assumed, where memory depends on the data.
    """

    @property
    def notes(self) -> tuple[str, ...]: ...
    def facts(self) -> Facts: ...
    def prepare(self, strategies: Sequence[Strategy]) -> None: ...
    def draft(self, strategy: Strategy, accumulates: bool) -> Profile | None: ...
    def distrust(self, strategy: Strategy) -> bool: ...
    def profile(self, strategy: Strategy, accumulates: bool) -> Profile: ...
    def dry_run(
        self, strategy: Strategy, micro_batch: int, accumulation_steps: int, device: Device | None = None
    ) -> MemoryBreakdown: ...


OpenSource = Callable[[Request, Cluster], AbstractContextManager[Source]]
"""A source for one request on one cluster, open while the context lasts."""
