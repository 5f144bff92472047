"""What a search weighs, in which order, and what comes out; and where it gets profiles of the model from."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.planning import cost
from frugal.planning.batch import BatchPlan
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.plan import ModelSummary, Rejected, StepTime
from frugal.planning.strategy import ActivationCheckpointing, Place, Strategy

TIE = 1.02
"""Times within 2 % are equal: the cost model is no better than that."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One strategy with what is known of its memory and time: all of it, or bounds that were enough to pass it over.

    Attributes:
        strategy: which.
        micro_batch: samples on the fullest rank.
        batch: the best one that fits; None: none does, or the strategy was passed over.
        memory: of the fullest device: with `batch` where it fits, otherwise with the smallest micro-batch the request
            allows. None: never profiled, because the strategy could not be faster (`time` is then the least it could
            take) or could not fit (`least_shortfall_bytes`).
        time: predicted, of one optimizer step.
        host_shortfall_bytes: what the host memory of some node lacks.
        disk_shortfall_bytes: what the disk of some node lacks.
        least_shortfall_bytes: what a device lacks at least; None where `memory` says it.
        largest_micro_batch: the most samples that fit a device.
        shortfall_of_next_bytes: what one sample more would lack; None where it is not wanted.
        is_draft: `memory` and `time` leave out what the allocator wastes, so they are lower bounds.
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
    def takes_one_micro_step(self) -> bool:
        """Whether its batch needs no accumulation."""
        return self.batch is not None and self.batch.accumulation_steps == 1

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
        """Sorts equally fast candidates: fewer mechanisms, then equal micro-batches, then time."""
        return self.strategy.num_mechanisms, not (self.batch and self.batch.is_uniform), self.seconds

    def dominates(self, draft: "Candidate") -> bool:
        """Whether this one, which fits, is no slower and no less simple than `draft` turns out at best."""
        at_best = (draft.strategy.num_mechanisms, False)
        return self.seconds <= draft.seconds and self.simplicity[:2] <= at_best


def fastest_seconds(candidates: Iterable[Candidate]) -> float:
    """Of the candidates that fit; infinite where none does."""
    return min((candidate.seconds for candidate in candidates if candidate.fits), default=float("inf"))


TRUST = 0.01
"""A profile that is further than this from the dry run is wrong, and the plan says so. In live bytes: what the
allocator wastes may change by as much with the order of a few small blocks."""


class Outcome(Enum):
    """What the dry run of a winner says of its profile, in the words of the warning; `CONFIRMED` needs none."""

    CONFIRMED = ""
    INACCURATE = "it still fits"
    TOO_LARGE = "it does not fit, and was not chosen"
    WRONG_PROFILE = "it was profiled by dry runs instead"

    @property
    def is_chosen(self) -> bool:
        """Whether the winner is taken; otherwise its level is evaluated again."""
        return self in (Outcome.CONFIRMED, Outcome.INACCURATE)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The strategy that was chosen. `memory` is that of its dry run; `candidates` are all, the chosen one included.

    `in_other_segments`: what it would take with expandable segments where it has none, or without; None on CPU ranks.
    `shared_because`: why ranks share samples, where nobody asked for it.
    """

    chosen: Candidate
    memory: MemoryBreakdown
    model: ModelSummary
    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...]
    in_other_segments: MemoryBreakdown | None = None
    shared_because: str = ""

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The others, fastest first, those that do not fit last."""
        others = [candidate for candidate in self.candidates if candidate.strategy != self.chosen.strategy]
        others.sort(key=lambda candidate: (candidate.seconds, -(candidate.headroom_bytes or 0)))
        return tuple(
            Rejected(
                strategy=candidate.strategy,
                micro_batch=candidate.micro_batch,
                reason=self._reason(candidate),
                headroom_bytes=None if candidate.is_draft and candidate.fits else candidate.headroom_bytes,
                step_seconds=candidate.time.total_seconds if candidate.time else None,
                accumulation_steps=candidate.batch.accumulation_steps if candidate.batch else None,
                peak_bytes=candidate.memory.total_bytes if candidate.memory else None,
                time=candidate.time,
                is_bound=candidate.is_draft or candidate.memory is None,
            )
            for candidate in others
        )

    def _reason(self, candidate: Candidate) -> str:
        if candidate.least_shortfall_bytes is not None:
            return "cannot fit: what does not depend on it is too much already"
        is_bound = candidate.memory is None or (candidate.is_draft and candidate.fits)
        if is_bound and candidate.seconds >= self.chosen.seconds:
            return "cannot be faster"
        if not (candidate.fits or is_bound):
            if candidate.disk_shortfall_bytes:
                return "does not fit on a node's disk"
            return "does not fit into host memory" if candidate.host_shortfall_bytes else "does not fit"
        if candidate.seconds > self.chosen.seconds * TIE:
            return "slower"
        return f"not faster by {100 * (TIE - 1):.0f} %, and less simple"


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """No candidate fits: all `candidates`, and those whose shortfall is known exactly, `nearest_first`."""

    candidates: tuple[Candidate, ...]
    nearest_first: tuple[Candidate, ...]

    @property
    def nearest(self) -> Candidate:
        """The candidate that misses by least."""
        return self.nearest_first[0]

    @property
    def num_strategies(self) -> int:
        """Strategies of which none fits."""
        return len(self.candidates)

    @property
    def by_level(self) -> dict[tuple[Place, Place], dict[int, Candidate]]:
        """What misses by least, for every ZeRO stage under every place of optimizer and parameters."""
        exact = {candidate.strategy: candidate for candidate in self.nearest_first}
        nearest: dict[tuple[Place, Place], dict[int, Candidate]] = {}
        for candidate in (exact.get(candidate.strategy, candidate) for candidate in self.candidates):
            strategy = candidate.strategy
            level = nearest.setdefault((strategy.offload_optimizer, strategy.offload_parameters), {})
            before = level.get(strategy.zero_stage)
            if before is None or (candidate.headroom_bytes or 0) > (before.headroom_bytes or 0):
                level[strategy.zero_stage] = candidate
        return {places: dict(sorted(level.items())) for places, level in nearest.items()}


CHECKPOINTING_ROUNDS: tuple[tuple[ActivationCheckpointing, ...], ...] = (
    ("off", "budget"),  # a mixture only where it was pinned
    ("full", "selective"),
    ("offloaded",),
)
"""Modes of activation checkpointing in the order of their evaluation, those that recompute and copy least first: what
fits without recomputation often leaves nothing to gain, and then the other modes are never traced."""

WORK_NO_GREATER: dict[ActivationCheckpointing, tuple[ActivationCheckpointing, ...]] = {
    "off": ("off",),
    "full": ("full", "off"),
    "selective": ("selective", "off"),
    "offloaded": ("offloaded", "full", "off"),
    "budget": ("off",),
}
"""Modes whose work is a lower bound of a mode's own, the tightest first."""

BUCKET_SHARE = 0.05
"""Of a device's memory: where buckets take more, smaller ones are tried, too."""


def evaluation_rounds(strategies: Sequence[Strategy]) -> list[list[Strategy]]:
    """The strategies of each round, in their order."""
    return [
        [strategy for strategy in strategies if strategy.activation_checkpointing in modes]
        for modes in CHECKPOINTING_ROUNDS
    ]


def small_buckets_could_help(candidates: Sequence[Candidate], request: Request, usable_bytes: int) -> bool:
    """Whether smaller buckets could make something fit where nothing does, or free much of a small device's memory."""
    usual = next((candidate.strategy for candidate in candidates if candidate.strategy.zero_stage), None)
    if usual is None or request.reduce_bucket_elements or usual.offload_optimizer == "nvme":
        return False
    elements = usual.reduce_bucket_elements * (2 if usual.overlap_comm else 1)
    if any(candidate.strategy.zero_stage == 3 for candidate in candidates):
        elements += usual.prefetch_bucket_elements + min(usual.max_live_elements, usual.prefetch_bucket_elements)
    saved_bytes = elements * (4 if request.precision == "fp32" else 2)
    if any(candidate.fits for candidate in candidates):
        return saved_bytes > BUCKET_SHARE * usable_bytes
    known = [candidate.headroom_bytes for candidate in candidates if candidate.headroom_bytes is not None]
    return bool(known) and -max(known) < saved_bytes


class Facts(Protocol):
    """What is known of a model before it runs, in elements.

    `max_positions`: tokens it can read, None: any number. `can_recompute`: whether it takes activation checkpointing,
    `can_tile`: whether it takes the tiled loss. `notes`: what a plan has to say of it.
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
    @property
    def notes(self) -> tuple[str, ...]: ...


class Profile(cost.Model, Protocol):
    """What one model costs under one strategy, for any micro-batch. `draft`: without the allocator's part.

    `in_other_segments` is the memory with expandable segments where the strategy has none, or without.
    """

    @property
    def draft(self) -> "Profile": ...
    def memory(self, micro_batch: int, device: Device) -> MemoryBreakdown: ...
    def in_other_segments(self, micro_batch: int, device: Device) -> MemoryBreakdown: ...
    def largest_micro_batch(self, device: Device, cap: int) -> int: ...
    def fits(self, micro_batch: int, device: Device) -> bool: ...


class Source(Protocol):
    """Where profiles come from. `accumulates`: whether there is more than one micro-step.

    `prepare` is told what will be asked for. `draft` is a profile without the allocator's part, found by arithmetic;
    None where only a dry run could tell. `num_layers` are the model's, 0: not known; `why_not_mixed` says why they
    cannot have modes of their own, mixed of those of a strategy; empty: they can. `distrust` has a strategy profiled by
    dry runs from now on; false if it already is. `notes`: what the last dry run assumed, where memory depends on the
    data.
    """

    @property
    def notes(self) -> tuple[str, ...]: ...
    def facts(self) -> Facts: ...
    def prepare(self, strategies: Sequence[Strategy]) -> None: ...
    def draft(self, strategy: Strategy, accumulates: bool) -> Profile | None: ...
    def num_layers(self, strategy: Strategy) -> int: ...
    def why_not_mixed(self, strategy: Strategy) -> str: ...
    def distrust(self, strategy: Strategy) -> bool: ...
    def profile(self, strategy: Strategy, accumulates: bool) -> Profile: ...
    def dry_run(
        self, strategy: Strategy, micro_batch: int, accumulation_steps: int, device: Device | None = None
    ) -> MemoryBreakdown: ...


OpenSource = Callable[[Request, Cluster], AbstractContextManager[Source]]
"""A source for one request on one cluster, open while the context lasts."""
