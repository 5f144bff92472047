"""The contents of a plan's page besides the plan: timelines of live bytes, and a grid of answers for other settings.

An answer is what a search finds for one strategy on one cluster (`StrategyEvaluation`): the batch it would take, its
memory with torch's allocator replayed, and its time. A strategy whose live tensors alone are too large is not replayed;
its bytes are then a lower bound. The page computes and interpolates nothing.

The grid has an answer for each combination of its axes. One profile, that of the plan's card, serves all cards with a
number of GPUs: the scratch of sums depends on a card's processors, and may differ by 0.3 % of the total.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from frugal.config.hardware.cluster import Cluster
from frugal.config.pins import check_pins
from frugal.config.request import Request
from frugal.dryrun.client import DryRunSource, workers
from frugal.errors import FrugalError, RequestError
from frugal.planning.length_bucketing import grouping
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.memory.profile import MemoryProfile, RankMemory
from frugal.planning.memory.timeline import CATEGORIES, OPTIMIZER_STEP, Timeline
from frugal.planning.model_facts import ModelFacts
from frugal.planning.plan import Plan, binds_in_short, speed_in_words
from frugal.planning.search.candidate import Candidate
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.strategy import PLACES, Strategy, allowed_strategies, in_part, offload_levels
from frugal.planning.what_if import axes_around, with_gpus, with_memory
from frugal.planning.why import what_binds
from frugal.units import GIB, MIB, format_bytes, plural

MEMORY_GIB = (3, 4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180)
"""The cards offered beside the plan's own: by `--html` the next four below and above, otherwise the next two."""

GPUS = (1, 2, 4, 8, 16)
"""The GPUs of a node that `--html` offers beside the plan's own number, its half and its double."""

EVENTS_OF_A_PAGE, EVENTS_OF_A_SMALL_PAGE = 24_000_000, 5_000_000
"""The most simulated events of `--html`, and of the page beside plan.json; they limit the numbers of GPUs, to no fewer
than three and one. A strategy on one number of GPUs has 6,000 to 14,000 with gpt2 (10 ms), 25,000 to 80,000 with models
of 8B (30 to 60 ms)."""

MOST_POINTS, FEW_POINTS = 400, 160
"""Points of the plan's picture, and of another strategy's; at least one of each phase."""

NEAR = 40
"""Events before and after the peak that the zoom shows, one by one."""

STEPS_OF_AN_AXIS = 1 << 12
"""Bytes are rounded to so many parts of the peak, finer than a pixel; the peak itself and the tables are exact."""

PLACES_BACK = 400
"""Events before the peak among which a module is looked for. Backward runs in none."""

MORE = " The same command with --html FILE computes other sample lengths, offloading, more GPUs and cards."


def chosen_micro_batches(plan: Plan) -> Iterator[tuple[Strategy, int]]:
    """Yield every strategy of the plan with the micro-batch it was weighed at, the chosen one first."""
    own = plan.memory.device_in(plan.cluster)
    sizes = zip(plan.cluster.devices, plan.batch.cap_of_rank, strict=True)
    yield plan.strategy, max(size for device, size in sizes if device == own)
    for each in plan.rejected:
        yield each.strategy, max(1, each.micro_batch)


def is_of_one_kind(cluster: Cluster) -> bool:
    """Return whether all nodes and devices are alike, so that there is a number of GPUs to change."""
    return len(cluster.kinds) == 1 and len({len(node.devices) for node in cluster.nodes}) == 1


def answers_here(plan: Plan, *, in_full: bool) -> dict[str, Any]:
    """Return the `answers` of this machine's worker processes."""
    with closing(workers()) as pool:
        return answers(plan, partial(DryRunSource, pool=pool, will_dry_run=False), in_full=in_full)


def answers(plan: Plan, open_source: Callable[[Request, Cluster], DryRunSource], *, in_full: bool) -> dict[str, Any]:
    """Return what a page looks up, in plain types: `timelines` of the plan's strategies, and a `grid` of answers.

    `open_source`: opens a source for one request on one cluster. `in_full`: with other lengths, and more GPUs, cards
    and batches. The plan's strategies are traced where they were not. `grid` is None where devices differ, or
    arithmetic is enough for no strategy.

    Raises:
        WorkerError: a trace crashed.
    """
    with ExitStack() as opened:

        def open_length(seq_len: int) -> DryRunSource:
            shared_by = plan.batch.sequence_parallel if plan.batch.sequence_parallel > 1 else None
            request = replace(plan.request, seq_len=seq_len, sequence_parallel=shared_by)
            return opened.enter_context(open_source(request, plan.cluster))

        source = open_length(plan.request.seq_len)
        source.prepare([strategy for strategy, _ in chosen_micro_batches(plan)])
        timelines = [_timeline(plan, source, number) for number in range(1 + len(plan.rejected))]
        grid = _Grid(plan, source, in_full).filled(open_length) if is_of_one_kind(plan.cluster) else None
    return {"timelines": timelines, "grid": grid}


class GridAnswer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The answer for one setting; an array in the page, in this order.

    Attributes:
        fits: whether a batch fits.
        is_bound: whether `total` is the least it would take, and `headroom` the most.
        total: bytes of the fullest device; where nothing fits of the smallest micro-batch, 0: impossible.
        headroom: bytes; negative: what is short.
        context: bytes in `total`.
        host: bytes of each host; 0 where nothing is moved there.
        host_lacks: bytes that a host or its disk lacks.
        seconds: of a step; 0 where nothing fits.
        parts: index of the live bytes by category.
        batch: index of a text, as the next two: how the global batch is cut, or why nothing can be said.
        step: the time of a step.
        binds: what binds.
    """

    fits: bool = False
    is_bound: bool = False
    total: int = 0
    headroom: int = 0
    context: int = 0
    host: int = 0
    host_lacks: int = 0
    seconds: float = 0.0
    parts: int = 0
    batch: int = 0
    step: int = 0
    binds: int = 0


class _Indices(dict[Any, int]):
    """Values that are kept once, with their indices."""

    def of(self, value: Any) -> int:
        return self.setdefault(value, len(self))


class _Grid:
    """The answers for a plan's strategies under other settings.

    `source`: of the plan's request on its cluster. `in_full`: as for `answers`.

    Attributes:
        cards: bytes of a device.
        batches: the plan's request with other global batches.
        profiles: of the strategies for which arithmetic is enough, the plan's own first.
    """

    def __init__(self, plan: Plan, source: DryRunSource, in_full: bool) -> None:
        self._plan, self._source, self._in_full = plan, source, in_full
        self._answers, self._parts, self._texts = _Indices(), _Indices(), _Indices({"": 0})
        memory = plan.memory.device_in(plan.cluster).memory_bytes
        cards = sorted({memory, *(gib * GIB for gib in MEMORY_GIB if memory <= 4 * gib * GIB <= 16 * memory)})
        own, beside = cards.index(memory), 4 if in_full else 2
        self.cards = cards[max(0, own - beside) : own + beside + 1]
        request, quarters = source.request, (2, 4, 8) if in_full or plan.request.lengths is None else (4,)
        if request.global_tokens is not None:
            tokens = dict.fromkeys(max(request.seq_len, request.global_tokens * number // 4) for number in quarters)
            self.batches = [replace(request, global_tokens=number) for number in tokens]
        else:
            samples = dict.fromkeys(max(1, request.batch_samples * number // 4) for number in quarters)
            self.batches = [replace(request, global_batch=number) for number in samples]
        self.profiles = {
            strategy: profile
            for strategy in self._allowed()
            if (profile := _profile(source, strategy, True)) is not None
        }

    def filled(self, open_length: Callable[[int], DryRunSource]) -> dict[str, Any] | None:
        """Return the grid in plain types; None where there is no strategy.

        `entries`: indices into `answers`, by length, GPUs, card, batch and strategy. `axes`: by name the values of
        each, their words, and why there are no others. `open_length`: opens a source for samples of another length.

        Raises:
            WorkerError: a trace crashed.
        """
        plan, own = self._plan, len(self._plan.cluster.nodes[0].devices)
        if not self.profiles:
            return None
        num_events = sum(len(rank.timeline.events) for profile in self.profiles.values() for rank in profile.ranks)
        lengths: Sequence[int] = (plan.request.seq_len,)
        why = "the model takes no other near it"
        if plan.request.lengths is not None:
            why = "the data has its own lengths"
        elif self._in_full:
            lengths = axes_around(plan, self._source.facts().max_positions)["seq-len"]
        else:
            why = "--html FILE traces others"
        most_events, least = (EVENTS_OF_A_PAGE, 3) if self._in_full else (EVENTS_OF_A_SMALL_PAGE, 1)
        numbers = dict.fromkeys((own, 2 * own, max(1, own // 2), *(GPUS if self._in_full else ())))
        gpus = sorted(list(numbers)[: max(least, most_events // (num_events * len(lengths)))])
        entries = []
        for length in lengths:
            source = self._source if length == plan.request.seq_len else open_length(length)
            source.prepare(list(self.profiles))
            entries += [entry for number in gpus for entry in self._of_gpus(source, number)]
        sizes = [each.global_tokens or each.batch_samples for each in self.batches]
        more = "the model takes no other" if self._in_full else "--html FILE computes others"
        counted = [f"{n:,} {plan.counted}" if plan.request.global_tokens else plural(n, "sample") for n in sizes]
        axes: dict[str, tuple[Sequence[int], list[str], str]] = {
            "length": (lengths, [plural(each, "token") for each in lengths], why),
            "gpus": (gpus, [plural(each, plan.cluster.rank_noun) for each in gpus], more),
            "card": (self.cards, list(map(format_bytes, self.cards)), more),
            "batch": (sizes, counted, more),
        }
        return {
            "axes": {name: dict(zip(("values", "words", "why"), axis, strict=True)) for name, axis in axes.items()},
            "why": more,
            "covers": f"{len(entries):,} answers, one for each combination of these.{'' if self._in_full else MORE}",
            "strategies": [_in_words(strategy) for strategy in self.profiles],
            "entries": entries,
            "answers": list(self._answers),
            "parts": list(self._parts),
            "texts": list(self._texts),
        }

    def _allowed(self) -> Iterator[Strategy]:
        """Yield the plan's strategies, its own first, and `in_full` all others that its model allows."""
        plan, source, on_gpus = self._plan, self._source, self._plan.cluster.devices[0].kind == "cuda"
        weighed = {str(strategy): strategy for strategy, _ in chosen_micro_batches(plan)}
        yield from sorted(weighed.values(), key=lambda each: each.num_mechanisms)
        free = replace(
            source.request,
            zero_stage=None,
            loss="auto",
            mlp=plan.strategy.mlp,
            activation_checkpointing="auto",
            layer_modes=None,
            offload="auto",
            offload_ratio=None,
        )
        for level in offload_levels(free, on_gpus=on_gpus) if self._in_full else ():
            for each in allowed_strategies(
                free,
                source.facts(),
                world_size=max(2, plan.cluster.world_size),
                offload=level,
                on_gpus=on_gpus,
                small_buckets=plan.strategy.small_buckets,
            ):
                if str(each) not in weighed:
                    yield each

    def _of_gpus(self, source: DryRunSource, gpus: int) -> list[int]:
        """Return the entries of a source's length on so many GPUs of each node."""
        cluster = self._plan.cluster
        if gpus != len(cluster.nodes[0].devices):
            cluster = with_gpus(cluster, gpus)
            source = source.on(cluster)
        strategies = [_on_ranks(strategy, source.facts(), cluster.world_size) for strategy in self.profiles]
        entries = []
        for memory in self.cards:
            for batch in self.batches:
                try:
                    request = replace(batch, seq_len=source.request.seq_len)
                    check_pins(request, cluster.world_size)
                    card = with_memory(cluster, memory)
                except RequestError as error:
                    entries += [self._without_memory(error)] * len(strategies)
                    continue
                evaluation = StrategyEvaluation(request, card, source)
                entries += [self._entry(evaluation, strategy) for strategy in strategies]
        return entries

    def _without_memory(self, why: FrugalError) -> int:
        return self._answers.of(GridAnswer(batch=self._texts.of("; ".join((why.what, *why.because)))))

    def _entry(self, evaluation: StrategyEvaluation, strategy: Strategy) -> int:
        try:
            candidate = _found(evaluation, strategy)
        except FrugalError as error:  # the model does not take it
            return self._without_memory(error)
        if candidate is None or candidate.memory is None:
            return self._without_memory(RequestError("only a dry run can tell"))
        memory, texts, request = candidate.memory, self._texts, evaluation.request
        parts = tuple(round(getattr(memory, name) / MIB) for name in memory.CATEGORIES[:-2])
        answer = GridAnswer(
            fits=candidate.fits,
            is_bound=candidate.is_draft,
            total=memory.total_bytes,
            headroom=memory.headroom_bytes,
            context=memory.context,
            host=memory.host_bytes_per_node if strategy.offload_optimizer != "none" else 0,
            host_lacks=candidate.host_shortfall_bytes or candidate.disk_shortfall_bytes,
            parts=self._parts.of(parts),
        )
        if candidate.batch is not None and candidate.time is not None:
            batch, noun = candidate.batch, evaluation.cluster.rank_noun
            samples = batch.global_batch
            if request.lengths is not None:
                samples = grouping(request.lengths, batch, request.seq_len).step_samples
            answer = msgspec.structs.replace(
                answer,
                seconds=float(f"{candidate.seconds:.4g}"),
                batch=texts.of(batch.arithmetic(noun, self._plan.counted, request.seq_len)),
                step=texts.of(speed_in_words(candidate.time, samples)),
                binds=texts.of(binds_in_short(what_binds(request, evaluation.cluster, candidate))),
            )
        return self._answers.of(answer)


def _on_ranks(strategy: Strategy, facts: ModelFacts, world_size: int) -> Strategy:
    """Return the strategy with the sizes that depend on the number of ranks."""
    if strategy.offload_parameters == "nvme":
        return replace(strategy, nvme_buffer_elements=-(-facts.largest_parameter // world_size))
    if strategy.offload_ratio < 1:
        usual = replace(strategy, sub_group_elements=Strategy.sub_group_elements)
        return in_part(usual, strategy.offload_ratio, facts.trainable_parameters, world_size)
    return strategy


def _in_words(strategy: Strategy) -> dict[str, str]:
    """Return a strategy by the controls that choose it, with its name and the flags of `frugal plan` that pin it."""
    places = strategy.offload_optimizer, strategy.offload_parameters
    level = next(level for level, allowed in PLACES.items() if places in allowed)
    more = {"optimizer": f":{strategy.offload_ratio:g}", "nvme": f":{strategy.nvme_path}"}.get(level, "")
    ends = [*accumulate(count for _, count in strategy.layer_modes)]
    modes = [f"{mode}:{end - count}-{end - 1}" for (mode, count), end in zip(strategy.layer_modes, ends, strict=True)]
    words = ["--zero-stage", strategy.zero_stage]
    words += ["--activation-checkpointing", ",".join(modes) or strategy.activation_checkpointing]
    words += ["--loss", strategy.loss, "--offload", level + more]
    words += ["--mlp", strategy.mlp] if strategy.mlp != "plain" else []
    words += ["--kernels", strategy.kernels] if strategy.kernels != "plain" else []
    words += ["--sequence-parallel", strategy.sequence_parallel] if strategy.sequence_parallel > 1 else []
    _, _, *others = str(strategy).split(", ")
    moved = [word for word in others if word.endswith((" in host memory", " on NVMe"))]
    rest = [word for word in others if word not in (*moved, "tiled loss")]
    return {
        "name": str(strategy),
        "flags": " ".join(map(str, words)),
        "stage": f"ZeRO-{strategy.zero_stage}",
        "checkpointing": strategy.checkpointing,
        "offload": ", ".join(moved) or "nothing",
        "loss": ", ".join([f"{strategy.loss} loss", *rest]),
    }


def _profile(source: DryRunSource, strategy: Strategy, accumulates: bool) -> MemoryProfile | None:
    """Return the profile for every micro-batch; None where only a dry run could make one, or the model refuses it."""
    try:
        return source.profile(strategy, accumulates) if source.draft(strategy, accumulates) is not None else None
    except FrugalError:
        return None


def _found(evaluation: StrategyEvaluation, strategy: Strategy) -> Candidate | None:
    """Return a strategy evaluated, in full where its draft fits; None where only a dry run can tell.

    Raises:
        FrugalError: the model does not take it.
    """
    draft = evaluation.draft(strategy)
    return evaluation.evaluate(strategy) if draft is not None and draft.fits else draft


def _timeline(plan: Plan, source: DryRunSource, number: int) -> dict[str, Any] | None:
    """Return the picture of a strategy of the plan, by its row in the table, from 0 on; None: only dry runs could tell.

    Other strategies than the plan's own are drawn with the batch that they would take; those that do not fit with one
    sample, without slack. Where devices differ, all are, with the micro-batch of their row.
    """
    strategy, micro_batch = list(chosen_micro_batches(plan))[number]
    steps, is_draft = plan.batch.accumulation_steps, number > 0
    if number and is_of_one_kind(plan.cluster) and _profile(source, strategy, True) is not None:
        candidate = _found(StrategyEvaluation(source.request, plan.cluster, source), strategy)
        assert candidate is not None, "drafted just now"
        micro_batch, is_draft = candidate.micro_batch, candidate.is_draft
        steps = 2 if candidate.batch is None else candidate.batch.accumulation_steps
    profile = _profile(source, strategy, steps > 1 or plan.request.lengths is not None)
    if profile is None:
        return None
    memory = (profile.draft if is_draft else profile).memory(micro_batch, plan.memory.device_in(plan.cluster))
    return picture(profile.ranks, memory, micro_batch, FEW_POINTS if number else MOST_POINTS) | {
        "microBatch": micro_batch,
        "total": memory.total_bytes,
    }


def picture(
    ranks: Sequence[RankMemory], memory: MemoryBreakdown, micro_batch: int, most: int = MOST_POINTS
) -> dict[str, Any]:
    """Return the timeline of the fullest of `ranks`, whose peak is `memory`, in plain types.

    `step` and `zoom`, which has every event near the peak: `x`: events. `live`: by category, in units of `unit` bytes;
    one number where it never changes. `modules`: of each point, an index into `names`. `second`: the first point of
    the second optimizer step, which is like all later ones; 0 where the peak is before it. `peak`: bytes of live
    tensors, the event, operator, phase and module. `parts` and `phases`: bytes by category, and live at the fullest
    moment of each phase.
    """
    timeline = max(ranks, key=lambda each: each.timeline.peak_bytes(micro_batch) == memory.live_bytes).timeline
    changes = timeline.changes(micro_batch)
    total = changes.cumsum()
    categories = np.asarray(timeline.categories)[np.asarray(timeline.events)]
    of_categories = {
        name: np.where(categories == number, changes, 0).cumsum()
        for number, name in enumerate(CATEGORIES)
        if (categories == number).any()
    }
    unit = 1 << max(0, memory.live_bytes.bit_length() - STEPS_OF_AN_AXIS.bit_length() + 1)
    events = _fullest_moments(timeline, total, most)
    peak = next(e for e in events if total[e] == memory.live_bytes and timeline.phase_of(e) == memory.phase)
    near = list(range(max(0, peak - NEAR), min(len(total), peak + NEAR + 1)))
    names: dict[str, int] = {}

    def drawn(events: list[int]) -> dict[str, Any]:
        live = {name: (so_far[events] // unit).tolist() for name, so_far in of_categories.items()}
        modules = [timeline.names[timeline.modules[timeline.events[event]]] for event in events]
        return {
            "x": events,
            "live": {k: v if len(set(v)) > 1 else v[0] for k, v in live.items() if any(v)},
            "modules": [names.setdefault(name, len(names)) for name in modules],
        }

    ends = [i for i, (name, _) in enumerate(timeline.phases[:-1]) if name == OPTIMIZER_STEP]
    second = timeline.phases[ends[0] + 1][1] if ends else 0
    return {
        "unit": unit,
        "step": drawn(events),
        "zoom": drawn(near),
        "names": list(names),
        "marks": [[name, first] for name, first in timeline.phases],
        "second": next((i for i, event in enumerate(events) if event >= second), 0) if peak >= second else 0,
        "peak": {
            "event": peak,
            "bytes": memory.live_bytes,
            "operator": memory.operator.removeprefix("aten.").removesuffix(".default"),
            "phase": memory.phase,
            "where": _where(timeline, peak),
        },
        "parts": {name: getattr(memory, name) for name in memory.CATEGORIES},
        "phases": timeline.phase_peaks(micro_batch),
    }


def _fullest_moments(timeline: Timeline, total: "np.ndarray[Any, Any]", most: int) -> list[int]:
    """Return events: of each stretch of a phase the fullest one."""
    chosen = []
    for _, events in timeline.phase_ranges:
        if not events:
            continue
        share = round(most * len(events) / len(total))
        stretches = np.array_split(np.arange(events.start, events.stop), min(max(1, share), len(events)))
        chosen += [int(stretch[total[stretch].argmax()]) for stretch in stretches]
    return chosen


def _where(timeline: Timeline, event: int) -> str:
    """Return the module running at an event, or that of the last tensor before it that was made or freed in one."""
    for place in range(event, max(0, event - PLACES_BACK) - 1, -1):
        name = timeline.names[timeline.modules[timeline.events[place]]]
        if name:
            return name if place == event else f"near {name}"
    return ""
