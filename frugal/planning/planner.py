"""From a request to a plan: a search over dry runs and arithmetic, or the proof that nothing fits."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

from frugal.config.hardware import calibration, local_host
from frugal.config.hardware.cluster import Cluster
from frugal.config.optimizers import bf16_notes
from frugal.config.pins import check_pins
from frugal.config.request import Request
from frugal.errors import RequestError, refuse
from frugal.planning import length_bucketing
from frugal.planning.batch import BatchPlan
from frugal.planning.memory.breakdown import MemoryBreakdown, nvme_bytes
from frugal.planning.plan import UNPROVEN, Plan
from frugal.planning.report import beyond_the_device, select_texts
from frugal.planning.search.candidate import Infeasible, OpenSource, SearchResult
from frugal.planning.search.search import Search
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import with_gain
from frugal.planning.why import fits, largest_micro_batch, nothing_fits, pins_to_drop, reasons, remedies
from frugal.units import format_bytes, plural

MOST_SHARING = 64
"""Ranks that share a sample at most where nobody asked: a model rarely has more attention heads that could be split."""

MAX_LISTED_GPUS = 8
"""GPUs whose memory used by other processes is listed one by one."""


def decide(request: Request, cluster: Cluster, defaults: tuple[str, ...], dry_run: OpenSource) -> Iterator[Plan]:
    """Yield the plan before each dry run, as a draft (`Plan.is_draft`), and last the fastest plan that is proven.

    `defaults` names the request's fields that the user did not set.

    Raises:
        RequestError: the request contradicts itself or its model.
        NothingFitsError: no strategy fits.
    """
    request, notes = _readable(request, cluster, defaults, dry_run)
    if request.lengths is not None:
        lengths, more = request.lengths.within(request.seq_len)
        request, notes = replace(request, lengths=lengths), notes + more
    with ExitStack() as sources:
        for search, result in _results(request, cluster, sources, dry_run):
            if not result.is_proven:
                yield _plan(search, result, defaults, [UNPROVEN, *notes])
        if request.lengths is not None:
            result = _with_short_samples(search, result, dry_run)
        plan = _plan(search, result, defaults, [*notes, *_offload_by_pins(search, result)])
        yield with_gain(plan, dry_run) if plan.kernels else plan


def _offload_by_pins(search: Search, result: SearchResult) -> list[str]:
    """Return a note if the GPUs alone would do without one of the pins, and nobody asked for offloading."""
    request, strategy = search.request, result.chosen.strategy
    if strategy.offload_optimizer == "none" or request.offload != "auto":
        return []
    on_gpus = replace(request, offload="none")
    flags = [flag for flag in pins_to_drop(on_gpus, search.cluster, search.source, strategy) if "offload" not in flag]
    if not flags:
        return []
    return [f"offloads because of what is pinned; on the GPUs alone it fits with {' or '.join(flags)}"]


Results = Generator[tuple[Search, SearchResult], None, Infeasible | None]
"""Drafts and last the proven result, each with its search; or the returned proof that nothing fits."""


def _results(request: Request, cluster: Cluster, sources: ExitStack, dry_run: OpenSource) -> Results:
    """Search, first with each sample on one rank, then with as few ranks that share each sample as are needed.

    Those pay with all-to-alls in every layer, and leave fewer samples for each other, so they are tried only where not
    one sample fits into a device and splitting what depends on it could help.
    Where it would fit without a pin, ranks do not share samples unasked: the proof that nothing fits says how many
    would have to.

    Raises:
        NothingFitsError: neither way fits.
    """
    search = Search(request, cluster, sources.enter_context(dry_run(request, cluster)))
    alone = yield from _run(search)
    if alone is None:
        return None
    ways, why_not_shared, most = pins_to_drop(request, cluster, search.source, alone.nearest.strategy), None, None
    is_pinned = bool(ways)
    if "no --micro-batch" in ways and (most := largest_micro_batch(search)):
        ways = [f"--micro-batch {most}" if way == "no --micro-batch" else way for way in ways]
    may_share = request.sequence_parallel is None and len(cluster.kinds) == 1
    for number in range(2, min(cluster.world_size, MOST_SHARING, request.seq_len) + 1 if may_share else 0):
        if cluster.world_size % number or not any(each.may_fit_if_shared(number) for each in alone.nearest_first):
            continue
        shared = replace(request, sequence_parallel=number)
        try:
            source = sources.enter_context(dry_run(shared, cluster))
            source.facts()  # tries a small model of this kind
            if is_pinned:
                if fits(shared, cluster, source, alone.nearest.strategy):
                    ways.append(f"--sequence-parallel {number}")
                    break
            elif (yield from _run(Search(shared, cluster, source), _why_shared(shared, cluster, alone))) is None:
                return None
        except RequestError as error:
            why_not_shared = f"ranks cannot share samples: {(*error.because, error.what)[0]}"
            break
    ways = remedies(search, alone, dry_run, ways)
    raise nothing_fits(search, alone, ways, why_not_shared=why_not_shared, most=most)


def _why_shared(request: Request, cluster: Cluster, alone: Infeasible) -> str:
    """Return the sentence of `Plan.why`: what would be lacking if each sample were on one rank."""
    assert request.sequence_parallel is not None
    nearest = alone.nearest
    where = {"host": "in a node's host memory", "disk": "on a node's disk", "device": f"on one {cluster.rank_noun}"}
    return (
        f"each sample is shared by {plural(request.sequence_parallel, cluster.rank_noun)}, a part of its tokens each: "
        f"{plural(nearest.micro_batch, 'sample')} of {request.seq_len} tokens lacks "
        f"{format_bytes(-(nearest.headroom_bytes or 0))} {where[nearest.scarce]} otherwise"
    )


def _run(search: Search, shared_because: str = "") -> Results:
    for result in search.run():
        if isinstance(result, Infeasible):
            return result
        yield search, replace(result, shared_because=shared_because)
    return None


def _batch_notes(request: Request, cluster: Cluster, result: SearchResult) -> Iterator[str]:
    """Yield warnings: ranks without a sample; ds_config.json alone trains a different batch than the plan."""
    batch = result.chosen.batch
    assert batch is not None
    if batch.is_uniform:
        return
    if batch.global_batch * batch.sequence_parallel < batch.world_size:
        ranks = plural(batch.world_size, cluster.rank_noun)
        yield f"{plural(batch.global_batch, 'sample')} on {ranks}: some have none"
    note = (
        f"ds_config.json alone would train {plural(batch.capacity, 'sample')} per step, not {batch.global_batch}: "
        "DeepSpeed cannot express uneven micro-batches; use plan.json"
    )
    with suppress(RequestError):  # no equal ones are possible
        check_pins(replace(request, even=True), cluster.world_size)
        note += ", or `frugal export`, which plans equal ones"
    yield note


def _readable(
    request: Request, cluster: Cluster, defaults: tuple[str, ...], dry_run: OpenSource
) -> tuple[Request, list[str]]:
    """Return the request with samples that the model can read: a default length is shortened, with a note.

    Raises:
        RequestError: a length that was asked for is too long.
    """
    with dry_run(request, cluster) as source:
        facts = source.facts()
    longest, notes = facts.max_positions, list(facts.notes)
    if "seq_len" in defaults and request.seq_len < Request.seq_len:  # `frugal.data.corpus.lengths_of`
        notes.append(
            f"samples have at most {request.seq_len} tokens instead of {Request.seq_len}, because the longest of the "
            f"data is no longer; --seq-len {Request.seq_len} plans for the default"
        )
    if longest is None or request.seq_len <= longest:
        return request, notes
    refuse(
        (
            "seq_len" not in defaults,
            f"--seq-len {request.seq_len} is longer than {request.model} can read",
            f"it has {longest} positions",
            f"use --seq-len {longest}",
        )
    )
    note = f"samples have {longest} tokens instead of {request.seq_len}: {request.model} has no more positions"
    return replace(request, seq_len=longest), [note, *notes]


def _with_short_samples(search: Search, result: SearchResult, dry_run: OpenSource) -> SearchResult:
    """Return the result with as many short samples in a micro-batch as dry runs prove to fit.

    Its memory is that of the fuller end: few samples of full length, or many of the shortest.
    """
    chosen, request = result.chosen, search.request
    assert chosen.batch is not None
    for shortest in (*length_bucketing.shortest_choices(request, chosen.batch), None):
        batch, memory = replace(chosen.batch, shortest=shortest), result.memory
        if shortest is not None:
            try:
                of_shortest = search.evaluation.dry_run_of_shortest(chosen.strategy, batch, dry_run)
            except RequestError:  # the model cannot read samples that short
                continue
            memory = min(memory, of_shortest, key=lambda memory: memory.headroom_bytes)
        if memory.fits:
            memory = _with_lengths(search, chosen.strategy, batch, memory)
            if not memory.may_exceed_with_lengths:
                break
    time = search.evaluation.time(search.source.profile(chosen.strategy, True).costs, chosen.strategy, batch)
    return replace(result, chosen=replace(chosen, batch=batch, time=time), memory=memory)


def _with_lengths(search: Search, strategy: Strategy, batch: BatchPlan, memory: MemoryBreakdown) -> MemoryBreakdown:
    """Return the memory of a batch on the data, given that of equal micro-steps of full length; the same where
    arithmetic tells nothing.

    A caching allocator keeps segments that fitted one micro-step and are too small for the next. Where segments are not
    expandable, it reserves up to twice as much as for equal micro-steps while the card has room, and needs some per
    cent more where it has none: blocks that live on split what could be given back. So short runs are drawn from the
    data and replayed, through a simulated optimizer and the allocator.
    """
    request, device = search.request, memory.device_in(search.cluster)
    if request.lengths is None or device.kind == "cpu":
        return memory
    runs = length_bucketing.drawn_runs(request.lengths, batch, request.seq_len)
    micro_batch = next(micro for kind, micro in search.evaluation.fitting.loads(batch) if kind == device)
    more = search.source.of_lengths(strategy, micro_batch, runs, device)
    return memory if more is None else memory.with_lengths(*more, device.usable_bytes + device.margin_bytes)


def _plan(search: Search, result: SearchResult, defaults: tuple[str, ...], notes: list[str]) -> Plan:
    request, cluster = search.request, search.cluster
    chosen = result.chosen
    assert chosen.batch is not None and chosen.time is not None
    return Plan(
        frugal_version=local_host.versions()["frugal"],
        versions=local_host.library_versions(),
        request=request,
        defaults=defaults,
        model=result.model,
        cluster=cluster,
        strategy=chosen.strategy,
        batch=chosen.batch,
        memory=result.memory,
        time=chosen.time,
        why=tuple(filter(None, reasons(request, cluster, result))),
        warnings=(
            *notes,
            *calibration.notes(cluster),
            *_machine_notes(request, cluster, result),
            *beyond_the_device(result.memory, result.memory.device_in(cluster)),
            *_request_notes(request, chosen.micro_batch),
            *result.warnings,
            *_batch_notes(request, cluster, result),
        ),
        rejected=result.rejected,
        grouping=None
        if request.lengths is None
        else length_bucketing.grouping(request.lengths, chosen.batch, request.seq_len),
    ).sealed()


def _machine_notes(request: Request, cluster: Cluster, result: SearchResult) -> Iterator[str]:
    """Yield the memory used by other processes, and what could not be checked because it is unknown."""
    in_use = [
        f"GPU {number}{f' of node {name}' if len(cluster.nodes) > 1 else ''}: "
        f"{format_bytes(device.held_bytes)} are in use by other processes"
        for name, node in enumerate(cluster.nodes)
        for number, device in enumerate(node.devices)
        if device.held_bytes
    ]
    yield from in_use[:MAX_LISTED_GPUS]
    strategy, others = result.chosen.strategy, len(in_use) - MAX_LISTED_GPUS
    disk_bytes = max(nvme_bytes(request, strategy, result.model, node, cluster) for node in set(cluster.nodes))
    on_host, on_disk = format_bytes(result.memory.host_bytes_per_node), format_bytes(disk_bytes)
    yield from select_texts(
        (others > 0, f"and so are parts of {others} other GPUs"),
        (
            strategy.offload_optimizer != "none" and any(node.host_memory_bytes is None for node in cluster.nodes),
            f"each host must have {on_host} of memory free; give --host-mem to have that checked",
        ),
        (
            disk_bytes and any(node.host_disk_bytes is None for node in cluster.nodes),
            f"each node must have {on_disk} of disk free; `# disk=SIZE` in a hostfile has that checked",
        ),
    )


def _request_notes(request: Request, largest: int) -> Iterator[str]:
    """Yield settings with effects that a user might not expect."""
    yield from select_texts(
        (
            request.global_tokens is not None and request.global_batch is not None,
            f"--global-tokens and --global-batch were both given: tokens win, {request.global_tokens} tokens are "
            f"{request.batch_samples} samples of {request.seq_len}",
        ),
        (
            request.micro_batch is not None and largest < request.micro_batch,
            f"--micro-batch {request.micro_batch} comes to {largest}: the global batch is spread evenly over its "
            "micro-steps",
        ),
    )
    if request.optimizer.states == "bf16" and request.optimizer.name == "adamw":
        yield from bf16_notes(request.scaled_learning_rate, request.optimizer.betas[1])
    if (note := request.learning_rate_note) is not None:
        yield note
