"""Memory profiles for the page of a plan: other GPUs, cards, lengths and strategies, simulated without dry runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from math import log2

from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.dryrun.client import DryRunSource
from frugal.errors import FrugalError, RequestError
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.plan import Plan
from frugal.planning.strategy import Offload, Strategy, allowed_strategies
from frugal.planning.what_if import axes_around, with_gpus, with_memory
from frugal.units import GIB

MEMORY_GIB = (6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180)
"""The cards offered beside the plan's own."""

GPUS = (1, 2, 4, 8, 16)
"""The GPUs of a node offered, beside the plan's own number, its half and its double."""

OpenDryRuns = Callable[[Request, Cluster], AbstractContextManager[DryRunSource]]
"""Opens a source for one request on one cluster."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A setting for which there is a profile at every micro-batch.

    Attributes:
        cluster: the devices whose memory and scratch are counted; its nodes are alike, but for the plan's own.
        request: the plan's with another length.
        strategy: the strategy.
    """

    cluster: Cluster
    request: Request
    strategy: Strategy

    @property
    def device(self) -> Device:
        """The card; all are equal."""
        return self.cluster.devices[0]

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        return len(self.cluster.nodes[0].devices)


def is_of_one_kind(cluster: Cluster) -> bool:
    """Return whether all nodes and devices are alike, so that there is a number of GPUs to change."""
    return len(cluster.kinds) == 1 and len({len(node.devices) for node in cluster.nodes}) == 1


def offload_level(strategy: Strategy) -> Offload:
    """Return the level of offloading a strategy belongs to."""
    if "nvme" in (strategy.offload_optimizer, strategy.offload_parameters):
        return "nvme"
    if strategy.offload_optimizer == "none":
        return "none"
    return "optimizer" if strategy.offload_parameters == "none" else "all"


def cards(plan: Plan, gpus: int) -> list[Cluster]:
    """Return a cluster of `gpus` devices a node for each card offered, by memory. The plan's devices must be alike."""
    own = plan.memory.device_in(plan.cluster)
    clusters = []
    for memory in sorted({own.memory_bytes, *(gib * GIB for gib in MEMORY_GIB)}):
        try:
            clusters.append(with_memory(with_gpus(plan.cluster, gpus), memory))
        except RequestError:  # less than the context
            continue
    return clusters


@dataclass
class Sources:
    """Sources of profiles, one a length, whose traces serve every number of GPUs; open while its context lasts.

    `only_known`: no trace is made.
    """

    plan: Plan
    open_source: OpenDryRuns
    only_known: bool = False
    _of_length: dict[int, DryRunSource] = field(default_factory=dict)
    _on: dict[tuple[int, int, int], DryRunSource] = field(default_factory=dict)
    _refused: set[tuple[int, str, str, str]] = field(default_factory=set)
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Sources":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all sources."""
        self._open.close()

    def gpu_counts(self) -> list[int]:
        """Return the GPUs of a node offered."""
        own = len(self.plan.cluster.nodes[0].devices)
        shared_by, num_nodes = self.plan.batch.sequence_parallel, len(self.plan.cluster.nodes)
        numbers = {max(1, own // 2), own, 2 * own, *GPUS}
        return sorted(number for number in numbers if number * num_nodes % shared_by == 0)

    def seq_lens(self) -> list[int]:
        """Return the lengths offered, tokens."""
        own = self.plan.request.seq_len
        return list(axes_around(self.plan, self._source(own).facts().max_positions)["seq-len"])

    def own_place(self, strategy: Strategy) -> Place:
        """Return the place of one of the plan's strategies on the plan's fullest device."""
        return Place(cluster=self.plan.cluster, request=self._request(self.plan.request.seq_len), strategy=strategy)

    def places(self) -> list[Place]:
        """Return all places of a page, nearest to the plan first; one for all cards with the same scratch."""
        plan = self.plan
        own_gpus, own_memory = len(plan.cluster.nodes[0].devices), plan.memory.device_in(plan.cluster).memory_bytes
        found: list[tuple[float, Place]] = []
        for gpus in self.gpu_counts():
            of_threads: dict[int, Cluster] = {}
            for cluster in sorted(cards(plan, gpus), key=lambda each: abs(each.devices[0].memory_bytes - own_memory)):
                of_threads.setdefault(cluster.devices[0].resident_threads, cluster)
            for seq_len in self.seq_lens():
                for rank, strategy in enumerate(self._strategies(gpus, seq_len)):
                    for step, cluster in enumerate(of_threads.values()):
                        place = Place(cluster=cluster, request=self._request(seq_len), strategy=strategy)
                        far = abs(log2(gpus / own_gpus)) + abs(log2(seq_len / plan.request.seq_len)) + step
                        found.append((far + (0.5 + rank / 10 if rank else 0), place))
        return [place for _, place in sorted(found, key=lambda pair: pair[0])]

    def profile(self, place: Place, accumulates: bool) -> MemoryProfile | None:
        """Return the profile for every micro-batch; None where only a dry run could make one."""
        strategy, seq_len = place.strategy, place.request.seq_len
        kind = (seq_len, strategy.checkpointing, strategy.loss, strategy.mlp)
        if kind in self._refused:
            return None
        try:
            source = self._source_on(place)
            if self.only_known and not source.has_draft(strategy):
                return None
            if source.draft(strategy, accumulates) is None:
                return None
            profile = source.profile(strategy, accumulates)
        except FrugalError:  # the model does not allow it
            self._refused.add(kind)
            return None
        return None if profile.sampled else profile

    def _strategies(self, gpus: int, seq_len: int) -> list[Strategy]:
        """Return the strategies possible there, the plan's own first, then those that the plan weighed."""
        plan, own = self.plan, self.plan.strategy
        weighed = [own, *(each.strategy for each in plan.rejected)]
        if (gpus, seq_len) == (len(plan.cluster.nodes[0].devices), plan.request.seq_len):
            return weighed
        pins = {"activation_checkpointing": "auto", "loss": "auto", "mlp": own.mlp, "layer_modes": None}
        in_part = own.offload_ratio if own.offload_ratio < 1 else None
        pins |= {"zero_stage": None, "offload_ratio": in_part, "offload": "optimizer" if in_part else "auto"}
        allowed = allowed_strategies(
            replace(self._request(seq_len), **pins),  # type: ignore[arg-type]  # literals, seen as text
            self._source(seq_len).facts(),
            world_size=gpus * len(plan.cluster.nodes),
            offload=offload_level(own),
            on_gpus=plan.cluster.devices[0].kind == "cuda",
            small_buckets=own.small_buckets,
        )
        order = {str(strategy): number for number, strategy in reversed(list(enumerate(weighed)))}
        return sorted(allowed, key=lambda strategy: order.get(str(strategy), len(order)))

    def _request(self, seq_len: int) -> Request:
        """Return the plan's with samples of `seq_len` tokens, shared by as many ranks."""
        shared_by = self.plan.batch.sequence_parallel
        request = replace(self.plan.request, seq_len=seq_len)
        return replace(request, sequence_parallel=shared_by) if shared_by > 1 else request

    def _source(self, seq_len: int) -> DryRunSource:
        if seq_len not in self._of_length:
            opened = self.open_source(self._request(seq_len), self.plan.cluster)
            self._of_length[seq_len] = self._open.enter_context(opened)
        return self._of_length[seq_len]

    def _source_on(self, place: Place) -> DryRunSource:
        key = (place.request.seq_len, place.gpus, place.device.memory_bytes)
        if key not in self._on:
            self._on[key] = self._source(place.request.seq_len).on(place.cluster)
        return self._on[key]


def chosen_micro_batches(plan: Plan) -> Iterator[tuple[Strategy, int]]:
    """Yield every strategy of the plan with the micro-batch it was weighed at, the chosen one first."""
    own = plan.memory.device_in(plan.cluster)
    sizes = zip(plan.cluster.devices, plan.batch.cap_of_rank, strict=True)
    yield plan.strategy, max(size for device, size in sizes if device == own)
    for each in plan.rejected:
        yield each.strategy, max(1, each.micro_batch)
