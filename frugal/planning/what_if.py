"""Predictions for other clusters and requests, from drafts and the allocator's replay, not dry-run, and their tables.

Cases that differ only in memory and links share one source, whose profiles depend on neither.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod
from operator import attrgetter
from textwrap import wrap
from typing import Any

from frugal.config.hardware.cluster import Cluster, resized
from frugal.config.request import Request
from frugal.errors import FrugalError, RequestError, refuse
from frugal.planning.memory.profile import VARLEN
from frugal.planning.plan import KERNELS, Plan, RunCost
from frugal.planning.report import WIDE, Table, aligned, select_texts
from frugal.planning.search.candidate import TIE, Candidate, OpenSource
from frugal.planning.search.search import Search
from frugal.planning.strategy import LAYER_MODES, MODES_NOTE, PLACES, Strategy, brief_name
from frugal.units import GIB, format_bytes, format_seconds, parse_bytes, parse_count, plural

AXES = ("gpus", "mem", "seq-len")
MOST_CASES = 200
"""The most cases of one table; each takes about a second."""

MORE_MEMORY = 4 * GIB

SHARED_BY = (2, 4, 8)
"""Ranks that may share each sample in a table."""

CHANGES_NUMBERS = "changes the numbers"
"""The mark of changes that alter what is trained."""

WHAT_BF16_LOSES = "updates below 1/256 of a weight may be lost"
"""Half the distance of two values of bf16, which has 8 significant bits. Those below 1/512 are lost for certain: up to
the next power of two a weight doubles, and the distance stays as it is."""

NOT_DRY_RUN = "predicted, not dry-run"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Another request or cluster, with its name for the user.

    `effort` of the change: 0 a setting, 1 a part of a machine more, 2 another machine or other numbers.
    """

    name: str
    request: Request
    cluster: Cluster
    effort: int = 1


def predicted(cases: Sequence[Case], dry_run: OpenSource) -> list[Candidate | None]:
    """Return the choice in each case, or the smallest shortfall; None where only a dry run could tell, or where the
    request contradicts itself."""
    groups: dict[tuple[Request, tuple[int, ...]], list[int]] = {}
    for i, case in enumerate(cases):
        groups.setdefault((case.request, tuple(len(node.devices) for node in case.cluster.nodes)), []).append(i)
    predictions: list[Candidate | None] = [None] * len(cases)
    for indices in groups.values():
        first = min((cases[i] for i in indices), key=lambda case: case.cluster.devices[0].memory_bytes)
        with dry_run(first.request, first.cluster) as source:
            for i in indices:
                with suppress(FrugalError):  # the model cannot take it, or pins contradict each other
                    predictions[i] = Search(first.request, cases[i].cluster, source).predicted()
    return predictions


def predicted_with_sharing(cases: Sequence[Case], dry_run: OpenSource) -> list[Candidate | None]:
    """Predict; where nothing fits, with as few ranks that share each sample as are needed."""
    predictions = predicted(cases, dry_run)
    for number in SHARED_BY:
        missing = [
            i
            for i, (case, candidate) in enumerate(zip(cases, predictions, strict=True))
            if case.request.sequence_parallel is None
            and case.cluster.world_size % number == 0
            and candidate is not None
            and not candidate.fits
            and candidate.may_fit_if_shared(number)
        ]
        shared = [replace(cases[i], request=replace(cases[i].request, sequence_parallel=number)) for i in missing]
        for i, candidate in zip(missing, predicted(shared, dry_run), strict=True):
            if candidate is not None and candidate.fits:
                predictions[i] = candidate
    return predictions


def with_gpus(cluster: Cluster, num_gpus: int) -> Cluster:
    """Return the cluster with `num_gpus` devices of each node's first kind."""
    ranks = num_gpus * len(cluster.nodes)
    device = cluster.nodes[0].devices[0]
    device = resized(device, memory_bytes=device.memory_bytes, num_ranks=(cluster.world_size, ranks))
    return replace(cluster, nodes=tuple(replace(node, devices=(device,) * num_gpus) for node in cluster.nodes))


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    """Return the cluster with `memory_bytes` on every device, and the context and margin that go with it.

    Raises:
        RequestError: it is less than the context.
    """
    ranks = (cluster.world_size, cluster.world_size)
    nodes = tuple(
        replace(
            node,
            devices=tuple(resized(device, memory_bytes=memory_bytes, num_ranks=ranks) for device in node.devices),
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def cheaper_states(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield optimizers that keep less of each parameter, by their flags, unless the user has chosen one.

    They change the numbers, so they are offered and never chosen automatically. What changes them least comes first:
    docs/decisions/optimizer-states.md.
    """
    if request.optimizer.states is not None:
        return
    changes = [{"name": "adamw-8bit"}] if request.optimizer.name == "adamw" else []
    for change in (*changes, {"states": "bf16"}):
        with suppress(RequestError):  # it contradicts what was asked for
            optimizer = replace(request.optimizer, **change)  # type: ignore[arg-type]  # of one field
            yield f"--optimizer {optimizer}", replace(request, optimizer=optimizer)


def what_changes(request: Request) -> str:
    """Describe what cheaper states change: `changes the numbers: updates below ... may be lost`."""
    return CHANGES_NUMBERS + (f": {WHAT_BF16_LOSES}" if request.optimizer.states == "bf16" else "")


def changes(plan: Plan) -> list[Case]:
    """Return changes that could make the step shorter: no pins, more GPUs, memory and bandwidth, cheaper states.

    With a tiled loss, which takes no longer than a plain one, no other is looked at.
    """
    request, cluster = plan.request, plan.cluster
    cases = [Case(name=name, request=free, cluster=cluster, effort=0) for name, free in without_pins(request)]
    if plan.strategy.loss == "tiled":
        request = replace(request, loss="tiled")
    num_gpus = len(cluster.nodes[0].devices)
    per_node = " in each node" if len(cluster.nodes) > 1 else ""
    if len(set(cluster.devices)) == 1:
        cases += [
            Case(
                name=plural(number, cluster.rank_noun) + per_node,
                request=request,
                cluster=with_gpus(cluster, number),
                effort=1 if number == num_gpus + 1 else 2,
            )
            for number in sorted({num_gpus + 1, 2 * num_gpus})
        ]
        memory = cluster.devices[0].memory_bytes
        more = min(MORE_MEMORY, memory)
        cases.append(
            Case(name=f"+{format_bytes(more)} each", request=request, cluster=with_memory(cluster, memory + more))
        )
    if plan.time.communication_seconds:
        twice = replace(
            cluster, intra_bandwidth=2 * cluster.intra_bandwidth, inter_bandwidth=2 * cluster.inter_bandwidth
        )
        cases.append(Case(name="links twice as fast", request=request, cluster=twice))
    cases += [
        Case(name=f"{flag} ({CHANGES_NUMBERS})", request=cheaper, cluster=cluster, effort=2)
        for flag, cheaper in cheaper_states(request)
    ]
    return cases


def shorter(plan: Plan) -> list[Case]:
    """Return the case of samples half as long under the plan's own strategy, where that is possible."""
    try:
        half = _as_planned(plan, seq_len=plan.request.seq_len // 2)
    except RequestError:
        return []
    return [Case(name=f"samples of {half.seq_len}", request=half, cluster=plan.cluster)]


def _as_planned(plan: Plan, **others: Any) -> Request:
    """Return the request under the plan's own strategy, but for `others`.

    Raises:
        RequestError: they contradict it.
    """
    strategy, request = plan.strategy, plan.request
    places = strategy.offload_optimizer, strategy.offload_parameters
    return replace(
        request,
        zero_stage=strategy.zero_stage,
        activation_checkpointing=strategy.activation_checkpointing,
        layer_modes=request.layer_modes if strategy.layer_modes else None,
        loss=strategy.loss,
        mlp=strategy.mlp,
        sequence_parallel=strategy.sequence_parallel if strategy.sequence_parallel > 1 else None,
        **({"offload": next(level for level, known in PLACES.items() if places in known)} | others),
    )


KINDS: dict[str, dict[str, Any]] = {"liger": {"kernels": "plain"}, f"{VARLEN} attention": {"document_tokens": 0}}
"""Kinds of fused kernels in the words of `Plan.kernels`, and the settings that leave them out: torch's, or masks."""


def kernels_bring(plan: Plan, kinds: Sequence[str], dry_run: OpenSource) -> str:
    """Return what some kinds of a plan's fused kernels bring: `liger: 23 % less time, 8.10 GiB less (predicted)`.

    Beside the plan's own strategy without them: bytes with the same micro-batch, seconds with the best that fits.
    """
    without = {name: value for kind in kinds for name, value in KINDS[kind].items()}
    pins = {"micro_batch": plan.batch.largest_micro_batch, "accumulation_steps": None}
    requests = (_as_planned(plan, **pins), _as_planned(plan, **pins, **without), _as_planned(plan, **without))
    cases = [Case(name="", request=request, cluster=plan.cluster) for request in requests]
    own, same, best = predicted(cases, dry_run)
    names = ", ".join(kinds)
    if own is None or same is None or best is None or own.memory is None or same.memory is None:
        return names  # only dry runs would tell
    if not best.fits:
        lacking = f"({format_bytes(-(best.headroom_bytes or 0))} short, predicted)"
        return f"{names}: without, micro-batch {best.micro_batch} does not fit {lacking}"
    less, less_bytes = 1 - plan.time.total_seconds / best.seconds, same.memory.total_bytes - own.memory.total_bytes
    time, memory = (("less" if each >= 0 else "more") for each in (less, less_bytes))
    return f"{names}: {100 * abs(less):.0f} % {time} time, {format_bytes(abs(less_bytes))} {memory} (predicted)"


def with_gain(plan: Plan, dry_run: OpenSource) -> Plan:
    """Return a plan that has fused kernels with what they bring."""
    gain = kernels_bring(plan, [kind for kind in KINDS if kind in plan.kernels], dry_run)
    return replace(
        plan, why=tuple(each.replace(f"{KERNELS} {plan.kernels}", f"{KERNELS} {gain}") for each in plan.why)
    ).sealed()


PINS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--activation-checkpointing auto", {"layer_modes": None}),
    ("no --max-tokens-per-gpu", {"max_tokens_per_gpu": None}),
    ("no --micro-batch", {"micro_batch": None}),
    ("no --accumulation-steps", {"accumulation_steps": None}),
    ("no --zero-stage", {"zero_stage": None}),
    ("no --micro-batch and no --accumulation-steps", {"micro_batch": None, "accumulation_steps": None}),
    ("--activation-checkpointing auto", {"activation_checkpointing": "auto"}),
    ("--loss auto", {"loss": "auto"}),
    ("--mlp auto", {"mlp": "auto"}),
    ("--kernels auto", {"kernels": "auto"}),
    ("--offload auto", {"offload": "auto"}),
)
"""Flags that free a request of a pin, and the fields that they free. Two that decide each other are freed together,
too."""


def without_pins(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield the request without one of its pins, and what that asks of the user: `no --zero-stage`."""
    for flag, free in PINS:
        if all(getattr(request, field) != value for field, value in free.items()):
            ratio = None if "offload" in free else request.offload_ratio
            yield flag, replace(request, offload_ratio=ratio, **free)


def parse_axes(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse `gpus=1,2,4 mem=12G,24G seq-len=512,1024`; memory in bytes.

    Raises:
        RequestError: an unknown axis, or no such number.
    """
    hint = "write --what-if gpus=1,2,4 mem=12G,24G seq-len=512,1024, or a part of it"
    axes: dict[str, tuple[int, ...]] = {}
    for word in words:
        name, _, values = word.partition("=")
        refuse((name not in AXES or not values, f"`{word}` is no axis of a table", "", hint))
        parts = values.split(",")
        thousand = 1024 if name == "seq-len" else 1000
        axes[name] = tuple(parse_bytes(part) if name == "mem" else parse_count(part, thousand) for part in parts)
        refuse((min(axes[name]) < 1, f"`{word}` has a value below 1", "", hint))
    return axes


def axes_around(plan: Plan, longest: int | None) -> dict[str, tuple[int, ...]]:
    """Return half, the same and twice of each axis of the plan; samples no longer than the model reads."""
    num_gpus = len(plan.cluster.nodes[0].devices)
    memory, seq_len = plan.cluster.devices[0].memory_bytes, plan.request.seq_len
    lengths = (length for length in (seq_len // 2, seq_len, 2 * seq_len) if longest is None or length <= longest)
    return {
        "gpus": tuple(sorted({max(1, num_gpus // 2), num_gpus, 2 * num_gpus})),
        "mem": (memory // 2, memory, 2 * memory),
        "seq-len": tuple(lengths),
    }


def grid(plan: Plan, axes: Mapping[str, Sequence[int]]) -> "dict[GridCase, Case]":
    """Return the cases of a table by GPUs, memory and length, without those that no request can express.

    Raises:
        RequestError: the table is too large, or the devices differ.
    """
    num_kinds, nodes = len(set(plan.cluster.devices)), plan.cluster.nodes
    num_cases = prod(len(axes[name]) for name in AXES)
    refuse(
        (
            num_kinds > 1 or len({len(node.devices) for node in nodes}) > 1,
            "a table needs a cluster of equal devices",
            "it counts them, and gives them all the same memory",
            "name one kind: --gpus 4 --mem 12G",
        ),
        (
            num_cases > MOST_CASES,
            f"a table of {num_cases} cases takes too long",
            f"{MOST_CASES} are minutes",
            "name fewer values",
        ),
    )
    cases = {}
    for seq_len, num_gpus, memory in product(axes["seq-len"], axes["gpus"], axes["mem"]):
        with suppress(RequestError):
            cluster = with_memory(with_gpus(plan.cluster, num_gpus), memory)
            request = replace(plan.request, seq_len=seq_len, sequence_parallel=None)
            cases[num_gpus, memory, seq_len] = Case(name="", request=request, cluster=cluster)
    return cases


_LETTERS = {
    "a": "activation checkpointing full",
    "s": "activation checkpointing selective",
    "h": "activation checkpointing offloaded",
    "b": "activation checkpointing of some layers",
    "u": "samples shared by GPUs",
    "t": "tiled loss",
    "m": "tiled MLP",
    "o": "optimizer in host memory",
    "p": "parameters in host memory",
    "n": "optimizer on NVMe",
    "q": "parameters on NVMe",
}


def improvements(plan: Plan, cases: Sequence[Case], predictions: Sequence[Candidate | None]) -> Table:
    """Return one row a change with its gain; for samples of another length the gain is per token."""
    before = plan.time.total_seconds / plan.request.seq_len
    rows = []
    for case, candidate in zip(cases, predictions, strict=True):
        name = case.name.replace(f" ({CHANGES_NUMBERS})", " !")
        if candidate is None:
            rows.append((name, "", "", "", "only a dry run could tell"))
        elif not candidate.fits or candidate.batch is None:
            rows.append((name, "-", "", "", f"does not fit, {format_bytes(-(candidate.headroom_bytes or 0))} short"))
        else:
            change = 100 * (candidate.seconds / case.request.seq_len / before - 1)
            a_token = " a token" if case.request.seq_len != plan.request.seq_len else ""
            batch = f"{candidate.batch.largest_micro_batch} x {candidate.batch.accumulation_steps}"
            gain = f"{change:+.0f} %{a_token}" if abs(change) > 100 * (TIE - 1) else "no gain"
            strategy = "same strategy" if candidate.strategy == plan.strategy else brief_name(candidate.strategy)
            rows.append((name, format_seconds(candidate.seconds), gain, batch, strategy))
    has_modes = any(mode in row[-1] for row in rows for mode in LAYER_MODES[:-1])
    is_changing = any(row[0].endswith(" !") for row in rows)
    note = "; ".join(select_texts((is_changing, f"! {CHANGES_NUMBERS}"), (has_modes, MODES_NOTE)))
    return Table(title=f"what would help ({NOT_DRY_RUN})", rows=tuple(rows), note=note, width=WIDE)


NOTHING_HELPS = "nothing that was tried: settings, more devices and memory, faster links"


def most_helpful(plan: Plan, cases: Sequence[Case], predictions: Sequence[Candidate | None]) -> str:
    """Return the change that shortens the step most, of those with least effort: `5 GPUs: a step of 2.9 s, 16 % less`.

    Empty where only dry runs could tell.
    """
    if not any(predictions):
        return ""
    gains = [
        (case.effort, candidate.seconds, case.name)
        for case, candidate in zip(cases, predictions, strict=True)
        if candidate is not None and candidate.fits and candidate.seconds * TIE < plan.time.total_seconds
    ]
    if not gains:
        return NOTHING_HELPS
    _, seconds, name = min(gains)
    less = 100 * (1 - seconds / plan.time.total_seconds)
    return f"{name}: a step of {format_seconds(seconds)}, {less:.0f} % less (predicted)"


def what_helps_most(plan: Plan, dry_run: OpenSource) -> str:
    """Return `most_helpful` of all changes; none that takes more effort than one that helps is predicted."""
    cases: list[Case] = []
    predictions: list[Candidate | None] = []
    helps = ""
    for _, of_effort in groupby(sorted(changes(plan), key=attrgetter("effort")), key=attrgetter("effort")):
        cases += of_effort
        predictions += predicted(cases[len(predictions) :], dry_run)
        helps = most_helpful(plan, cases, predictions)
        if helps not in ("", NOTHING_HELPS):
            break
    return helps


GridCase = tuple[int, int, int]
"""GPUs of a node, bytes of a device, and tokens of a sample."""

Predictions = Mapping[GridCase, Candidate | None]


def what_if_table(
    plan: Plan, axes: Mapping[str, Sequence[int]], predictions: Predictions, run: RunCost | None = None
) -> list[str]:
    """Return a table a sample length, memory by GPUs: seconds a step, tokens/s of a GPU, and the strategy's letters.

    With a `run` each entry also has its time, and its cost where a price is known.
    """
    tokens = plan.batch.global_tokens
    batch = f"{plan.batch.global_batch} samples" if tokens is None else f"{tokens:,} {plan.counted}"
    lines = [f"what if: a step of {batch} ({NOT_DRY_RUN})"]
    for seq_len in axes["seq-len"]:
        rows = what_if_rows(plan, axes, predictions, seq_len, run)
        lines += ["", f"samples of {seq_len} tokens", *aligned([(*row, "") for row in rows])]
    return [*lines, "", *wrap(what_if_legend(predictions, run), WIDE, initial_indent="  ", subsequent_indent="  ")]


def what_if_rows(
    plan: Plan, axes: Mapping[str, Sequence[int]], predictions: Predictions, seq_len: int, run: RunCost | None = None
) -> list[tuple[str, ...]]:
    """Return the rows of one sample length; the first names the columns."""
    per_node = " a node" if len(plan.cluster.nodes) > 1 else ""
    rows = [("", *(plural(number, plan.cluster.rank_noun) + per_node for number in axes["gpus"]))]
    for memory in axes["mem"]:
        points = [(num_gpus, memory, seq_len) for num_gpus in axes["gpus"]]
        entries = [_entry(plan, point, predictions[point], run) if point in predictions else "-" for point in points]
        rows.append((format_bytes(memory), *entries))
    return rows


def what_if_legend(predictions: Predictions, run: RunCost | None = None) -> str:
    """Explain the entries of the table."""
    used = {letter for each in predictions.values() if each is not None for letter in _letters(each.strategy)}
    legend = select_texts(
        (True, "seconds a step, tokens/s of each device, Z ZeRO stage"),
        *((letter in used, f"{letter} {meaning}") for letter, meaning in _LETTERS.items()),
        (run is not None, "after a comma the time of the run"),
    )
    return "; ".join(legend)


def _entry(plan: Plan, point: GridCase, candidate: Candidate | None, run: RunCost | None) -> str:
    if candidate is None:
        return "?"
    if not candidate.fits:
        return f"- {format_bytes(-(candidate.headroom_bytes or 0))} short"
    num_gpus, _, seq_len = point
    world_size = num_gpus * len(plan.cluster.nodes)
    tokens = (
        replace(plan.request, seq_len=seq_len).batch_samples * seq_len if plan.grouping is None else plan.step_tokens
    )
    rate = tokens / candidate.seconds / world_size
    words = f"{rate / 1000:.1f}k/s" if rate >= 1000 else f"{rate:.0f}/s"
    strategy = f"Z{candidate.strategy.zero_stage}{_letters(candidate.strategy)}"
    of_run = []
    if run is not None:
        of_run = replace(run, step_seconds=candidate.seconds, step_tokens=tokens, num_devices=world_size).in_brief
    return ", ".join([f"{format_seconds(candidate.seconds)} {words} {strategy}", *of_run])


def _letters(strategy: Strategy) -> str:
    return (
        {"off": "", "full": "a", "selective": "s", "offloaded": "h", "budget": "b"}[strategy.activation_checkpointing]
        + ("u" if strategy.sequence_parallel > 1 else "")
        + {"plain": "", "tiled": "t"}[strategy.loss]
        + {"plain": "", "tiled": "m"}[strategy.mlp]
        + {"none": "", "cpu": "o", "nvme": "n"}[strategy.offload_optimizer]
        + {"none": "", "cpu": "p", "nvme": "q"}[strategy.offload_parameters]
    )
