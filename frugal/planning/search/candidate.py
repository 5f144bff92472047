"""The candidates and results of a search, the order of evaluation, and the interface to sources of profiles."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.planning.batch import BatchPlan
from frugal.planning.length_bucketing import DrawnRun
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.model_facts import ModelFacts
from frugal.planning.plan import ModelSummary, Rejected, StepTime
from frugal.planning.strategy import ActivationCheckpointing, Place, Strategy

TIE = 1.02
"""Times within 2 % are equal: the cost model is no better than that."""

SAME = 1.01
"""Times within 1 % are the same where memory decides, between equally simple strategies. With 2 %, three of the 56
choices that `bench.planning.choice` measured would be 5 to 7 % slower; with 1 % two are others, 4.5 % faster and 2.6 %
slower."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its memory and time: exact, or bounds that were enough to reject it.

    Attributes:
        strategy: the strategy.
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
        """Return whether there is a batch that fits."""
        return self.batch is not None

    @property
    def scarce(self) -> Literal["host", "disk", "device"]:
        """The memory that a candidate lacks which does not fit."""
        return "host" if self.host_shortfall_bytes else "disk" if self.disk_shortfall_bytes else "device"

    @property
    def takes_one_micro_step(self) -> bool:
        """Return whether its batch needs no accumulation."""
        return self.batch is not None and self.batch.accumulation_steps == 1

    @property
    def headroom_bytes(self) -> int | None:
        """The headroom of the scarcer memory, or disk; negative: the shortfall."""
        if self.memory is None:
            return None if self.least_shortfall_bytes is None else -self.least_shortfall_bytes
        return -(self.host_shortfall_bytes or self.disk_shortfall_bytes) or self.memory.headroom_bytes

    @property
    def seconds(self) -> float:
        """Seconds of one optimizer step; infinite where unknown."""
        return self.time.total_seconds if self.time else float("inf")

    @property
    def simplicity(self) -> tuple[int, bool, float]:
        """Sort key of equally fast candidates: fewer mechanisms, then equal micro-batches, then time."""
        return self.strategy.num_mechanisms, not (self.batch and self.batch.is_uniform), self.seconds

    @property
    def needed_bytes(self) -> int:
        """The memory that it needs on the fullest device; 0 where unknown."""
        return self.memory.total_bytes if self.memory else 0

    def may_fit_if_shared(self, number: int) -> bool:
        """Return whether a candidate that lacks device memory might fit if `number` ranks shared each sample."""
        of_step = 0 if self.memory is None or self.scarce != "device" else self.memory.of_the_step
        return of_step - of_step // number > -(self.headroom_bytes or 0)

    def dominates(self, draft: "Candidate") -> bool:
        """Return whether this candidate, which fits, comes before `draft` at its best."""
        at_best = (draft.strategy.num_mechanisms, False)
        is_faster = self.seconds * (SAME if self.needed_bytes > draft.needed_bytes else 1) <= draft.seconds
        return is_faster and self.simplicity[:2] <= at_best


def fastest_seconds(candidates: Iterable[Candidate]) -> float:
    """Return the seconds of the fastest candidate that fits; infinite where none does."""
    return min((candidate.seconds for candidate in candidates if candidate.fits), default=float("inf"))


TRUST = 0.01
"""A profile that is further than this from the dry run is wrong, and the plan says so."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The strategy that was chosen, among all `candidates`.

    `memory` is that of its dry run; of a draft (`is_proven` is False) it is arithmetic. `shared_because`: why ranks
    share samples, where nobody asked for it. `fused`: as `ModelFacts.fused`. `kernels`: as `MemoryProfile.kernels`.
    """

    chosen: Candidate
    memory: MemoryBreakdown
    model: ModelSummary
    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...]
    is_proven: bool
    shared_because: str = ""
    fused: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The other strategies, fastest first, those that do not fit last."""
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
            return "cannot fit: weights and optimizer states alone are too much"
        is_bound = candidate.memory is None or (candidate.is_draft and candidate.fits)
        if is_bound and candidate.seconds >= self.chosen.seconds:
            return "cannot be faster"
        if not (candidate.fits or is_bound):
            where = {"disk": " on a node's disk", "host": " into host memory", "device": ""}
            return f"does not fit{where[candidate.scarce]}"
        if candidate.seconds > self.chosen.seconds * TIE:
            return "slower"
        if candidate.simplicity[:2] > self.chosen.simplicity[:2]:
            return f"not faster by {100 * (TIE - 1):.0f} %, and less simple"
        return (
            f"not faster by {100 * (SAME - 1):.0f} %, and larger"
            if candidate.needed_bytes >= self.chosen.needed_bytes
            else "slower"
        )


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """A search in which no candidate fits; `nearest_first` are those whose shortfall is known exactly."""

    candidates: tuple[Candidate, ...]
    nearest_first: tuple[Candidate, ...]

    @property
    def nearest(self) -> Candidate:
        """The candidate with the smallest shortfall."""
        return self.nearest_first[0]

    @property
    def by_level(self) -> dict[tuple[Place, Place], dict[int, Candidate]]:
        """The candidate with the smallest shortfall for every place of optimizer and parameters and ZeRO stage."""
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
"""A share of a device's memory: where buckets take more, smaller ones are tried, too."""


def evaluation_rounds(strategies: Sequence[Strategy]) -> list[list[Strategy]]:
    """Group strategies by round of evaluation: by mode, and ZeRO-3, which needs traces of its own, after the others."""
    return [
        [each for each in strategies if each.activation_checkpointing in modes and (each.zero_stage == 3) == is_zero3]
        for modes in CHECKPOINTING_ROUNDS
        for is_zero3 in (False, True)
    ]


def small_buckets_could_help(candidates: Sequence[Candidate], request: Request, usable_bytes: int) -> bool:
    """Return whether smaller buckets could make something fit where nothing does, or free much of a small device."""
    usual = next((candidate.strategy for candidate in candidates if candidate.strategy.zero_stage), None)
    if usual is None or usual.offload_optimizer == "nvme":
        return False
    elements = usual.reduce_bucket_elements
    if any(candidate.strategy.zero_stage == 3 for candidate in candidates):
        elements += usual.prefetch_bucket_elements + min(usual.max_live_elements, usual.prefetch_bucket_elements)
    saved_bytes = elements * request.element_bytes
    if any(candidate.fits for candidate in candidates):
        return saved_bytes > BUCKET_SHARE * usable_bytes
    known = [candidate.headroom_bytes for candidate in candidates if candidate.headroom_bytes is not None]
    return bool(known) and -max(known) < saved_bytes


class Source(Protocol):
    """Where profiles come from. `accumulates`: whether a step has more than one micro-step."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions of the last dry run, where memory depends on the data."""

    def facts(self) -> ModelFacts:
        """Return what is known of the model before it runs."""

    def prepare(self, strategies: Sequence[Strategy]) -> None:
        """Prepare what drafts of all these strategies need, at once."""

    def draft(self, strategy: Strategy, accumulates: bool) -> MemoryProfile | None:
        """Return a profile without the allocator's part, found by arithmetic; None where only a dry run can tell."""

    def num_layers(self, strategy: Strategy) -> int:
        """Return the model's number of layers; 0: unknown."""

    def why_not_mixed(self, strategy: Strategy) -> str:
        """Return why layers cannot have different modes out of those of `strategy`; empty where they can."""

    def of_lengths(
        self, strategy: Strategy, micro_batch: int, runs: Sequence[DrawnRun], device: Device
    ) -> tuple[int, int, int] | None:
        """Return by how many bytes runs of other lengths exceed equal micro-steps of full length on `device`: what is
        needed, and what the allocator reserves with room; and by how much the latter differs between the runs. None
        where no arithmetic tells.
        """

    def profile(self, strategy: Strategy, accumulates: bool) -> MemoryProfile:
        """Return the costs of a strategy for every micro-batch."""

    def dry_run(
        self, strategy: Strategy, micro_batch: int, accumulation_steps: int, device: Device | None = None
    ) -> MemoryBreakdown:
        """Return the memory of a dry run on `device`; None: on the smallest one."""


OpenSource = Callable[[Request, Cluster], AbstractContextManager[Source]]
"""Opens a source for one request on one cluster, which is closed when the context ends."""
