"""The proof that nothing fits: what is lacking, and which changes would help; each of them is computed first."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from frugal.config.hardware.cluster import ALLOCATOR_SHARE, Cluster, Node, resized
from frugal.config.request import Request
from frugal.errors import NothingFitsError, RequestError
from frugal.planning.memory import breakdown
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.memory_report import loading_in_words
from frugal.planning.search.candidate import Candidate, Infeasible, OpenSource, Source
from frugal.planning.search.search import Search
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import cheaper_states, what_changes, with_gpus, without_pins
from frugal.units import GIB, MIB, format_bytes, plural

SHORTEST_SEQUENCE = 64
FACTORS = (2, 4, 8)
"""How many times as many GPUs, and how many times shorter samples, are tried."""


def nothing_fits(
    request: Request,
    cluster: Cluster,
    result: Infeasible,
    ways: list[str],
    *,
    why_not_shared: str | None = None,
    most: int | None = None,
) -> NothingFitsError:
    """Return the proof: the nearest candidate, its shortfall and breakdown, and ways out.

    `why_not_shared`: why no ranks can share samples, where that could help. `most`: the largest micro-batch that fits
    where the one that was asked for does not.
    """
    nearest = result.nearest
    assert nearest.memory is not None
    memory, device = nearest.memory, min(cluster.devices, key=lambda device: device.usable_bytes)
    where_to = {"cuda": "a GPU", "cpu": "a CPU rank"}
    samples = f"{plural(nearest.micro_batch, 'sample')} of {request.seq_len} tokens"
    where = (
        "a node's host memory"
        if nearest.host_shortfall_bytes
        else "the disk of a node"
        if nearest.disk_shortfall_bytes
        else f"{where_to[device.kind]} of {format_bytes(device.memory_bytes)}"
    )
    because = [
        *_levels(cluster, result),
        f"the nearest of {len(result.candidates)} strategies is {nearest.strategy}, with {samples}",
        f"it takes {format_bytes(memory.total_bytes)}: {floor(memory)}",
    ]
    if nearest.host_shortfall_bytes:
        because.append(_of_host(cluster, memory))
    elif nearest.disk_shortfall_bytes:
        because.append("what lives on NVMe is split over all ranks, and a node's disk holds the share of its own")
    elif device.margin_bytes:
        because.append(f"{format_bytes(device.margin_bytes)} stay free as margin")
        if nearest.strategy.offload_optimizer != "none" and _lacks_host(cluster, memory):
            because.append(_of_host(cluster, memory))
    if why_not_shared is not None:
        because.append(why_not_shared)
    asked = f" with --micro-batch {request.micro_batch}" if most else ""
    at_most = f": at most {plural(most, 'sample')} at once" if most else ""
    return NothingFitsError(
        f"{request.model}{asked} does not fit into {where}{at_most}",
        because=because,
        hint=f"this would fit: {', or '.join(ways)}" if ways else "use a smaller model",
    )


def _levels(cluster: Cluster, result: Infeasible) -> Iterator[str]:
    """Yield for every level of offloading the least that each ZeRO stage lacks."""
    devices = f"{cluster.rank_noun}s" if cluster.world_size > 1 else cluster.rank_noun
    for (optimizer, parameters), stages in result.by_level.items():
        what = "optimizer and parameters" if parameters != "none" else "the optimizer"
        where = {"cpu": "in host memory", "nvme": "on NVMe"}.get(optimizer, "")
        level = f"with {what} {where}" if where else f"on the {devices} alone"
        yield f"{level} {_lacks(stages)}"


def _lacks(stages: dict[int, Candidate]) -> str:
    parts: list[str] = []
    for stage, candidate in stages.items():
        at_least = "at least " if candidate.is_draft or candidate.memory is None else ""
        on_host = (
            " on the host" if candidate.host_shortfall_bytes else " on disk" if candidate.disk_shortfall_bytes else ""
        )
        lacks = "" if parts else "lacks "
        parts.append(f"ZeRO-{stage} {lacks}{at_least}{format_bytes(-(candidate.headroom_bytes or 0))}{on_host}")
    return ", ".join(parts)


def _lacks_host(cluster: Cluster, memory: MemoryBreakdown) -> bool:
    return any(
        node.host_memory_bytes is not None
        and breakdown.needed_host_bytes(memory, node, cluster) > node.host_memory_bytes
        for node in dict.fromkeys(cluster.nodes)
    )


def _of_host(cluster: Cluster, memory: MemoryBreakdown) -> str:
    """Say what the node with the largest shortfall needs of its host's memory."""
    node = _tightest(cluster, memory)
    needed = format_bytes(breakdown.needed_host_bytes(memory, node, cluster))
    if breakdown.loading_host_bytes(memory, node, cluster) > breakdown.training_host_bytes(memory, node, cluster):
        return f"before the first step {loading_in_words(memory)}, which takes {needed} of a host"
    if node.devices[0].kind == "cpu":
        return f"{len(node.devices)} such ranks and their processes take {needed} of their host together"
    if len(set(cluster.nodes)) == 1:
        return f"each node's host needs {needed} beside it"
    has = format_bytes(node.host_memory_bytes or 0)
    return f"the host of {len(node.devices)} GPUs that has {has} needs {needed} beside it"


def _tightest(cluster: Cluster, memory: MemoryBreakdown) -> Node:
    """Return the node with the largest shortfall of host memory."""
    known = (node for node in dict.fromkeys(cluster.nodes) if node.host_memory_bytes is not None)
    return max(
        known, key=lambda node: breakdown.needed_host_bytes(memory, node, cluster) - (node.host_memory_bytes or 0)
    )


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


def remedies(
    request: Request, cluster: Cluster, search: Search, result: Infeasible, dry_run: OpenSource, ways: list[str]
) -> list[str]:
    """Return `ways` and other changes of one flag that make the request fit, cheapest first; each was computed."""
    nearest, ways = result.nearest, list(ways)
    more_host = list(_more_host_memory(request, cluster, search, result))
    ways += more_host
    ways += [way for way in _more_memory(cluster, search, nearest) if not (more_host and "--host-mem" in way)]
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


def _more_host_memory(request: Request, cluster: Cluster, search: Search, result: Infeasible) -> Iterator[str]:
    """Yield the host memory of the strategy that needs least of it, where host memory is all that it lacks."""
    short = [
        candidate for candidate in result.candidates if candidate.host_shortfall_bytes and candidate.memory is not None
    ]
    if not short or result.nearest.host_shortfall_bytes:
        return
    least = min(short, key=lambda candidate: candidate.host_shortfall_bytes)
    assert least.memory is not None
    needed = ceil(breakdown.needed_host_bytes(least.memory, _tightest(cluster, least.memory), cluster) / GIB)
    nodes = tuple(
        replace(node, host_memory_bytes=max(needed * GIB, node.host_memory_bytes)) if node.host_memory_bytes else node
        for node in cluster.nodes
    )
    if Search(request, replace(cluster, nodes=nodes), search.source).evaluation.evaluate(least.strategy).fits:
        yield f"--host-mem {needed}G"


def _more_memory(cluster: Cluster, search: Search, nearest: Candidate) -> list[str]:
    """Return the memory that the nearest candidate needs, rounded up: the host's, where that is lacking."""
    if nearest.memory is None or len(set(cluster.devices)) > 1 or nearest.disk_shortfall_bytes:
        return []
    if nearest.host_shortfall_bytes:
        node = _tightest(cluster, nearest.memory)
        return [f"--host-mem {ceil(breakdown.needed_host_bytes(nearest.memory, node, cluster) / GIB)}G"]
    device = cluster.devices[0]
    profile = search.source.profile(nearest.strategy, True)
    ranks = (cluster.world_size, cluster.world_size)
    share = ALLOCATOR_SHARE if device.kind == "cuda" else 0.0
    needed = (nearest.memory.total_bytes + device.context_above_bytes) / (1 - share)
    grain = GIB // 2 if needed > 2 * GIB else 64 * MIB if needed > GIB // 2 else MIB
    size = int(needed // grain) * grain
    for _ in range(8):  # slack, context and margin depend on the size, so the first may be short
        size += grain
        memory = profile.memory(nearest.micro_batch, resized(device, memory_bytes=size, num_ranks=ranks))
        if memory.fits:
            flag = f"--mem {size / GIB:g}G" if size % (GIB // 2) == 0 else f"--mem {size // MIB}M"
            if search.evaluation.fitting.host_shortfall_bytes(memory) <= 0:
                return [flag]
            needed = breakdown.needed_host_bytes(memory, _tightest(cluster, memory), cluster)
            return [f"{flag} with --host-mem {ceil(needed / GIB)}G"]
    return []


def _larger(request: Request, cluster: Cluster, nearest: Candidate) -> Iterator[tuple[str, Request, Cluster]]:
    """Yield more GPUs of the same kind, then shorter samples, where the parts they shrink are large enough."""
    memory = nearest.memory
    assert memory is not None
    shortfall = -(nearest.headroom_bytes or 0)
    of_node = nearest.host_shortfall_bytes or nearest.disk_shortfall_bytes
    if of_node and len(set(cluster.nodes)) == 1:
        num_nodes = 2 * len(cluster.nodes)
        yield f"--nodes {num_nodes}", request, replace(cluster, nodes=cluster.nodes * 2)
    states = memory.parameters + memory.gradients + memory.optimizer
    factors = [factor for factor in FACTORS if states - states // factor > shortfall]
    if len(set(cluster.nodes)) == len(set(cluster.devices)) == 1 and request.zero_stage != 0 and not of_node:
        for num_gpus in (factor * len(cluster.nodes[0].devices) for factor in factors):
            yield f"--gpus {num_gpus}", request, with_gpus(cluster, num_gpus)
    per_sample = memory.activations + memory.logits + memory.temporary + memory.slack
    for factor in FACTORS:
        seq_len = request.seq_len // factor
        if per_sample - per_sample // factor > shortfall and seq_len >= SHORTEST_SEQUENCE:
            yield f"--seq-len {seq_len}", replace(request, seq_len=seq_len), cluster
