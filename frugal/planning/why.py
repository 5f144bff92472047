"""Why a plan is as it is, in sentences; or the proof that nothing fits, with changes that would help, each computed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from frugal.config.hardware.cluster import ALLOCATOR_SHARE, ASSUMED_CAPABILITY, Cluster, Node, resized
from frugal.config.request import Request
from frugal.errors import NothingFitsError, RequestError
from frugal.planning.memory.breakdown import (
    MemoryBreakdown,
    loading_host_bytes,
    needed_host_bytes,
    training_host_bytes,
)
from frugal.planning.memory.profile import GROUPED, VARLEN
from frugal.planning.model_facts import FUSED_LOSS
from frugal.planning.plan import KERNELS
from frugal.planning.report import loading_in_words, select_texts
from frugal.planning.search.candidate import TIE, Candidate, Infeasible, OpenSource, SearchResult, Source
from frugal.planning.search.search import Search
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import cheaper_states, what_changes, with_gpus, without_pins
from frugal.units import GIB, MIB, format_bytes, format_seconds, plural


def reasons(request: Request, cluster: Cluster, result: SearchResult) -> Iterator[str]:
    """Yield the sentences of `Plan.why`, the last of which says what binds."""
    strategy = result.chosen.strategy
    if strategy.sequence_parallel > 1:
        ranks = plural(strategy.sequence_parallel, cluster.rank_noun)
        yield result.shared_because or f"each sample is shared by {ranks}, as asked"
    yield _activation_checkpointing(request, result)
    if request.loss != "auto":
        yield f"the loss is {request.loss}, as asked"
    elif strategy.loss == "tiled":
        yield f"the loss is tiled{_compared(result, lambda each: each.loss == 'plain', 'with whole logits')}"
    if request.mlp != "auto":
        yield f"the MLP is {request.mlp}, as asked"
    elif strategy.mlp == "tiled":
        yield f"the MLP is tiled{_compared(result, lambda each: each.mlp == 'plain', 'with whole ones')}"
    yield from _kernels(request, cluster, result)
    yield _zero_stage(request, cluster, result)
    yield from _offload(request, result)
    yield what_binds(request, cluster, result.chosen)


def _kernels(request: Request, cluster: Cluster, result: SearchResult) -> Iterator[str]:
    """Yield which kernels are fused, and which ones attention and experts take.

    torch multiplies experts in one kernel in bf16 on capability 9.x and 10.x (`GroupedBlas.cpp`), else one by one.
    """
    strategy = result.chosen.strategy
    names, modules = [], ""
    if strategy.kernels == "liger":
        fused = ", ".join(each for each in result.fused if each != FUSED_LOSS or strategy.loss == "tiled")
        names.append("liger")
        modules = f"; Liger's run {fused}" + (", as asked" if request.kernels == "liger" else "")
    if VARLEN in result.kernels:
        names.append(f"{VARLEN} attention")
    if names:
        yield f"{KERNELS} {', '.join(names)}{modules}"
    capability = min(device.compute_capability or ASSUMED_CAPABILITY for device in cluster.kinds)
    because = "torch's choice for {} on capability {}.{}".format(request.precision, *capability)
    if attention := " and ".join(each for each in result.kernels if each not in (VARLEN, GROUPED)):
        yield f"attention is {attention}: {because}"
    if GROUPED in result.kernels:
        is_one = request.precision == "bf16" and capability[0] in (9, 10)
        yield f"experts are multiplied {'in one kernel' if is_one else 'one by one'} ({GROUPED}): {because}"


def _activation_checkpointing(request: Request, result: SearchResult) -> str:
    taken, mode = result.chosen, result.chosen.strategy.activation_checkpointing
    what = f"activation checkpointing is {'on' if mode == 'full' else taken.strategy.checkpointing}"
    if request.layer_modes is not None:
        return f"{what}, as asked: {request.layer_modes}"
    if request.activation_checkpointing not in ("auto", "budget"):
        return f"{what}, as asked"
    others = _alternatives(result, lambda strategy: strategy.activation_checkpointing not in (mode, "budget"))
    if mode == "off":
        slower = others[0].seconds - taken.seconds if others and others[0].time is not None else 0.0
        if slower <= (TIE - 1) * taken.seconds:
            return f"{what}: it is not needed"
        return f"{what}: it is not needed, and a step would take {format_seconds(slower)} longer"
    known = replace(result, candidates=tuple(each for each in result.candidates if not each.least_shortfall_bytes))
    what += _compared(known, lambda strategy: strategy.activation_checkpointing == "off", "without it")
    in_all = [candidate for candidate in others if candidate.fits and not candidate.is_draft]
    if mode == "budget" and in_all:
        longer = 100 * (in_all[0].seconds / taken.seconds - 1)
        what += f"; with {in_all[0].strategy.checkpointing} for all layers a step takes {longer:.0f} % longer"
    return what


def _zero_stage(request: Request, cluster: Cluster, result: SearchResult) -> str:
    strategy = result.chosen.strategy
    stage = strategy.zero_stage
    if request.zero_stage is not None:
        return f"ZeRO-{stage}, as asked"
    sums = f"sums {request.precision} gradients in fp32"
    if cluster.world_size == 1 and strategy.offload_optimizer == "none":
        return f"ZeRO-{stage} on one GPU: {'there is nothing to split' if stage == 0 else f'it {sums}'}"
    simpler = _alternatives(result, lambda other: other.zero_stage < stage)
    if simpler:
        lower = simpler[0].strategy.zero_stage
        return f"ZeRO-{stage}{_compared(result, lambda other: other.zero_stage == lower, f'with ZeRO-{lower}')}"
    lowest = f"the lowest stage that {sums}" if request.precision != "fp32" and stage == 2 else "the lowest possible"
    return f"ZeRO-{stage}: {lowest}"


def _offload(request: Request, result: SearchResult) -> list[str]:
    strategy = result.chosen.strategy
    if strategy.offload_optimizer == "none":
        return []
    if strategy.offload_ratio < 1:
        compared = _compared(result, lambda other: other.offload_ratio == 1, "with all of them there")
        how = compared if request.offload_ratio is None else ", as asked"
        return [
            f"{100 * strategy.offload_ratio:.3g} % of the optimizer's sub-groups are updated in host memory{how}",
            "each host compiles DeepSpeed's CPU Adam at its first training: it needs a C++ compiler and ninja; "
            "--offload optimizer:1 does not",
        ]
    what = "optimizer and parameters live" if strategy.offload_parameters != "none" else "the optimizer lives"
    where = "on disk, or in host memory" if strategy.offload_optimizer == "nvme" else "in host memory"
    if request.offload != "auto":
        return [f"{what} {where}, as asked"]
    known = (each for each in result.candidates if each.headroom_bytes is not None)
    others = [each for each in known if each.strategy.offload_optimizer == "none"]
    return [f"{what} {where}: {_does_not_fit(others)} on the GPUs alone" if others else f"{what} {where}"]


def what_binds(request: Request, cluster: Cluster, candidate: Candidate) -> str:
    """Return what keeps a candidate that fits from larger micro-batches, in a sentence."""
    assert candidate.batch is not None
    batch, micro, largest = candidate.batch, candidate.micro_batch, candidate.largest_micro_batch
    if request.micro_batch is not None or request.accumulation_steps is not None:
        if micro < (request.micro_batch or 0):
            return (
                f"the global batch binds: spread evenly it is {micro} samples a micro-step for each "
                f"{cluster.rank_noun}, and {request.micro_batch} were asked for"
            )
        pinned = "micro-batch" if request.micro_batch is not None else "number of accumulation steps"
        return f"the {pinned} is as asked"
    if batch.accumulation_steps == 1:
        return "nothing binds: the whole global batch fits into one micro-step"
    if candidate.shortfall_of_next_bytes is None:
        return f"--max-tokens-per-gpu binds: it allows {largest} samples at once"
    short = format_bytes(candidate.shortfall_of_next_bytes)
    where = f" on the {cluster.rank_noun} with the most" if len(cluster.kinds) > 1 else ""
    sentence = f"memory binds: micro-batch {largest + 1} would be about {short} short{where}"
    if request.even and micro < largest:
        return (
            f"{sentence}; {largest} would fit, and {micro} is the largest that cuts {batch.global_batch} samples "
            "evenly, as asked"
        )
    if len(cluster.kinds) > 1 and request.micro_batch_cap is None:
        if len(set(batch.micro_batch)) > 1:
            sentence += "; each kind of GPU takes what lets all of them be done together"
    elif micro < largest:
        steps = ceil(batch.global_batch / (largest * cluster.world_size))
        why = "in as many steps" if steps == batch.accumulation_steps else "into equal micro-batches at the same speed"
        sentence += f"; {largest} would fit, and {micro} cuts {batch.global_batch} samples {why}"
    return sentence


def _alternatives(result: SearchResult, trait: Callable[[Strategy], bool]) -> list[Candidate]:
    """Return evaluated candidates with a trait that offload as much as the chosen one: fitting and fast ones first."""
    taken = result.chosen.strategy
    places = taken.offload_optimizer, taken.offload_parameters
    others = [
        each
        for each in result.candidates
        if trait(each.strategy)
        and each.headroom_bytes is not None
        and (each.strategy.offload_optimizer, each.strategy.offload_parameters) == places
    ]
    return sorted(others, key=lambda each: (not each.fits, each.seconds, -(each.headroom_bytes or 0)))


def _compared(result: SearchResult, trait: Callable[[Strategy], bool], words: str) -> str:
    """Say what the best alternative with a trait would come to; a draft may promise too much."""
    others, taken = _alternatives(result, trait), result.chosen
    if not others:
        return ""
    other = others[0]
    if not other.fits:
        return f": {_does_not_fit(others)} {words}"
    at_most, at_least = ("at most ", "at least ") if other.is_draft else ("", "")
    here, there = format_seconds(taken.seconds), format_seconds(other.seconds)
    seconds = f"a step takes {at_least}{'as long' if here == there else f'{there} instead of {here}'}"
    if taken.needed_bytes < other.needed_bytes and other.seconds <= TIE * taken.seconds:
        seconds += f", and {at_least}{format_bytes(other.needed_bytes)} instead of {format_bytes(taken.needed_bytes)}"
    if other.micro_batch == taken.micro_batch:
        return f": {words} {seconds}"
    return f": {words} {at_most}micro-batch {other.micro_batch} fits instead of {taken.micro_batch}, and {seconds}"


def _does_not_fit(candidates: list[Candidate]) -> str:
    """Say that the nearest of `candidates` does not fit, and by how much."""
    nearest = max(candidates, key=lambda candidate: candidate.headroom_bytes or 0)
    if nearest.least_shortfall_bytes is not None:
        return f"weights and optimizer states are at least {format_bytes(nearest.least_shortfall_bytes)} too large"
    what = "one sample does" if nearest.micro_batch == 1 else f"micro-batch {nearest.micro_batch} does"
    at_least = "at least " if nearest.is_draft else ""
    return f"{what} not fit ({at_least}{format_bytes(-(nearest.headroom_bytes or 0))} short)"


SHORTEST_SEQUENCE = 64
FACTORS = (2, 4, 8)
"""How many times as many GPUs, and how many times shorter samples, are tried."""


def nothing_fits(
    search: Search, result: Infeasible, ways: list[str], *, why_not_shared: str | None = None, most: int | None = None
) -> NothingFitsError:
    """Return the proof: the nearest candidate, its shortfall and breakdown, and ways out.

    `why_not_shared`: why no ranks can share samples, where that could help. `most`: the largest micro-batch that fits
    where the one that was asked for does not.
    """
    request, cluster, nearest = search.request, search.cluster, result.nearest
    memory, device = nearest.memory, min(cluster.devices, key=lambda device: device.usable_bytes)
    assert memory is not None
    noun = {"cuda": "a GPU", "cpu": "a CPU rank"}[device.kind]
    where = {
        "host": "a node's host memory",
        "disk": "the disk of a node",
        "device": f"{noun} of {format_bytes(device.memory_bytes)}",
    }
    samples = f"{plural(nearest.micro_batch, 'sample')} of {request.seq_len} tokens"
    is_short = search.evaluation.fitting.host_shortfall_bytes(memory) > 0
    is_also_short = device.margin_bytes and nearest.strategy.offload_optimizer != "none" and is_short
    lacks_host = nearest.scarce == "host" or (nearest.scarce == "device" and is_also_short)
    on_disk = "what lives on NVMe is split over all ranks, and a node's disk holds the share of its own"
    because = [
        *_levels(cluster, result),
        f"the nearest of {len(result.candidates)} strategies is {nearest.strategy}, with {samples}",
        f"it takes {format_bytes(memory.total_bytes)}: {floor(memory)}",
        *select_texts(
            (nearest.scarce == "disk", on_disk),
            (
                nearest.scarce == "device" and device.margin_bytes,
                f"{format_bytes(device.margin_bytes)} stay free as margin",
            ),
            (lacks_host, _of_host(cluster, memory) if lacks_host else ""),
            (why_not_shared, why_not_shared or ""),
        ),
    ]
    asked = f" with --micro-batch {request.micro_batch}" if most else ""
    at_most = f": at most {plural(most, 'sample')} at once" if most else ""
    return NothingFitsError(
        f"{request.model}{asked} does not fit into {where[nearest.scarce]}{at_most}",
        because=because,
        hint=f"this would fit: {', or '.join(ways)}" if ways else "use a smaller model",
    )


def _levels(cluster: Cluster, result: Infeasible) -> Iterator[str]:
    """Yield for every level of offloading the least that each ZeRO stage lacks."""
    devices = f"{cluster.rank_noun}s" if cluster.world_size > 1 else cluster.rank_noun
    for (optimizer, parameters), stages in result.by_level.items():
        what = "optimizer and parameters" if parameters != "none" else "the optimizer"
        places = {
            "cpu": f"with {what} in host memory",
            "nvme": f"with {what} on NVMe",
            "none": f"on the {devices} alone",
        }
        lacking: list[str] = []
        for stage, candidate in stages.items():
            at_least = "at least " if candidate.is_draft or candidate.memory is None else ""
            on = {"host": " on the host", "disk": " on disk", "device": ""}[candidate.scarce]
            short = format_bytes(-(candidate.headroom_bytes or 0))
            lacking.append(f"ZeRO-{stage} {'' if lacking else 'lacks '}{at_least}{short}{on}")
        yield f"{places[optimizer]} {', '.join(lacking)}"


def _of_host(cluster: Cluster, memory: MemoryBreakdown) -> str:
    """Say what the node with the largest shortfall needs of its host's memory."""
    node, needed_bytes = _tightest(cluster, memory)
    needed = format_bytes(needed_bytes)
    if loading_host_bytes(memory, node, cluster) > training_host_bytes(memory, node, cluster):
        return f"before the first step {loading_in_words(memory)}, which takes {needed} of a host"
    if node.devices[0].kind == "cpu":
        return f"{len(node.devices)} such ranks and their processes take {needed} of their host together"
    if len(set(cluster.nodes)) == 1:
        return f"each node's host needs {needed} beside it"
    has = format_bytes(node.host_memory_bytes or 0)
    return f"the host of {len(node.devices)} GPUs that has {has} needs {needed} beside it"


def _tightest(cluster: Cluster, memory: MemoryBreakdown) -> tuple[Node, int]:
    """Return the node with the largest shortfall of host memory, and the bytes that its ranks need there."""
    known = [node for node in dict.fromkeys(cluster.nodes) if node.host_memory_bytes is not None]
    needed = {node: needed_host_bytes(memory, node, cluster) for node in known}
    node = max(known, key=lambda node: needed[node] - (node.host_memory_bytes or 0))
    return node, needed[node]


def _host_flag(cluster: Cluster, memory: MemoryBreakdown) -> str:
    """Return the flag with the host memory that the tightest node needs, rounded up."""
    return f"--host-mem {ceil(_tightest(cluster, memory)[1] / GIB)}G"


def floor(memory: MemoryBreakdown) -> str:
    """List the parts of a breakdown above 1 %, largest first."""
    parts = sorted(((getattr(memory, name), name) for name in memory.CATEGORIES), reverse=True)
    return ", ".join(f"{name} {format_bytes(size)}" for size, name in parts if size * 100 > memory.total_bytes)


def pins_to_drop(request: Request, cluster: Cluster, source: Source, likely: Strategy) -> list[str]:
    """Return the changes of one pin that make the request fit."""
    return [flag for flag, relaxed in without_pins(request) if fits(relaxed, cluster, source, likely)]


def largest_micro_batch(search: Search) -> int | None:
    """Return the most samples that fit a device at once; None where only dry runs could tell.

    A draft promises no less than the strategy keeps, so those below the best that was kept are not evaluated.
    """
    free = Search(replace(search.request, micro_batch=None, accumulation_steps=None), search.cluster, search.source)
    strategies = [strategy for level in free.levels for strategy in free.strategies(level)]
    free.source.prepare(strategies)
    drafts = [draft for each in strategies if (draft := free.evaluation.draft(each)) is not None and draft.fits]
    most = 0
    for draft in sorted(drafts, key=lambda draft: -draft.largest_micro_batch):
        if draft.largest_micro_batch <= most:
            break
        most = max(most, free.evaluation.evaluate(draft.strategy).largest_micro_batch)
    return most or None


def remedies(search: Search, result: Infeasible, dry_run: OpenSource, ways: list[str]) -> list[str]:
    """Return `ways` and other changes of one flag that make the request fit, cheapest first; each was computed."""
    request, cluster, nearest = search.request, search.cluster, result.nearest
    more_host = _more_host_memory(search, result)
    ways = [*ways, *more_host]
    ways += [way for way in _more_memory(search, nearest) if not (more_host and "--host-mem" in way)]
    for flag, other_request, other_cluster in _larger(request, cluster, nearest):
        if flag.split()[0] in " ".join(ways):
            continue  # a smaller change of the same kind is enough
        with dry_run(other_request, other_cluster) as source:
            if fits(other_request, other_cluster, source, nearest.strategy):
                ways.append(flag)
    for flag, other_request in cheaper_states(request):
        with dry_run(other_request, cluster) as source:
            if fits(other_request, cluster, source, nearest.strategy):
                ways.append(f"{flag} ({what_changes(other_request)})")
    return ways


def fits(request: Request, cluster: Cluster, source: Source, likely: Strategy) -> bool:
    """Return whether `likely` fits, or the most frugal strategy of a level of offloading; others are not tried."""
    try:
        search = Search(request, cluster, source)
    except RequestError:  # the change contradicts another flag
        return False
    levels = [search.strategies(level) for level in search.levels]
    tried = [max(level, key=lambda strategy: strategy.frugality) for level in reversed(levels) if level]
    if any(likely in level for level in levels):
        tried.insert(0, likely)
    return any(search.evaluation.evaluate(strategy).fits for strategy in dict.fromkeys(tried))


def _more_host_memory(search: Search, result: Infeasible) -> list[str]:
    """Return the host memory of the strategy that needs least of it, where host memory is all that it lacks."""
    short = [each for each in result.candidates if each.host_shortfall_bytes and each.memory is not None]
    if not short or result.nearest.scarce == "host":
        return []
    least = min(short, key=lambda candidate: candidate.host_shortfall_bytes)
    assert least.memory is not None
    needed = ceil(_tightest(search.cluster, least.memory)[1] / GIB) * GIB
    nodes = tuple(
        replace(node, host_memory_bytes=max(needed, node.host_memory_bytes)) if node.host_memory_bytes else node
        for node in search.cluster.nodes
    )
    larger = Search(search.request, replace(search.cluster, nodes=nodes), search.source)
    return [_host_flag(search.cluster, least.memory)] if larger.evaluation.evaluate(least.strategy).fits else []


_GRAINS = ((2 * GIB, GIB // 2), (GIB // 2, 64 * MIB), (-1, MIB))
"""Bytes of memory that a hint names in multiples of the second, where they are more than the first."""


def _more_memory(search: Search, nearest: Candidate) -> list[str]:
    """Return the memory that the nearest candidate needs, rounded up: the host's, where that is lacking."""
    cluster, device = search.cluster, search.cluster.devices[0]
    if nearest.memory is None or len(set(cluster.devices)) > 1 or nearest.scarce == "disk":
        return []
    if nearest.scarce == "host":
        return [_host_flag(cluster, nearest.memory)]
    profile = search.source.profile(nearest.strategy, True)
    ranks = (cluster.world_size, cluster.world_size)
    share = ALLOCATOR_SHARE if device.kind == "cuda" else 0.0
    needed = (nearest.memory.total_bytes + device.context_above_bytes) / (1 - share)
    grain = next(grain for above, grain in _GRAINS if needed > above)
    size = int(needed // grain) * grain
    for _ in range(8):  # slack, context and margin depend on the size, so the first may be short
        size += grain
        memory = profile.memory(nearest.micro_batch, resized(device, memory_bytes=size, num_ranks=ranks))
        if memory.fits:
            flag = f"--mem {size / GIB:g}G" if size % (GIB // 2) == 0 else f"--mem {size // MIB}M"
            is_enough = search.evaluation.fitting.host_shortfall_bytes(memory) <= 0
            return [flag if is_enough else f"{flag} with {_host_flag(cluster, memory)}"]
    return []


def _larger(request: Request, cluster: Cluster, nearest: Candidate) -> Iterator[tuple[str, Request, Cluster]]:
    """Yield more GPUs of the same kind, then shorter samples, where the parts they shrink are large enough."""
    memory = nearest.memory
    assert memory is not None
    shortfall = -(nearest.headroom_bytes or 0)
    of_node = nearest.scarce != "device"
    if of_node and len(set(cluster.nodes)) == 1:
        yield f"--nodes {2 * len(cluster.nodes)}", request, replace(cluster, nodes=cluster.nodes * 2)
    states = memory.parameters + memory.gradients + memory.optimizer
    factors = [factor for factor in FACTORS if states - states // factor > shortfall]
    if len(set(cluster.nodes)) == len(set(cluster.devices)) == 1 and request.zero_stage != 0 and not of_node:
        for num_gpus in (factor * len(cluster.nodes[0].devices) for factor in factors):
            yield f"--gpus {num_gpus}", request, with_gpus(cluster, num_gpus)
    for factor in FACTORS:
        seq_len = request.seq_len // factor
        if memory.of_the_step - memory.of_the_step // factor > shortfall and seq_len >= SHORTEST_SEQUENCE:
            yield f"--seq-len {seq_len}", replace(request, seq_len=seq_len), cluster
