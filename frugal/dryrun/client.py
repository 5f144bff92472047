"""Profiles and dry runs for planning: from the cache, or from worker processes. No torch here.

Most profiles are simulated: the model's step is traced once for each way to run it, and DeepSpeed's part is
arithmetic. A draft is such a profile without the allocator's waste, which takes longest to find. Strategies that the
simulation does not cover, and models without a trace, have no draft; they are dry-run.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import TracebackType

from frugal.config import kernels
from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, CARDS, Cluster, Device
from frugal.config.request import Request
from frugal.deepspeed_adapter.simulate.engine import LAST_STEP, Steps, equal_steps, simulate
from frugal.dryrun import shipped
from frugal.dryrun.cache import Cache, digest, facts_key, model_key
from frugal.dryrun.messages import AskCheck, AskDryRun, AskFacts, AskFused, AskTrace, DryRun
from frugal.dryrun.pool import Pool, workers
from frugal.dryrun.trace.drafts import Drafts
from frugal.errors import RequestError
from frugal.planning.cost import ModelCosts, Work, between
from frugal.planning.length_bucketing import DrawnRun
from frugal.planning.memory.allocator import KnownReplays
from frugal.planning.memory.any_length import AnyLength
from frugal.planning.memory.breakdown import Loading, MemoryBreakdown, loading_of
from frugal.planning.memory.caching_allocator import SMALLEST_BLOCK
from frugal.planning.memory.profile import MemoryProfile, RankMemory, fullest, reserved_with_room
from frugal.planning.memory.timeline import MICRO_BATCHES, ModelTrace, NotAffineError, Timeline
from frugal.planning.memory.workspaces import ANY_ROWS, with_scratch, with_workspaces, workspace_bytes
from frugal.planning.model_facts import FUSED_LOSS, ModelFacts
from frugal.planning.strategy import Strategy

SAMPLED_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
"""Samples; dry-run one by one for a model whose storages are no affine functions of the micro-batch."""

MAX_RANKS_SEARCHED, MAX_RANKS_DRY_RUN = 2, 4
"""Ranks that a profile is made of, and those of one exact dry run (see `likely_fullest`), of which one or two are left
where arithmetic tells which are the fullest (`fullest_drafted`)."""


Outlines = dict[str, tuple[Work, tuple[RankMemory, ...]]]
"""The work of each draft and the memory of its ranks, with the fullest moments of their timelines, by strategy."""

MOST_OUTLINES = 400
"""Drafts that are kept for the next plan of a model on as many ranks, some 10 KB each; a plan makes about thirty."""

SHORT = 4
"""A model is also traced with samples of a part of the length, for what memory other lengths take."""

MOST_REPLAYS = 2000
"""Streams whose replays are kept for the next plan of a model, some 200 bytes each; a plan takes about thirty."""


class DryRunSource(AbstractContextManager["DryRunSource"]):
    """Dry runs of one request's model on one cluster. Close it, or use it as a context manager.

    `notes`: assumptions of the last dry run.
    """

    def __init__(
        self,
        request: Request,
        cluster: Cluster,
        cache: bool | Path = True,
        *,
        pool: Pool | None = None,
        will_dry_run: bool = True,
    ) -> None:
        """Open a source. `cache`: whether to keep profiles in the user's cache folder, or another folder to keep them
        in.

        `pool`: workers to share with others; they are left running at the end. `will_dry_run`: whether workers get
        ready for a dry run while there is arithmetic to do.
        """
        self.request = request
        self.cluster = cluster
        self.kind = cluster.devices[0].kind
        self.capability = cluster.kernel_class
        capabilities = [device.compute_capability or ASSUMED_CAPABILITY for device in cluster.kinds]
        self._workspace_bytes = max(map(workspace_bytes, capabilities))
        self._resident_threads = max(device.resident_threads for device in cluster.kinds)
        assert all(device.kind == self.kind for device in cluster.devices), "a cluster of CUDA and CPU ranks"
        self._cache = Cache(cache) if isinstance(cache, Path) else Cache.of_user() if cache else Cache(None)
        self._own_pool = pool is None
        self._will_dry_run = will_dry_run
        self._pool = workers() if pool is None else pool
        self._multiprocessors = max(device.multiprocessors for device in cluster.kinds)
        self._drafts = self._traces_of(request)
        self._model = model_key(request)
        self._facts: ModelFacts | None = None
        self.notes: tuple[str, ...] = ()
        self._profiles: dict[tuple[Strategy, bool], MemoryProfile] = {}
        self._replays_key = digest("replays", self._model)
        self._replays: KnownReplays = self._cache.read(self._replays_key, KnownReplays) or {}
        self._num_kept = _number(self._replays)
        world = (cluster.world_size, self._ranks_per_node, self.kind, *self._kernels)
        self._outlines_key = digest("outlines", self._model, self._key(), world)
        self._outlines: Outlines = self._cache.read(self._outlines_key, Outlines) or {}
        self._num_outlines = len(self._outlines)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cache the results of allocator replays, and end the worker processes, unless they are shared."""
        if _number(self._replays) > self._num_kept:
            self._cache.write(self._replays_key, dict(list(self._replays.items())[-MOST_REPLAYS:]))
        if len(self._outlines) > self._num_outlines:
            self._cache.write(self._outlines_key, dict(list(self._outlines.items())[-MOST_OUTLINES:]))
        if self._own_pool:
            self._pool.close()

    def on(self, cluster: Cluster) -> "DryRunSource":
        """Return the source of the same model on a cluster of the same kind of devices, with the known traces.

        It shares this one's workers, and is not closed.
        """
        assert (cluster.devices[0].kind, cluster.kernel_class) == (self.kind, self.capability), "other kernels"
        cache = self._cache.folder or False
        source = DryRunSource(self.request, cluster, cache, pool=self._pool, will_dry_run=self._will_dry_run)
        source._drafts, source._facts = self._drafts, self._facts
        source._replays = self._replays
        return source

    def prepare(self, strategies: Sequence[Strategy]) -> None:
        """Make everything that profiles of these strategies need, in parallel. Raises as `profile`."""
        self._drafts.prepare(strategies)
        is_free = (os.cpu_count() or 1) > 1  # the arithmetic has a core to itself
        if self._will_dry_run and is_free and not self._cache.has(self._kept_key()):
            self._pool.warm_up()  # the winner is dry-run

    def profile(self, strategy: Strategy, accumulates: bool) -> MemoryProfile:
        """Return the costs of `strategy` for every micro-batch; `accumulates`: with more than one micro-step.

        Raises:
            FrugalError: the model cannot be built, or not be trained like that.
            WorkerError: the dry run crashed.
        """
        if (strategy, accumulates) not in self._profiles:
            costs = self._simulated(strategy, equal_steps(accumulates), self._ranks(strategy, MAX_RANKS_SEARCHED))
            if costs is None:
                world = (self.cluster.world_size, self.kind, *self._kernels)
                key = digest("profile", self._model, self._key(), strategy, accumulates, world)
                by_dry_runs = partial(self._profile_by_dry_runs, strategy, accumulates)
                costs = self._cache.read_or_make(key, MemoryProfile, by_dry_runs)
            self._profiles[strategy, accumulates] = replace(
                costs,
                ranks=tuple(replace(rank, known=self._replays) for rank in costs.ranks),
                ranks_per_node=self._ranks_per_node,
                loading=self._loading(strategy),
            )
        return self._profiles[strategy, accumulates]

    def draft(self, strategy: Strategy, accumulates: bool) -> MemoryProfile | None:
        """Return the profile without the allocator's part, where arithmetic is enough. Raises as `profile`."""
        key = digest(strategy, accumulates)
        if key not in self._outlines:
            if self._drafts.trace(strategy) is None:
                return None
            full = (
                self._simulated(strategy, LAST_STEP, self._ranks(strategy, MAX_RANKS_SEARCHED))
                if accumulates and strategy.zero_stage < 3
                else self.profile(strategy, accumulates)
            )
            assert full is not None, "traced, and not simulated"
            ranks = (replace(rank, timeline=rank.timeline.outline, known={}) for rank in full.ranks)
            self._outlines[key] = full.costs.work, tuple(ranks)
        outlined = self._profile(strategy, *self._outlines[key])
        return replace(outlined, loading=self._loading(strategy), counts_slack=False)

    def num_layers(self, strategy: Strategy) -> int:
        """Return the model's layers, as far as a trace that `strategy` needs knows of them. Raises as `profile`."""
        return self._drafts.num_layers(strategy)

    def why_not_mixed(self, strategy: Strategy) -> str:
        """Return why layers cannot have different modes out of those of `strategy`; empty where they can.

        Raises as `profile`.
        """
        of_kernels = self.capability, self._multiprocessors if strategy.kernels == "liger" else 1  # as of traces
        key = digest("why not mixed", self._model, self._key(), strategy, self.kind, of_kernels)
        return self._cache.read_or_make(key, str, lambda: self._drafts.why_not_mixed(strategy))

    def dry_run(
        self, strategy: Strategy, micro_batch: int, accumulation_steps: int, device: Device | None = None
    ) -> MemoryBreakdown:
        """Return the memory of the fullest rank of a dry run on `device`; None: the smallest. More than two micro-steps
        count as two.

        Raises as `profile`.
        """
        device = device or min(self.cluster.devices, key=lambda each: each.usable_bytes)
        context = (device.context_bytes, device.context_below_bytes, device.context_above_bytes)
        sizes = (device.usable_bytes, *context, device.name in CARDS)  # its speed changes no memory
        world = (self.cluster.world_size, self._ranks_per_node, device.kind, *self._kernels, *sizes)
        steps = min(accumulation_steps, 2)
        key = digest("dry-run", self._model, self._key(), strategy, micro_batch, steps, world)
        kept = self._cache.read(key, tuple[MemoryBreakdown, tuple[str, ...]])
        if kept is None:
            dry_runs = self.dry_runs(strategy, micro_batch, steps)
            ranks = rank_memories(dry_runs, range(len(dry_runs)))
            memory = fullest(ranks, micro_batch, device, self._ranks_per_node, strategy.expandable_segments)
            first = max(dry_runs, key=lambda dry_run: dry_run.peak.total_bytes)
            reserved_bytes = reserved_with_room(ranks, micro_batch, device, strategy.expandable_segments)
            memory = replace(memory, phase_peaks=first.timeline.phase_peaks(micro_batch), reserved_bytes=reserved_bytes)
            notes = tuple(dict.fromkeys(note for each in dry_runs for note in each.notes))
            kept = memory.assuming(notes), notes
            self._cache.write(key, kept)
            self._cache.write(self._kept_key(), True)
        memory, self.notes = kept
        return replace(memory, loading=self._loading(strategy))

    def of_lengths(
        self, strategy: Strategy, micro_batch: int, runs: Sequence[DrawnRun], device: Device
    ) -> tuple[int, int, int] | None:
        """Return by how many bytes runs of other lengths exceed equal ones; see `Source`. Raises as `profile`."""
        equal: DrawnRun = [[((micro_batch, self.request.seq_len),) * self.cluster.world_size] * 2] * 2
        memories, expandable = self.in_lengths(strategy, [equal, *runs]), strategy.expandable_segments
        more_bytes = more_reserved_bytes = spread_bytes = 0
        if memories is None:
            return None
        for of_rank in zip(*memories, strict=True):
            once, *ragged = all_runs = [memory.replays(0, expandable_segments=expandable) for memory in of_rank]
            at_once, reserved = once.smallest_capacity(), [each.under().peak_reserved_bytes for each in all_runs]
            more_reserved_bytes = max(more_reserved_bytes, max(reserved) - reserved[0])
            spread_bytes = max(spread_bytes, max(reserved) - min(reserved))
            for replays in ragged:
                if not replays.survives(at_once + more_bytes):  # though less might be enough: holes lie elsewhere then
                    more_bytes = max(more_bytes, replays.smallest_capacity(at_once + more_bytes) - at_once)
        return more_bytes, more_reserved_bytes, spread_bytes

    def in_lengths(self, strategy: Strategy, runs: Sequence[DrawnRun]) -> list[list[RankMemory]] | None:
        """Return the memory of each run of such micro-batches, on the ranks that `profile` knows; None where only dry
        runs tell. Raises as `profile`.
        """
        any_length = self._any_length(strategy)
        if any_length is None:
            return None
        ranks, part = self._ranks(strategy, MAX_RANKS_SEARCHED), strategy.sequence_parallel
        tokens = max(prod(shape) for run in runs for step in run for micro_step in step for shape in micro_step)

        def of_rank(run: DrawnRun, rank: int) -> RankMemory:
            steps = [[any_length.sizes(*micro_step[rank // part]) for micro_step in step] for step in run]
            memory = self._simulate(any_length.long, strategy, rank, steps, tokens // part)
            return replace(memory, known=self._replays)

        return [[of_rank(run, rank) for rank in ranks] for run in runs]

    def _any_length(self, strategy: Strategy) -> AnyLength | None:
        """Return the micro-step of a strategy for any length; None where only dry runs tell."""
        long = self._drafts.trace(strategy)
        if long is None:
            return None
        lengths = max(1, self.request.seq_len // SHORT), self.request.seq_len
        request = replace(self.request, seq_len=lengths[0], lengths=None)
        try:
            return AnyLength(short=self._traces_of(request).trace(strategy), long=long, lengths=lengths)
        except (RequestError, NotAffineError):
            return AnyLength(short=None, long=long, lengths=lengths)

    def _traces_of(self, request: Request) -> Drafts:
        asked = AskTrace(
            request=request, kind=self.kind, capability=self.capability, multiprocessors=self._multiprocessors
        )
        return Drafts(asked, self._cache, self._pool)

    def _loading(self, strategy: Strategy) -> Loading:
        """Return the memory before the first step. The base of adapters is always read: training adapters around random
        weights makes no sense.
        """
        facts = self.facts()
        weights = facts.weights
        if self.request.lora is not None and weights.origin == "random":
            weights = replace(weights, origin="pretrained")
        return loading_of(
            weights,
            strategy,
            precision=self.request.precision,
            parameters=facts.parameters,
            largest_parameter=facts.largest_parameter,
            world_size=self.cluster.world_size,
            kind=self.kind,
            packed=facts.packed,
        )

    def dry_runs(self, strategy: Strategy, micro_batch: int, accumulation_steps: int) -> list[DryRun]:
        """Return the dry runs of the ranks that may be the fullest. Raises as `profile`.

        One is enough where arithmetic finds no rank fuller, and the dry run needs just what arithmetic says of it.
        """
        steps = min(accumulation_steps, 2)
        ranks = self._ranks(strategy, MAX_RANKS_DRY_RUN)
        dry_run = partial(self._dry_run, strategy, (micro_batch,), steps, exact=self.kind == "cuda")
        if len(ranks) == 1 or (drafted := self._simulated(strategy, equal_steps(steps > 1), ranks)) is None:
            return dry_run(ranks)
        first, second = fullest_drafted(drafted, micro_batch)
        of_first, of_second = (fullness(each, drafted, micro_batch) for each in (first, second))
        if any(more > most for more, most in zip(of_second, of_first, strict=True)):
            return dry_run((first.rank, second.rank))
        dry_runs = dry_run((first.rank,))
        (run,) = rank_memories(dry_runs, (first.rank,))
        is_confirmed = abs(fullness(run, drafted, micro_batch)[0] - of_first[0]) <= SMALLEST_BLOCK
        return dry_runs if is_confirmed else dry_runs + dry_run((second.rank,))

    def facts(self) -> ModelFacts:
        """Return the facts of the model that are known before it runs. Raises as `profile`."""
        if self._facts is None:
            shared_by = self.request.sequence_parallel or 1
            model = facts_key(self.request)
            key = digest("model", model, self.request.batch_norm, *([shared_by] if shared_by > 1 else []))
            self._facts = self._cache.read(key, ModelFacts) or shipped.facts(self.request)
            if self._facts is None:
                described, notes = self._pool.ask([AskFacts(self.request), AskCheck(self.request)])
                self._facts = replace(described, notes=notes)
                self._cache.write(key, self._facts)
            self._facts = replace(self._facts, fused=self._fused((FUSED_LOSS,) if self._facts.can_tile else ()))
        return self._facts

    def _fused(self, more: tuple[str, ...]) -> tuple[str, ...]:
        """Return the modules that fused kernels run, in words, and `more` with them. Raises as `profile`."""
        if not kernels.are_to_be_fused(self.request, self.cluster):
            return ()
        key = digest("fused", facts_key(self.request), self.request.precision)
        modules = self._cache.read_or_make(key, tuple[str, ...], lambda: self._pool.ask([AskFused(self.request)])[0])
        fused = (*modules, *more)
        kernels.refuse_none(self.request, fused)
        return fused

    def _simulated(self, strategy: Strategy, steps: Steps, ranks: Sequence[int]) -> MemoryProfile | None:
        """Return a profile by arithmetic; None where that is not enough."""
        trace = self._drafts.trace(strategy)
        if trace is None:
            return None
        memories = tuple(self._simulate(trace, strategy, rank, steps) for rank in ranks)
        return self._profile(strategy, trace.work, memories)

    def _simulate(
        self, trace: ModelTrace, strategy: Strategy, rank: int, steps: Steps, most_tokens: int = ANY_ROWS
    ) -> RankMemory:
        memory = simulate(
            trace,
            self.request,
            strategy,
            world_size=self.cluster.world_size,
            rank=rank,
            kind=self.kind,
            steps=steps,
            by_tensor=self._is_by_tensor,
        )
        return replace(memory, timeline=self._with_workspaces(memory.timeline, most_tokens))

    def _profile_by_dry_runs(self, strategy: Strategy, accumulates: bool) -> MemoryProfile:
        """Return a profile by dry runs at a few micro-batches."""
        steps, numbers = 2 if accumulates else 1, self._ranks(strategy, MAX_RANKS_SEARCHED)
        dry_runs = self._dry_run(strategy, MICRO_BATCHES, steps, numbers)
        small, large = dry_runs[: len(numbers)], dry_runs[len(numbers) :]
        sampled: tuple[int, ...] = ()
        try:
            ranks = tuple(
                RankMemory(
                    rank=rank,
                    timeline=Timeline.fit(first.timeline, second.timeline, MICRO_BATCHES),
                    host_bytes=max(first.host_bytes, second.host_bytes),
                )
                for rank, first, second in zip(numbers, small, large, strict=True)
            )
        except NotAffineError:
            sampled = SAMPLED_MICRO_BATCHES
            ranks = rank_memories(self._dry_run(strategy, sampled, steps, numbers), numbers)
        ranks = tuple(replace(each, timeline=self._with_workspaces(each.timeline)) for each in ranks)
        return self._profile(strategy, between(small[0].counts, large[0].counts, MICRO_BATCHES), ranks, sampled)

    def _profile(
        self, strategy: Strategy, work: Work, ranks: tuple[RankMemory, ...], sampled: tuple[int, ...] = ()
    ) -> MemoryProfile:
        return MemoryProfile(
            strategy=strategy,
            ranks_per_node=self._ranks_per_node,
            kind=self.kind,
            costs=ModelCosts(facts=self.facts(), work=work, gathers=ranks[0].gathers),
            ranks=ranks,
            sampled=sampled,
        )

    def _dry_run(
        self,
        strategy: Strategy,
        micro_batches: Sequence[int],
        accumulation_steps: int,
        ranks: Sequence[int],
        *,
        exact: bool = False,
    ) -> list[DryRun]:
        """Dry-run each micro-batch and rank, micro-batches outermost.

        `exact`: with the scratch of each sum, which is no affine function of the micro-batch, and with all micro-steps
        of the first optimizer step: they decide which segments the allocator has; and with libraries' workspaces.
        """
        questions = [
            AskDryRun(
                request=self.request,
                strategy=strategy,
                micro_batch=micro_batch,
                accumulation_steps=accumulation_steps,
                world_size=self.cluster.world_size,
                rank=rank,
                kind=self.kind,
                capability=self.capability,
                resident_threads=self._resident_threads if exact else 0,
                multiprocessors=self._multiprocessors,
                first_micro_steps=None if exact else 1,
                by_tensor=self._is_by_tensor,
            )
            for micro_batch in micro_batches
            for rank in ranks
        ]
        dry_runs = self._pool.ask(questions)
        if not exact:
            return dry_runs
        return [replace(each, timeline=with_workspaces(each.timeline, self._workspace_bytes)) for each in dry_runs]

    @property
    def _is_by_tensor(self) -> bool:
        """Return whether no rank holds the whole model while it is loaded."""
        return self.facts().weights.origin == "pretrained"

    def _with_workspaces(self, timeline: Timeline, most_tokens: int = ANY_ROWS) -> Timeline:
        """Add the memory that libraries and kernels take on GPUs for any micro-batch, or those of up to `most_tokens`,
        and no operator of a dry run asks for.
        """
        if self.kind == "cpu":
            return timeline
        sizes = set(self.facts().trainable_sizes)
        timeline = with_scratch(timeline, sizes, self.request.element_bytes, self._resident_threads, most_tokens)
        return with_workspaces(timeline, self._workspace_bytes)

    def _ranks(self, strategy: Strategy, most: int) -> tuple[int, ...]:
        """Return at most `most` ranks that may be the fullest."""
        world_size = self.cluster.world_size
        if strategy.zero_stage not in (1, 2) or world_size == 1:
            return (0,)
        if world_size <= most:
            return tuple(range(world_size))
        return likely_fullest(self.facts().trainable_sizes, world_size, most)

    def _kept_key(self) -> str:
        """Return the key under which it is noted that a dry run of this model on this world is cached."""
        return digest("dry-run is kept", self._model, self._key(), self.cluster.world_size, self._kernels)

    def _key(self) -> list[object]:
        """Return the settings of the request that a dry run depends on, besides the model."""
        optimizer = self.request.optimizer
        states = (optimizer.name, optimizer.implementation, optimizer.states, bool(optimizer.momentum))
        return [self.request.precision, *states, self.request.gradient_clipping > 0]

    @property
    def _kernels(self) -> tuple[object, ...]:
        """Return the traits of the devices that memory depends on, besides their size."""
        return self.capability, self._workspace_bytes, self._resident_threads, self._multiprocessors

    @property
    def _ranks_per_node(self) -> int:
        return max(len(node.devices) for node in self.cluster.nodes)


def _number(replays: KnownReplays) -> int:
    return sum(map(len, replays.values()))


def touched_elements(parameters: Sequence[int], world_size: int) -> list[int]:
    """Return the gradient elements that each rank keeps. `parameters`: elements of each trainable parameter, in the
    model's order."""
    part = -(-sum(parameters) // world_size)
    touched = [0] * world_size
    start = 0
    for elements in parameters:
        if elements:
            for rank in range(start // part, (start + elements - 1) // part + 1):
                touched[rank] += elements
        start += elements
    return touched


def likely_fullest(parameters: Sequence[int], world_size: int, most: int) -> tuple[int, ...]:
    """Return at most `most` ranks under ZeRO-1 or 2, in order: the last, those that touch most and, if there is room,
    the first.

    Not all ranks need to be dry-run, only those that may be the fullest. ZeRO-1 and 2 lay all gradients end to end and
    cut the row into equal parts (stage_1_and_2.py), through parameters. Until the step a rank keeps the whole gradient
    of every parameter that its part touches, so the one whose part touches most is the fullest; unless the last, whose
    gradients come first, while most activations still live, or one in between. On three to five ranks the first and the
    last alone were up to 4 % low, where the cuts go through large parameters. The other stages treat all ranks alike.

    Left out: the padding at the end of the row, a few bytes.
    """
    last = world_size - 1
    touched = touched_elements(parameters, world_size)
    by_size = sorted(range(last), key=lambda rank: (-touched[rank], rank))
    wanted = [last, *by_size] if most < 3 else [last, 0, *(rank for rank in by_size if rank)]
    return tuple(sorted(wanted[:most]))


def fullest_drafted(drafted: MemoryProfile, micro_batch: int) -> tuple[RankMemory, RankMemory]:
    """Return the rank whose allocator needs most, and of the others the one with most live bytes; of ranks that
    arithmetic finds alike the last, as in `likely_fullest`.

    These are two: where a cut goes through a huge embedding, the first rank's largest request, probably for the norm
    of its gradient, comes when the allocator has no segment for it.
    """
    of_ranks = {rank.rank: fullness(rank, drafted, micro_batch) for rank in drafted.ranks}
    first, *others = sorted(drafted.ranks, key=lambda rank: (of_ranks[rank.rank], rank.rank), reverse=True)
    return first, max(others, key=lambda rank: of_ranks[rank.rank][1:])


def fullness(rank: RankMemory, drafted: MemoryProfile, micro_batch: int) -> tuple[int, int, int]:
    """Return the bytes that a rank needs on a device of the kind and with the allocator of `drafted`, those alive at
    its fullest moment, and those reserved where there is room."""
    live_bytes = rank.timeline.peak_bytes(micro_batch)
    if drafted.kind == "cpu":
        return live_bytes, live_bytes, live_bytes
    replays = rank.replays(micro_batch, expandable_segments=drafted.strategy.expandable_segments)
    return replays.smallest_capacity(), live_bytes, replays.under().peak_reserved_bytes


def rank_memories(dry_runs: Sequence[DryRun], ranks: Sequence[int]) -> tuple[RankMemory, ...]:
    """Return the memory of each dry run. `ranks`: their ranks, repeated as often as needed."""
    return tuple(
        RankMemory(rank=ranks[i % len(ranks)], timeline=dry_run.timeline, host_bytes=dry_run.host_bytes)
        for i, dry_run in enumerate(dry_runs)
    )
