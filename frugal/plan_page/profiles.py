"""What a page can compute by itself: which strategies on how many GPUs, with samples of which length.

Each is simulated here, and written whole: the page replays it for any micro-batch and card, as `MemoryProfile.memory`
does. There are more of them than a page should weigh, so they come in an order, what is nearest to the plan first, up
to a number of events. What is left out is missing in the page, which says so; nothing is interpolated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.dryrun.client import DryRunSource
from frugal.errors import FrugalError, RequestError
from frugal.plan_page.seconds import seconds_of
from frugal.plan_page.streams import Streams
from frugal.planning.memory.breakdown import ranks_loading_bytes
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.plan import Plan
from frugal.planning.strategy import Offload, Strategy, allowed_strategies, in_part, offload_levels
from frugal.planning.what_if import axes_around, with_gpus, with_memory
from frugal.units import GIB

MEMORY_GIB = (6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180)
"""Cards that a page offers beside the plan's own."""

GPUS = (1, 2, 4, 8, 16)
"""GPUs of a node that it offers, beside the plan's own number, its half and its double."""

EVENTS_OF_A_PAGE, EVENTS_OF_A_SMALL_PAGE = 6_000_000, 150_000
"""Events of all timelines of `--html`, and of what lies beside plan.json: some ten seconds of a large model, and a
fraction of one. A dozen events are a byte of the page."""

MOST_BYTES = 1_000_000
"""Of all timelines of a page."""


OpenDryRuns = Callable[[Request, Cluster], AbstractContextManager[DryRunSource]]
"""A source for one request on one cluster, open while the context lasts."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One profile of a page: GPUs of a node, tokens of a sample, strategy, and whether gradients are accumulated."""

    gpus: int
    seq_len: int
    strategy: Strategy
    accumulates: bool


def is_of_one_kind(cluster: Cluster) -> bool:
    """Whether all nodes are alike and so are their devices, so that there is a number of GPUs to change."""
    return len(cluster.kinds) == 1 and len({len(node.devices) for node in cluster.nodes}) == 1


def profiles(plan: Plan, dry_run: OpenDryRuns, most_events: int, *, only_known: bool = False) -> dict[str, Any]:
    """The profiles of a page in plain types, up to `most_events`; `only_known`: those that need no new trace.

    Raises:
        WorkerError: a trace crashed.
    """
    streams = Streams()
    entries: dict[str, Any] = {}
    strategies: dict[str, Strategy] = {}  # by their names: sizes of groups, which are in no name, differ with GPUs
    left, seen = most_events, set()
    with _Sources(plan, dry_run, only_known=only_known) as sources:
        gpus, seq_lens = _gpus(plan), _seq_lens(plan, sources.of(plan.request.seq_len).facts().max_positions)
        for point in _points(plan, gpus, seq_lens, sources):
            kind = (point.gpus, point.seq_len, str(point.strategy), point.accumulates)
            profile = None if kind in seen else sources.profile(point)
            seen.add(kind)
            if profile is None:
                continue
            left -= sum(len(rank.timeline.events) for rank in profile.ranks)
            if entries and (left < 0 or streams.num_bytes > MOST_BYTES):
                break
            strategies.setdefault(str(point.strategy), point.strategy)
            number = list(strategies).index(str(point.strategy))
            entry = _entry(plan, point, profile, streams, sources)
            entries[f"{point.gpus}/{point.seq_len}/{number}/{int(point.accumulates)}"] = entry
    if entries:  # what was weighed can be chosen, also where only the plan knows its memory
        strategies |= {
            str(each.strategy): each.strategy for each in plan.rejected if str(each.strategy) not in strategies
        }
    return {
        "profiles": entries,
        "strategies": [_described(strategy) for strategy in strategies.values()],
        "devices": {str(number): _devices(plan, number) for number in gpus},
        "parts": streams.parts,
        "names": streams.names,
    }


def _entry(plan: Plan, point: Point, profile: MemoryProfile, streams: Streams, sources: "_Sources") -> dict[str, Any]:
    element_bytes = 4 if plan.request.precision == "fp32" else 2
    cluster = with_gpus(plan.cluster, point.gpus) if is_of_one_kind(plan.cluster) else plan.cluster
    loading = 0
    if profile.loading is not None:
        ranks = len(cluster.nodes[0].devices)
        loading = ranks_loading_bytes(profile.loading, profile.kind, ranks, has_rank_0=True)
    return {
        "ranks": [
            streams.add(rank.timeline, element_bytes)
            | {"host": rank.host_bytes, "host_per_sample": rank.host_bytes_per_sample}
            for rank in profile.ranks
        ],
        "loading": loading,
        "seconds": seconds_of(profile, cluster, sources.request(point.seq_len)),
    }


def _described(strategy: Strategy) -> dict[str, Any]:
    """Its name, which no other one has, and what tells it from others: each is a selection of the page."""
    return {
        "name": str(strategy),
        "stage": strategy.zero_stage,
        "checkpointing": strategy.checkpointing,
        "loss": strategy.loss,
        "mlp": strategy.mlp,
        "offload": _level(strategy) if strategy.offload_ratio == 1 else f"optimizer {strategy.offload_ratio}",
        "sharing": strategy.sequence_parallel,
        "buckets": "small" if strategy.small_buckets else "usual",
        "expandable": strategy.expandable_segments,
    }


def _level(strategy: Strategy) -> str:
    if strategy.offload_optimizer == "none":
        return "none"
    if strategy.offload_optimizer == "nvme":
        return "nvme"
    return "optimizer" if strategy.offload_parameters == "none" else "all"


def _gpus(plan: Plan) -> list[int]:
    """GPUs of a node, the plan's own first, then what is nearest."""
    own = len(plan.cluster.nodes[0].devices)
    if not is_of_one_kind(plan.cluster):
        return [own]
    shared_by, num_nodes = plan.batch.sequence_parallel, len(plan.cluster.nodes)
    others = {max(1, own // 2), 2 * own, *GPUS} - {own}
    others = {number for number in others if number * num_nodes % shared_by == 0}
    return [own, *sorted(others, key=lambda number: (abs(number.bit_length() - own.bit_length()), -number))]


def _seq_lens(plan: Plan, longest: int | None) -> list[int]:
    own = plan.request.seq_len
    return [own, *(length for length in axes_around(plan, longest)["seq-len"] if length != own)]


def _devices(plan: Plan, number: int) -> list[dict[str, Any]]:
    """What a page must know of each card among so many: it computes neither context nor margin."""
    own = plan.memory.device_in(plan.cluster)
    if not is_of_one_kind(plan.cluster):
        return [_device(own)]
    devices = []
    for memory in sorted({own.memory_bytes, *(gib * GIB for gib in MEMORY_GIB)}):
        try:
            cluster = with_memory(with_gpus(plan.cluster, number), memory)
        except RequestError:  # less than the context
            continue
        devices.append(_device(cluster.devices[0]))
    return devices


def _device(device: Device) -> dict[str, Any]:
    return {
        "memory": device.memory_bytes,
        "context": device.context_bytes,
        "usable": device.usable_bytes,
        "threads": device.resident_threads,
    }


def _points(plan: Plan, gpus: Sequence[int], seq_lens: Sequence[int], sources: "_Sources") -> Iterator[Point]:
    """All profiles that a page may hold, what is nearest to the plan first."""
    own_gpus, own_length = gpus[0], seq_lens[0]
    own_level = _level(plan.strategy)
    levels: list[Offload] = [level for level in offload_levels(_free(plan.request)) if level != "nvme"]
    levels.sort(key=lambda level: level != own_level)
    accumulates = plan.batch.accumulation_steps > 1
    own = Point(gpus=own_gpus, seq_len=own_length, strategy=plan.strategy, accumulates=accumulates)
    yield from (own, replace(own, accumulates=not accumulates))  # other micro-batches need the other one
    for each in plan.rejected:
        sums = accumulates if each.accumulation_steps is None else each.accumulation_steps > 1
        yield Point(gpus=own_gpus, seq_len=own_length, strategy=each.strategy, accumulates=sums)

    def those(gpus: Sequence[int], lengths: Sequence[int], levels: Sequence[Offload], sums: bool) -> Iterator[Point]:
        for number in gpus:
            for length in lengths:
                for level in levels:
                    for strategy in sources.strategies(number, length, level):
                        yield Point(gpus=number, seq_len=length, strategy=strategy, accumulates=sums)

    yield from those([own_gpus], [own_length], levels[:1], accumulates)
    yield from those([own_gpus], [own_length], levels[:1], not accumulates)
    yield from those(gpus[1:], [own_length], levels[:1], True)
    yield from those([own_gpus], seq_lens[1:], levels[:1], True)
    yield from those([own_gpus], [own_length], levels[1:], True)
    yield from those(gpus[1:], seq_lens[1:], levels[:1], True)
    yield from those(gpus[1:], [own_length], levels[:1], False)


def _free(request: Request) -> Request:
    """The request without what pins its strategy, but for how many ranks share a sample."""
    pins = {"activation_checkpointing": "auto", "loss": "auto", "mlp": "auto", "offload": "auto"}
    return replace(request, zero_stage=None, offload_ratio=None, layer_modes=None, **pins)  # type: ignore[arg-type]  # literals, seen as text


class _Sources:
    """Sources of profiles, one a length, whose traces serve every number of GPUs."""

    def __init__(self, plan: Plan, dry_run: OpenDryRuns, *, only_known: bool) -> None:
        self._plan = plan
        self._dry_run = dry_run
        self._only_known = only_known
        self._of_length: dict[int, DryRunSource] = {}
        self._refused: set[tuple[int, str, str, str]] = set()
        self._open = ExitStack()

    def __enter__(self) -> "_Sources":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def request(self, seq_len: int) -> Request:
        """The plan's with samples of so many tokens, shared by as many ranks."""
        shared_by = self._plan.batch.sequence_parallel
        request = replace(self._plan.request, seq_len=seq_len)
        return replace(request, sequence_parallel=shared_by) if shared_by > 1 else request

    def of(self, seq_len: int) -> DryRunSource:
        """Those of samples of so many tokens."""
        if seq_len not in self._of_length:
            opened = self._dry_run(self.request(seq_len), self._cluster(None))
            self._of_length[seq_len] = self._open.enter_context(opened)
        return self._of_length[seq_len]

    def strategies(self, gpus: int, seq_len: int, level: Offload) -> tuple[Strategy, ...]:
        """What could be planned there, the plan's own first, then what is most like it."""
        facts, own = self.of(seq_len).facts(), self._plan.strategy
        world_size = gpus * len(self._plan.cluster.nodes)

        def allowed(tiled_mlp: bool) -> tuple[Strategy, ...]:
            return allowed_strategies(
                _free(self.request(seq_len)),
                facts,
                world_size=world_size,
                offload=level,
                on_gpus=self._plan.cluster.devices[0].kind == "cuda",
                small_buckets=own.small_buckets,
                tiled_mlp=tiled_mlp,
            )

        def distance(strategy: Strategy) -> tuple[bool, bool, bool]:
            return (
                strategy.loss != own.loss,
                strategy.zero_stage != own.zero_stage,
                strategy.activation_checkpointing != own.activation_checkpointing,
            )

        like_it = sorted(
            [*allowed(tiled_mlp=True), *allowed(False)] if own.mlp == "tiled" else allowed(False), key=distance
        )
        is_possible = level == _level(own) and any(each.zero_stage == own.zero_stage for each in like_it)
        if not is_possible:
            return tuple(like_it)
        if own.offload_ratio < 1:  # of sub-groups of another size
            whole = replace(own, offload_ratio=1.0, sub_group_elements=Strategy.sub_group_elements)
            own = in_part(whole, own.offload_ratio, facts.trainable_parameters, world_size)
        return (own, *like_it)

    def profile(self, point: Point) -> MemoryProfile | None:
        """A profile for every micro-batch, made by arithmetic; None where there is none."""
        strategy = point.strategy
        kind = (point.seq_len, strategy.checkpointing, strategy.loss, strategy.mlp)
        if kind in self._refused:
            return None
        try:
            source = self.of(point.seq_len).on(self._cluster(point.gpus))
            if self._only_known and not source.has_draft(strategy):
                return None
            if source.draft(strategy, point.accumulates) is None:
                return None
            profile = source.profile(strategy, point.accumulates)
        except FrugalError:  # the model cannot take it
            self._refused.add(kind)
            return None
        return None if profile.sampled else profile

    def _cluster(self, gpus: int | None) -> Cluster:
        """With the largest cards that a page offers: the scratch of sums is there, which smaller ones may lack."""
        cluster = self._plan.cluster
        if not is_of_one_kind(cluster):
            return cluster
        memory = max(MEMORY_GIB[-1] * GIB, cluster.devices[0].memory_bytes)
        return with_memory(cluster if gpus is None else with_gpus(cluster, gpus), memory)
