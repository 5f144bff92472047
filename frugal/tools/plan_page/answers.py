"""The contents of a plan's page besides the plan: timelines, answers for other settings, and tables of other machines.

They are computed when the page is made, nearest to the plan first, up to a number of replayed events; the page computes
and interpolates nothing. The bytes of a setting are those of `MemoryProfile.memory` on one card, and are compared with
all cards whose sums take the same scratch: `Replays.smallest_capacity` of another card may differ by its tolerance,
0.2 %.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from typing import Any

from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.dryrun.client import DryRunSource, workers
from frugal.errors import FrugalError, RequestError
from frugal.planning.batch import BatchPlan
from frugal.planning.cost import step_time
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.plan import Plan
from frugal.planning.search.fitting import Fitting
from frugal.planning.strategy import Offload, Strategy, allowed_strategies
from frugal.planning.table import Table
from frugal.planning.what_if import (
    NOT_DRY_RUN,
    axes_around,
    changes,
    grid,
    improvements,
    predicted,
    predicted_with_sharing,
    shorter,
    what_if_legend,
    what_if_rows,
    with_gpus,
    with_memory,
)
from frugal.tools.plan_page.page import PageData, chosen_micro_batches
from frugal.tools.plan_page.timelines import FEW_POINTS, MOST_POINTS, picture
from frugal.units import GIB

MEMORY_GIB = (6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180)
"""The cards offered beside the plan's own."""

GPUS = (1, 2, 4, 8, 16)
"""The GPUs of a node offered, beside the plan's own number, its half and its double."""

OpenDryRuns = Callable[[Request, Cluster], DryRunSource]
"""Opens a source for one request on one cluster."""

MOST_ANSWERS = 400
"""The most answers of one page."""

EVENTS_OF_A_PAGE, EVENTS_OF_A_SMALL_PAGE = 12_000_000, 300_000
"""Events that are replayed for `--html`, and for the page beside plan.json: some 25 seconds, and one. An answer takes
the events of its ranks: 6,700 with distilgpt2 (15 ms), 63,000 with a model of 8B (0.13 s)."""


def contents(plan: Plan, in_full: bool) -> PageData:
    """Return the contents computed anew; `in_full`: as in `frugal.tools.plan_page.make.write_page`.

    Raises:
        WorkerError: a trace crashed.
    """
    with closing(workers()) as pool:
        open_source = partial(DryRunSource, pool=pool, will_dry_run=False)
        if not in_full:
            return PageData(answers(plan, open_source, EVENTS_OF_A_SMALL_PAGE, only_known=True), ())
        return PageData(answers(plan, open_source, EVENTS_OF_A_PAGE), tuple(_tables(plan, open_source)))


@dataclass(frozen=True, kw_only=True)
class GridPoint:
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
        """The card whose memory counts."""
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


class Sources:
    """Sources of profiles, one a length, whose traces serve every number of GPUs; `opened` closes them.

    `only_known`: no trace is made.
    """

    def __init__(self, plan: Plan, open_source: OpenDryRuns, opened: ExitStack, *, only_known: bool) -> None:
        self.plan = plan
        self._open_source, self._opened, self._only_known = open_source, opened, only_known
        self._of_length: dict[int, DryRunSource] = {}
        self._on: dict[tuple[int, int, int], DryRunSource] = {}
        self._refused: set[tuple[int, str, str, str]] = set()

    def points(self) -> list[GridPoint]:
        """Return all points of a page, nearest to the plan first; one for all cards with the same scratch."""
        plan = self.plan
        own_gpus, own_memory = len(plan.cluster.nodes[0].devices), plan.memory.device_in(plan.cluster).memory_bytes
        seq_lens = axes_around(plan, self._source(plan.request.seq_len).facts().max_positions)["seq-len"]
        points: list[tuple[float, GridPoint]] = []
        for gpus in sorted({max(1, own_gpus // 2), own_gpus, 2 * own_gpus, *GPUS}):
            if gpus * len(plan.cluster.nodes) % plan.batch.sequence_parallel:
                continue
            of_threads: dict[int, Cluster] = {}
            for cluster in sorted(cards(plan, gpus), key=lambda each: abs(each.devices[0].memory_bytes - own_memory)):
                of_threads.setdefault(cluster.devices[0].resident_threads, cluster)
            for seq_len in seq_lens:
                for rank, strategy in enumerate(self._strategies(gpus, seq_len)):
                    for step, cluster in enumerate(of_threads.values()):
                        far = abs(log2(gpus / own_gpus)) + abs(log2(seq_len / plan.request.seq_len)) + step
                        point = GridPoint(cluster=cluster, request=self.request(seq_len), strategy=strategy)
                        points.append((far + (0.5 + rank / 10 if rank else 0), point))
        return [point for _, point in sorted(points, key=lambda pair: pair[0])]

    def profile(self, point: GridPoint, accumulates: bool) -> MemoryProfile | None:
        """Return the profile for every micro-batch; None where only a dry run could make one."""
        strategy, seq_len = point.strategy, point.request.seq_len
        kind = (seq_len, strategy.checkpointing, strategy.loss, strategy.mlp)
        if kind in self._refused:
            return None
        try:
            source = self._source_on(point)
            if self._only_known and not source.has_draft(strategy):
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
        pins: dict[str, Any] = {"activation_checkpointing": "auto", "loss": "auto", "mlp": own.mlp, "layer_modes": None}
        in_part = own.offload_ratio if own.offload_ratio < 1 else None
        pins |= {"zero_stage": None, "offload_ratio": in_part, "offload": "optimizer" if in_part else "auto"}
        allowed = allowed_strategies(
            replace(self.request(seq_len), **pins),
            self._source(seq_len).facts(),
            world_size=gpus * len(plan.cluster.nodes),
            offload=offload_level(own),
            on_gpus=plan.cluster.devices[0].kind == "cuda",
            small_buckets=own.small_buckets,
        )
        order = {str(strategy): number for number, strategy in reversed(list(enumerate(weighed)))}
        return sorted(allowed, key=lambda strategy: order.get(str(strategy), len(order)))

    def request(self, seq_len: int) -> Request:
        """Return the plan's with samples of `seq_len` tokens, shared by as many ranks."""
        shared_by = self.plan.batch.sequence_parallel
        request = replace(self.plan.request, seq_len=seq_len)
        return replace(request, sequence_parallel=shared_by) if shared_by > 1 else request

    def _source(self, seq_len: int) -> DryRunSource:
        if seq_len not in self._of_length:
            source = self._open_source(self.request(seq_len), self.plan.cluster)
            self._of_length[seq_len] = self._opened.enter_context(source)
        return self._of_length[seq_len]

    def _source_on(self, point: GridPoint) -> DryRunSource:
        key = (point.request.seq_len, point.gpus, point.device.memory_bytes)
        if key not in self._on:
            self._on[key] = self._source(point.request.seq_len).on(point.cluster)
        return self._on[key]


def answers(plan: Plan, open_source: OpenDryRuns, most_events: int, *, only_known: bool = False) -> dict[str, Any]:
    """Return what a page looks up, in plain types: `timelines` of the plan's strategies, and `answers`.

    `most_events`: after so many replayed events no further strategy, card or length is begun.
    `only_known`: only what needs no new trace.

    Raises:
        WorkerError: a trace crashed.
    """
    strategies: dict[str, str] = {}  # their flags, by name: sizes of groups, which are in no name, differ with GPUs
    answers: dict[str, dict[int, dict[str, Any]]] = {}
    largest: dict[str, int] = {}
    devices: dict[int, list[dict[str, int]]] = {}
    is_equal = is_of_one_kind(plan.cluster)
    own_bytes = plan.memory.device_in(plan.cluster).memory_bytes
    planned = dict(reversed(list(chosen_micro_batches(plan))))
    with ExitStack() as opened:
        sources = Sources(plan, open_source, opened, only_known=only_known)
        timelines = [_timeline(sources, number) for number in range(1 + len(plan.rejected))]
        for point in sources.points() if is_equal else []:
            if answers and (most_events <= 0 or sum(map(len, answers.values())) >= MOST_ANSWERS):
                break
            near = planned.get(point.strategy, plan.batch.largest_micro_batch)
            of_point, fits, num_events = _answers_of(sources, point, near, is_own=not answers)
            most_events -= num_events
            if not of_point:
                continue
            strategies.setdefault(str(point.strategy), _flags(point.strategy))
            number = list(strategies).index(str(point.strategy))
            key = f"{point.gpus}/{point.request.seq_len}/{number}/{point.device.resident_threads}"
            answers[key] = of_point
            devices[point.gpus] = [_device(cluster.devices[0]) for cluster in cards(plan, point.gpus)]
            if point.device.memory_bytes == own_bytes:
                largest[key] = fits
    return {
        "answers": answers,
        "largest": largest,
        "strategies": [{"name": name, "flags": flags} for name, flags in strategies.items()],
        "timelines": timelines,
        "devices": devices,
    }


def _device(device: Device) -> dict[str, int]:
    return {
        "memory": device.memory_bytes,
        "context": device.context_bytes,
        "usable": device.usable_bytes,
        "threads": device.resident_threads,
    }


def _timeline(sources: Sources, number: int) -> dict[str, Any] | None:
    """Return the picture of a strategy of the plan, by its row in the table, from 0 on; None: only dry runs could tell.

    Its slack is the search's, so that nothing is replayed; a strategy that was not fully evaluated has none.
    """
    plan = sources.plan
    strategy, micro_batch = list(chosen_micro_batches(plan))[number]
    point = GridPoint(cluster=plan.cluster, request=sources.request(plan.request.seq_len), strategy=strategy)
    batch = plan.batch
    if number and is_of_one_kind(plan.cluster):
        batch = _batch(point, micro_batch)
    profile = sources.profile(point, _accumulates(point, batch.accumulation_steps))
    if profile is None:
        return None
    memory = (profile.draft if number else profile).memory(micro_batch, plan.memory.device_in(plan.cluster))
    total = plan.rejected[number - 1].peak_bytes if number and not plan.rejected[number - 1].is_bound else None
    slack = max(0, total - memory.total_bytes) if total else memory.slack
    drawn = picture(profile.ranks, memory, micro_batch, FEW_POINTS if number else MOST_POINTS)
    drawn["parts"]["slack"] = slack
    return drawn | {"microBatch": micro_batch, "total": memory.total_bytes - memory.slack + slack}


def _answers_of(
    sources: Sources, point: GridPoint, near: int, *, is_own: bool
) -> tuple[dict[int, dict[str, Any]], int, int]:
    """Return answers by micro-batch, the largest micro-batch that fits the point's card, and the events replayed."""
    accumulating = sources.profile(point, accumulates=True)
    if accumulating is None:
        return {}, 0, 0
    fitting = Fitting(point.request, point.cluster)
    cap = fitting.cap
    largest = accumulating.largest_micro_batch(point.device, cap)
    wanted = {1, near // 2, near, 2 * near, largest}
    at_once = sources.profile(point, accumulates=False)
    if at_once is not None and at_once.fits(fitting.samples_per_rank, point.device):
        wanted.add(fitting.samples_per_rank)  # in a single micro-step, which takes less than one of several
    if is_own:
        wanted |= {near - 1, near + 1, largest + 1, *(1 << power for power in range(cap.bit_length()))}
    made = {}
    num_events = sum(len(rank.timeline.events) for rank in accumulating.ranks)
    for size in sorted(size for size in wanted if 1 <= size <= cap):
        batch = _batch(point, size)
        micro_batch = batch.largest_micro_batch
        profile = sources.profile(point, _accumulates(point, batch.accumulation_steps))
        if profile is None or micro_batch in made:
            continue
        memory = profile.memory(micro_batch, point.device)
        time = step_time(profile.costs, point.strategy, batch, point.cluster, point.request)
        made[micro_batch] = {
            "needed": memory.total_bytes - memory.context,
            "cut": batch.arithmetic(point.cluster.rank_noun, sources.plan.counted, point.request.seq_len),
            "seconds": time.total_seconds if point.request.lengths is None else None,
            "samples": batch.global_batch,
            "host": memory.host_bytes_per_node,
            "hostLacks": max(0, fitting.host_shortfall_bytes(memory)),
        }
        if memory.fits:
            largest = max(largest, micro_batch)
    return made, largest, num_events * (len(made) + 1)


def _batch(point: GridPoint, micro_batch: int) -> BatchPlan:
    request, shared_by = point.request, point.request.sequence_parallel or 1
    caps = (micro_batch,) * (point.cluster.world_size // shared_by)
    return BatchPlan.of(request.batch_samples, caps, request.global_tokens, sequence_parallel=shared_by).tightened()


def _accumulates(point: GridPoint, steps: int) -> bool:
    return steps > 1 or point.request.lengths is not None


def _flags(strategy: Strategy) -> str:
    """Return the flags of `frugal plan` that pin a strategy. Layers that differ are chosen anew: no flag names them."""
    ratio = f":{strategy.offload_ratio:g}" if strategy.offload_ratio < 1 else ""
    words = ["--zero-stage", strategy.zero_stage, "--activation-checkpointing", strategy.activation_checkpointing]
    words += ["--loss", strategy.loss, "--offload", offload_level(strategy) + ratio]
    words += ["--mlp", strategy.mlp] if strategy.mlp != "plain" else []
    words += ["--kernels", strategy.kernels] if strategy.kernels != "plain" else []
    words += ["--sequence-parallel", strategy.sequence_parallel] if strategy.sequence_parallel > 1 else []
    return " ".join(map(str, words))


def _tables(plan: Plan, dry_run: OpenDryRuns) -> list[Table]:
    """Return the tables of what would help, and of other GPUs, cards and lengths."""
    cases = [*changes(plan), *shorter(plan)]
    tables = []
    if cases:
        rows = improvements(plan, cases, predicted(cases, dry_run))
        head = ("change", "a step", "", "micro-batch x steps", "strategy")
        tables.append(Table(title=rows.title, rows=(head, *rows.rows), has_head=True))
    return [*tables, *_grid(plan, dry_run)] if is_of_one_kind(plan.cluster) else tables


def _grid(plan: Plan, dry_run: OpenDryRuns) -> list[Table]:
    with dry_run(plan.request, plan.cluster) as source:
        longest = source.facts().max_positions
    axes = axes_around(plan, longest)
    cases = grid(plan, axes)
    predictions = dict(zip(cases, predicted_with_sharing(list(cases.values()), dry_run), strict=True))
    tables = []
    for seq_len in axes["seq-len"]:
        rows = what_if_rows(plan, axes, predictions, seq_len)
        title = f"what if: samples of {seq_len} tokens ({NOT_DRY_RUN})"
        tables.append(Table(title=title, rows=tuple(rows), note=what_if_legend(predictions), has_head=True))
    return tables
