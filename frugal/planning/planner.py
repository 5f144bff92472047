"""From a request to a plan: a search over dry runs and arithmetic, or the proof that nothing fits."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from frugal.config.hardware import calibration, local_host
from frugal.config.hardware.cluster import Cluster
from frugal.config.optimizers import bf16_notes
from frugal.config.pins import check_pins
from frugal.config.request import Request
from frugal.errors import RequestError
from frugal.planning import length_bucketing
from frugal.planning.infeasible import nothing_fits, remedies
from frugal.planning.memory import breakdown
from frugal.planning.memory_report import beyond_the_device
from frugal.planning.plan import OnDraft, Plan
from frugal.planning.report import reasons
from frugal.planning.search import by_measurement, sharing
from frugal.planning.search.candidate import Infeasible, OpenSource, SearchResult, fastest_seconds
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.search.measured_ways import MeasuredRun
from frugal.planning.search.search import Search
from frugal.planning.what_if import offers
from frugal.units import format_bytes, plural

MAX_LISTED_GPUS = 8
"""GPUs of which a plan says one by one what other processes use."""


def decide(
    request: Request, cluster: Cluster, defaults: tuple[str, ...], dry_run: OpenSource,
    on_draft: OnDraft | None = None, measured: Sequence[MeasuredRun] = (),
) -> Plan:  # fmt: skip
    """The fastest plan that fits; `defaults` names the request's fields that nobody set.

    `measured`: what runs have measured of ways to train this model, which then counts more than what is predicted.

    Raises:
        RequestError: the request contradicts itself or its model.
        NothingFitsError: no strategy fits.
    """
    request, notes = _readable(request, cluster, defaults, dry_run)
    if request.lengths is not None:
        lengths, more = request.lengths.within(request.seq_len)
        request, notes = replace(request, lengths=lengths), notes + more
    with ExitStack() as sources:
        search = Search(request, cluster, sources.enter_context(dry_run(request, cluster)))

        def planned(request: Request, result: SearchResult) -> Plan:
            return _decided(request, cluster, defaults, result, notes)

        def drafted(search: Search) -> Callable[[SearchResult], None]:
            def tell(result: SearchResult) -> None:
                if on_draft is not None and not by_measurement.has_answers(search, result, measured):
                    on_draft(planned(search.request, result), lambda: planned(search.request, _whole(search, result)))

            return tell

        result = search.run(drafted(search))
        if isinstance(result, Infeasible):
            shared = sharing.fewest_sharing(request, cluster, result, sources, dry_run, drafted)
            if shared is None or isinstance(shared, str):
                ways = remedies(request, cluster, search, result, dry_run)
                raise nothing_fits(request, cluster, result, ways, why_not_shared=shared)
            search, result = shared
            request = search.request
        result = by_measurement.fastest(search, result, measured)
        if request.lengths is not None:
            result = _proven(search, result, dry_run)
        result = _whole(search, result)
        notes += sharing.notes(search, result)
    batch = result.chosen.batch
    if request.batch_norm == "sync" and batch is not None and any(0 in sizes for sizes in batch.sizes):
        raise RequestError(
            f"--batch-norm sync is impossible for {plural(batch.global_batch, 'sample')} in "
            f"{plural(batch.accumulation_steps, 'micro-step')} on {plural(cluster.world_size, cluster.rank_noun)}",
            because="a rank that gets no sample in a micro-step has no statistics to add",
            hint=f"use a --global-batch that is a multiple of {cluster.world_size}",
        )
    return _decided(request, cluster, defaults, result, [*notes, *offers(search, result, dry_run)])


def _whole(search: Search, result: SearchResult) -> SearchResult:
    """The result with what would be otherwise in other segments and with equal micro-batches."""
    return replace(
        result,
        warnings=(*result.warnings, *_json_alone(search, result)),
        in_other_segments=search.evaluation.in_other_segments(result.chosen),
    )


def _json_alone(search: Search, result: SearchResult) -> list[str]:
    """What whoever takes DeepSpeed's JSON without the plan would train, and what equal micro-batches would cost."""
    batch, request = result.chosen.batch, search.request
    assert batch is not None
    if batch.is_uniform:
        return []
    note = (
        f"ds_config.json alone trains {plural(batch.capacity, 'sample')} a step, not {batch.global_batch}: DeepSpeed's "
        "JSON knows no uneven micro-batches, plan.json does"
    )
    if request.global_tokens is not None:
        return [note]
    even = replace(request, even=True)
    try:
        check_pins(even, search.cluster.world_size)
    except RequestError as error:
        return [f"{note}; {error.because[0]}"]
    evaluation = StrategyEvaluation(even, search.cluster, search.source)
    evaluation.refuted |= search.evaluation.refuted
    fitting = [candidate.strategy for candidate in result.candidates if candidate.fits and not candidate.is_draft]
    slower = 100 * (fastest_seconds(map(evaluation.evaluate, fitting)) / result.chosen.seconds - 1)
    if slower == float("inf"):
        return [f"{note}; equal ones do not fit"]
    return [f"{note}; --even is exact with both, {f'{slower:.0f} % slower' if slower >= 1 else 'as fast'}"]


def _readable(
    request: Request, cluster: Cluster, defaults: tuple[str, ...], dry_run: OpenSource
) -> tuple[Request, list[str]]:
    """The request with samples that the model can read: a default length is shortened, with a note.

    Raises:
        RequestError: a length that was asked for is too long.
    """
    with dry_run(request, cluster) as source:
        facts = source.facts()
    longest, notes = facts.max_positions, list(facts.notes)
    if longest is None or request.seq_len <= longest:
        return request, notes
    if "seq_len" not in defaults:
        raise RequestError(
            f"--seq-len {request.seq_len} is longer than {request.model} can read",
            because=f"it has {longest} positions",
            hint=f"use --seq-len {longest}",
        )
    note = f"samples have {longest} tokens instead of {request.seq_len}: {request.model} has no more positions"
    return replace(request, seq_len=longest), [note, *notes]


def _proven(search: Search, result: SearchResult, dry_run: OpenSource) -> SearchResult:
    """The result with as many short samples in a micro-batch as dry runs prove to fit.

    Its memory is that of the fuller end: few samples of full length, or many of the shortest.
    """
    chosen, request = result.chosen, search.request
    assert chosen.batch is not None
    steps = max(2, chosen.batch.accumulation_steps)
    memory, shortest = result.memory, None
    for length in length_bucketing.shortest_choices(request, chosen.batch):
        loads = [
            (length_bucketing.most_samples(micro, request.seq_len, length), device)
            for device, micro in search.evaluation.fitting.loads(chosen.batch)
        ]
        with dry_run(replace(request, seq_len=length, lengths=None), search.cluster) as source:
            try:
                dry_runs = [source.dry_run(chosen.strategy, samples, steps, device) for samples, device in loads]
            except RequestError:  # the model cannot read samples that short
                continue
        if all(dry_run_memory.fits for dry_run_memory in dry_runs):
            memory = min((*dry_runs, memory), key=lambda memory: memory.headroom_bytes)
            shortest = length
            break
    batch = replace(chosen.batch, shortest=shortest)
    time = search.evaluation.time(search.source.profile(chosen.strategy, True), chosen.strategy, batch)
    return replace(result, chosen=replace(chosen, batch=batch, time=time), memory=memory)


def _decided(
    request: Request, cluster: Cluster, defaults: tuple[str, ...], result: SearchResult, notes: list[str]
) -> Plan:
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
            *_of_machines(request, cluster, result),
            *beyond_the_device(result.memory, result.memory.device_in(cluster)),
            *_notes(request, chosen.micro_batch),
            *result.warnings,
        ),
        rejected=result.rejected,
        grouping=None
        if request.lengths is None
        else length_bucketing.grouping(request.lengths, chosen.batch, request.seq_len),
    ).sealed()


def _of_machines(request: Request, cluster: Cluster, result: SearchResult) -> list[str]:
    """What other processes use, and what could not be checked because it is not known."""
    in_use = [
        f"GPU {number}{f' of node {name}' if len(cluster.nodes) > 1 else ''}: "
        f"{format_bytes(device.held_bytes)} are in use by other processes"
        for name, node in enumerate(cluster.nodes)
        for number, device in enumerate(node.devices)
        if device.held_bytes
    ]
    if len(in_use) > MAX_LISTED_GPUS:
        in_use = [*in_use[:MAX_LISTED_GPUS], f"and so are parts of {len(in_use) - MAX_LISTED_GPUS} other GPUs"]
    strategy, memory = result.chosen.strategy, result.memory
    unknown = []
    if strategy.offload_optimizer != "none" and any(node.host_memory_bytes is None for node in cluster.nodes):
        unknown.append(
            f"each host must have {format_bytes(memory.host_bytes_per_node)} of memory free; give --host-mem to have "
            "that checked"
        )
    disk_bytes = max(
        breakdown.nvme_bytes(request, strategy, result.model, node, cluster) for node in set(cluster.nodes)
    )
    if disk_bytes and any(node.host_disk_bytes is None for node in cluster.nodes):
        unknown.append(
            f"each node must have {format_bytes(disk_bytes)} of disk free; --set host-disk=SIZE has that checked"
        )
    return in_use + unknown


def _notes(request: Request, largest: int) -> list[str]:
    """What was asked for and comes out otherwise than one might expect."""
    notes = []
    if request.global_tokens is not None and request.global_batch is not None:
        notes.append(
            f"--global-tokens and --global-batch were both given: tokens win, {request.global_tokens} tokens are "
            f"{request.batch_samples} samples of {request.seq_len}"
        )
    if request.micro_batch is not None and largest < request.micro_batch:
        notes.append(
            f"--micro-batch {request.micro_batch} exceeds the largest per-GPU micro-batch of this global "
            f"batch ({largest})"
        )
    if request.optimizer_states == "bf16" and request.optimizer == "adamw":
        notes += bf16_notes(request.scaled_learning_rate, request.betas[1])
    if (rule := request.learning_rate_scaling) is not None and (note := rule.note(request.optimizer)) is not None:
        notes.append(note)
    return notes
