"""A plan as people read it: plain text, the same in a terminal, a pipe and a log.

The strategies that were weighed, as a table: what each would take, and why it was not taken.

Why a plan is what it is, and what would change it, as people read it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from frugal.config.cluster import Node
from frugal.config.request import Request
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.plan import Plan, Rejected, StepTime
from frugal.planning.search.candidate import TIE, Candidate
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import Case
from frugal.units import format_bytes, format_count, format_seconds

SHOWN_REJECTED = 7
SHOWN_BYTES = 1 << 16


def report(plan: Plan) -> str:
    """Everything a plan says, as text."""
    blocks = [
        [arithmetic(plan), *_uneven(plan)],
        [*_facts(plan), *_data(plan)],
        _memory(plan),
        _list("why", plan.why),
        _list("note", plan.warnings),
        strategy_table(plan, shown=SHOWN_REJECTED) if plan.rejected else [],
        _list("defaults", [", ".join(_default(plan, name) for name in plan.defaults)] if plan.defaults else []),
        _list("assumed", _assumptions(plan)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def arithmetic(plan: Plan) -> str:
    """The global batch in one line."""
    batch = plan.batch
    tokens = f" ({batch.global_tokens} {plan.counted})" if batch.global_tokens is not None else ""
    total = f"{_samples(batch.global_batch)}{tokens}"
    gpus = _devices(plan, batch.world_size)
    steps = f"{batch.accumulation_steps} accumulation step{_s(batch.accumulation_steps)}"
    if batch.is_uniform:
        return f"{total} = {gpus} x micro-batch {batch.largest_micro_batch} x {steps}"
    return f"{total} = {gpus} x {batch.accumulation_steps} micro-step{_s(batch.accumulation_steps)} of {_sizes(plan)}"


def _sizes(plan: Plan) -> str:
    """What a micro-batch holds: `7 or 8 samples`, or per group of ranks where their micro-batches differ."""
    batch = plan.batch
    texts = []
    for group, num_ranks in enumerate(batch.groups.values()):
        sizes = {
            size
            for steps in batch.micro_steps
            for size in (steps.samples[group] // num_ranks, -(-steps.samples[group] // num_ranks))
        }
        texts.append((_range(sorted(sizes)), f"on {num_ranks} rank{_s(num_ranks)}"))
    return texts[0][0] if len(texts) == 1 else ", ".join(map(" ".join, texts))


def _range(sizes: list[int]) -> str:
    if len(sizes) <= 2:
        return f"{' or '.join(map(str, sizes))} sample{_s(sizes[-1])}"
    return f"{sizes[0]} to {sizes[-1]} samples"


def _uneven(plan: Plan) -> list[str]:
    """What DeepSpeed's JSON cannot say."""
    batch = plan.batch
    if batch.is_uniform:
        return []
    return [
        f"ds_config.json says train_batch_size {batch.capacity}, the capacity of its micro-batches: DeepSpeed's JSON "
        f"cannot express uneven ones; plan.json does, and frugal trains exactly {_samples(batch.global_batch)}"
    ]


def _facts(plan: Plan) -> list[str]:
    request, model = plan.request, plan.model
    parameters = format_count(model.parameters)
    if model.trainable_parameters != model.parameters:
        parameters += f" ({format_count(model.trainable_parameters)} trainable)"
    clipping = f", gradient norm at most {request.gradient_clipping:g}" if request.gradient_clipping else ""
    rate = request.learning_rate_scaling or f"{request.learning_rate:g}"
    time = plan.time
    parts = [
        (time.compute_seconds, "compute"),
        (time.recompute_seconds, "recompute"),
        (time.communication_seconds, "communication"),
        (time.offload_seconds, "offload"),
        (time.optimizer_seconds, "optimizer"),
    ]
    shares = ", ".join(f"{name} {format_seconds(seconds)}" for seconds, name in parts if seconds)
    rows = [
        (
            "model",
            f"{request.model}, {model.task}, {parameters} parameters, samples of {request.seq_len} tokens"
            + ", packed with documents" * bool(request.pack),
        ),
        ("cluster", _cluster(plan)),
        ("strategy", f"{plan.strategy}"),
        ("numbers", f"{request.precision}, gradients summed in {plan.strategy.gradient_accumulation_dtype}"),
        ("optimizer", f"{_optimizer(request)}, learning rate {rate}{clipping}"),
        ("step", f"{format_seconds(time.total_seconds)} estimated: {shares}"),
    ]
    return [f"{name:<10} {text}" for name, text in rows]


def _data(plan: Plan) -> list[str]:
    """What the plan knows of the data, and what it makes of it."""
    found, batch = plan.grouping, plan.batch
    if found is None:
        return []
    source = f" ({found.source})" if found.source else ""
    largest = max(batch.micro_batch) * plan.request.seq_len // (batch.shortest or plan.request.seq_len)
    rows = [
        (
            "data",
            f"{found.num_samples:,} samples{source}, {format_count(found.num_tokens)} tokens: half have up to "
            f"{found.median}, 99 % up to {found.percentile_99}, the longest has {found.longest}",
        ),
        (
            "typical",
            f"{_samples(found.step_samples)} are {found.step_tokens:,} tokens in {found.micro_steps} "
            f"micro-step{_s(found.micro_steps)}, with up to {_samples(largest)} in one micro-batch",
        ),
        (
            "padding",
            f"{100 * found.padding:.0f} % of the tokens; micro-batches of {_samples(max(batch.micro_batch))} in random "
            f"order would have {100 * found.fixed_padding:.0f} %",
        ),
    ]
    return [f"{name:<10} {text}" for name, text in rows]


def _optimizer(request: Request) -> str:
    momentum = f" with momentum {request.momentum:g}" if request.momentum else ""
    asked = f" ({request.optimizer_implementation})" if request.optimizer_implementation else ""
    return f"{request.optimizer}{asked}{momentum}"


def _cluster(plan: Plan) -> str:
    kinds = Counter(map(_node, plan.cluster.nodes))
    if len(plan.cluster.nodes) == 1:
        return next(iter(kinds))
    return " + ".join(f"{count} node{_s(count)} of {node}" for node, count in kinds.items())


def _node(node: Node) -> str:
    devices = Counter((device.name, device.memory_bytes) for device in node.devices)
    return " and ".join(f"{count} x {name} with {format_bytes(memory)}" for (name, memory), count in devices.items())


def _memory(plan: Plan) -> list[str]:
    """The breakdown of the fullest device, ending at the card's memory."""
    memory = plan.memory
    device = min(
        (d for d in plan.cluster.devices if d.usable_bytes == memory.usable_bytes),
        key=lambda d: d.memory_bytes,
        default=plan.cluster.devices[0],
    )
    rows = [(name, getattr(memory, name), "") for name in memory.CATEGORIES if getattr(memory, name) >= SHOWN_BYTES]
    width = max(len(name) for name in (*memory.CATEGORIES, "total"))
    lines = [
        f"memory of {'the fullest' if len(set(plan.batch.micro_batch)) > 1 else 'each'} "
        f"{'GPU' if device.kind == 'cuda' else 'rank'} at its peak, in {_peak(memory)}"
    ]
    for name, size, _ in rows:
        lines.append(f"  {name:<{width}} {format_bytes(size):>12}")
    lines.append(f"  {'total':<{width}} {format_bytes(memory.total_bytes):>12}")
    lines.append(f"  {'headroom':<{width}} {format_bytes(memory.headroom_bytes):>12}")
    if device.margin_bytes:
        lines.append(f"  {'margin':<{width}} {format_bytes(device.margin_bytes):>12}")
    if device.held_bytes:
        lines.append(f"  {'others':<{width}} {format_bytes(device.held_bytes):>12}")
    lines.append(f"  {'device':<{width}} {format_bytes(device.memory_bytes):>12}")
    if plan.strategy.offload_optimizer != "none":
        lines.append(f"  {'host, a node':<{width}} {format_bytes(memory.host_bytes_per_node):>12}")
    return lines


def _peak(memory: MemoryBreakdown) -> str:
    operator = memory.operator.removeprefix("aten.").removesuffix(".default")
    return f"{memory.phase} ({operator})" if operator else memory.phase


def _default(plan: Plan, name: str) -> str:
    value = plan.batch.global_batch if name == "global_batch" else getattr(plan.request, name)
    return f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"


def _assumptions(plan: Plan) -> list[str]:
    """What no dry run can know."""
    device = plan.cluster.devices[0]
    if device.measured_on is not None:
        return [f"margin {format_bytes(device.margin_bytes)} (fragmentation)"] if device.kind == "cuda" else []
    lines = []
    if device.kind == "cuda":
        lines.append(
            f"context {format_bytes(device.context_bytes)} (driver, kernels, libraries, NCCL) and margin "
            f"{format_bytes(device.margin_bytes)} (fragmentation); not measured on your card"
        )
    speed = f"{device.matrix_flops / 1e12:.3g} TFLOP/s reached, {device.memory_bandwidth / 1e9:.0f} GB/s of memory"
    links = f"{plan.cluster.intra_bandwidth / 1e9:.0f} GB/s between {'GPUs' if device.kind == 'cuda' else 'ranks'}"
    if len(plan.cluster.nodes) > 1:
        links += f", {plan.cluster.inter_bandwidth / 1e9:.0f} GB/s between nodes"
    lines.append(f"{device.name}: {speed}, {links}; only the seconds depend on it")
    return lines


def _devices(plan: Plan, number: int) -> str:
    kind = "GPU" if plan.cluster.devices[0].kind == "cuda" else "rank"
    return f"{number} {kind}{_s(number)}"


def _samples(number: int) -> str:
    return f"{number} sample{_s(number)}"


def _s(number: int) -> str:
    return "" if number == 1 else "s"


def _list(title: str, lines: object) -> list[str]:
    texts = list(lines) if isinstance(lines, list | tuple) else []
    return [title, *(f"  {text}" for text in texts)] if texts else []


HEAD = ("step", "", "batch", "peak", "headroom", "")


def strategy_table(plan: Plan, *, shown: int | None = None) -> list[str]:
    """The chosen strategy, then the others, fastest first; at most `shown` of these.

    A batch is micro-batch x accumulation steps.
    """
    rejected = plan.rejected if shown is None else plan.rejected[:shown]
    lines = aligned([HEAD, _chosen(plan), *(_row(plan, each) for each in rejected)])
    rest = len(plan.rejected) - len(rejected)
    notes = ["> at least, < at most: known without a closer look"] if any(each.is_bound for each in rejected) else []
    notes += [f"{rest} more: `frugal explain`"] if rest else []
    return ["strategies", *lines, *(["  " + "; ".join(notes)] if notes else [])]


def short_name(strategy: Strategy) -> str:
    """A strategy without what it does not do."""
    plain = strategy.activation_checkpointing == "off"
    return str(strategy).replace(", activation checkpointing off", "") if plain else str(strategy)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, indented; all columns but the last aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def _chosen(plan: Plan) -> tuple[str, ...]:
    batch, memory = plan.batch, plan.memory
    return (
        format_seconds(plan.time.total_seconds),
        "1.00x",
        f"{batch.largest_micro_batch} x {batch.accumulation_steps}",
        format_bytes(memory.total_bytes),
        format_bytes(memory.headroom_bytes),
        f"{short_name(plan.strategy)}: chosen",
    )


def _row(plan: Plan, rejected: Rejected) -> tuple[str, ...]:
    bound = ">" * rejected.is_bound
    seconds, headroom = rejected.step_seconds, rejected.headroom_bytes
    fits = seconds is not None and (headroom is None or headroom >= 0)
    steps = f" x {rejected.accumulation_steps}" if rejected.accumulation_steps else ""
    peak = f"{bound}{format_bytes(rejected.peak_bytes)}" if rejected.peak_bytes is not None else ""
    room = format_bytes(headroom) if headroom is not None else ""
    return (
        f"{bound}{format_seconds(seconds)}" if fits and seconds is not None else "-",
        _times(seconds, plan.time.total_seconds) if fits and seconds is not None else "",
        f"{rejected.micro_batch}{steps}",
        peak,
        f"<{room}" if bound and room else room,
        f"{short_name(rejected.strategy)}: {_verdict(plan.time, rejected)}",
    )


def _times(seconds: float, chosen: float) -> str:
    return f"{seconds / chosen:.2f}x" if chosen else ""


def _verdict(chosen: StepTime, rejected: Rejected) -> str:
    """The reason in few words, and the part of the step that is longer."""
    if rejected.reason.startswith("cannot fit"):
        return "cannot fit"
    if rejected.time is None or not rejected.reason.startswith(("slower", "cannot be faster")):
        return rejected.reason
    parts = {
        name: getattr(rejected.time, f"{name}_seconds") - getattr(chosen, f"{name}_seconds")
        for name in ("compute", "recompute", "communication", "offload", "optimizer")
    }
    longest = max(parts, key=lambda name: parts[name])
    return f"{rejected.reason}, {longest} +{format_seconds(parts[longest])}" if parts[longest] > 0 else rejected.reason


NOT_DRY_RUN = "predicted, not dry-run"

_LETTERS = {
    "a": "activation checkpointing full",
    "s": "activation checkpointing selective",
    "h": "activation checkpointing offloaded",
    "t": "tiled loss",
    "o": "optimizer in host memory",
    "p": "parameters in host memory",
    "n": "optimizer on NVMe",
    "q": "parameters on NVMe",
}


def explanation(plan: Plan) -> list[list[str]]:
    """What the plan itself knows: what binds, why, and all strategies that were weighed."""
    return [
        [arithmetic(plan), f"{plan.strategy}: {format_seconds(plan.time.total_seconds)} a step"],
        binding(plan),
        ["why", *(f"  {sentence}" for sentence in plan.why[:-1])],
        strategy_table(plan),
    ]


def binding(plan: Plan) -> list[str]:
    """What keeps the micro-batch from being larger; the fullest moment, and the phases that come next."""
    memory = plan.memory
    device = "GPU" if plan.cluster.devices[0].kind == "cuda" else "rank"
    operator = memory.operator.removeprefix("aten.").removesuffix(".default")
    parts = sorted(((getattr(memory, name), name) for name in memory.CATEGORIES), reverse=True)
    largest = ", ".join(f"{name} {format_bytes(size)} ({size / memory.total_bytes:.0%})" for size, name in parts[:3])
    limit = memory.total_bytes + memory.headroom_bytes
    lines = [
        "what binds",
        *(f"  {sentence}" for sentence in plan.why[-1:]),
        f"  the peak of a {device} is in {memory.phase}{f' ({operator})' if operator else ''}: "
        f"{format_bytes(memory.total_bytes)} of {format_bytes(limit)} that may be used",
        f"  most of it: {largest}",
    ]
    phases = sorted(memory.phase_peaks.items(), key=lambda phase: -phase[1])
    others = [(name, size) for name, size in phases if name != memory.phase][:2]
    if others:
        below = ", ".join(f"{name} {format_bytes(max(0, memory.live_bytes - size))} lower" for name, size in others)
        lines.append(f"  next would be {below}")
    host = min((node.host_memory_bytes for node in plan.cluster.nodes if node.host_memory_bytes), default=None)
    if plan.strategy.offload_optimizer != "none":
        there = f" of {format_bytes(host)}" if host is not None else "; what it has is not known, see --host-mem"
        lines.append(f"  the host of a node holds {format_bytes(memory.host_bytes_per_node)}{there}")
    return lines


def improvements(plan: Plan, cases: Sequence[Case], found: Sequence[Candidate | None]) -> list[str]:
    """One line a change: what it would bring, with a sample's tokens taken into account."""
    before = plan.time.total_seconds / plan.request.seq_len
    rows = []
    for case, candidate in zip(cases, found, strict=True):
        if candidate is None:
            rows.append((case.name, "", "", "", "only a dry run could tell"))
        elif not candidate.fits or candidate.batch is None:
            rows.append(
                (case.name, "-", "", "", f"does not fit, {format_bytes(-(candidate.headroom_bytes or 0))} short")
            )
        else:
            change = 100 * (candidate.seconds / case.request.seq_len / before - 1)
            a_token = " a token" if case.request.seq_len != plan.request.seq_len else ""
            batch = f"{candidate.batch.largest_micro_batch} x {candidate.batch.accumulation_steps}"
            gain = f"{change:+.0f} %{a_token}" if abs(change) > 100 * (TIE - 1) else "no gain"
            strategy = "same strategy" if candidate.strategy == plan.strategy else short_name(candidate.strategy)
            rows.append((case.name, format_seconds(candidate.seconds), gain, batch, strategy))
    return [f"what would help ({NOT_DRY_RUN})", *aligned(rows)] if rows else []


def what_if(
    plan: Plan,
    axes: Mapping[str, Sequence[int]],
    cases: Mapping[tuple[int, int, int], Case],
    found: Mapping[tuple[int, int, int], Candidate | None],
) -> list[str]:
    """A table a sample length, memory by GPUs: seconds a step, tokens/s of a GPU, and the strategy's letters."""
    kind = "GPU" if plan.cluster.devices[0].kind == "cuda" else "rank"
    each = " a node" if len(plan.cluster.nodes) > 1 else ""
    used: set[str] = set()
    lines = [f"what if: a step of {plan.batch.global_batch} samples ({NOT_DRY_RUN})"]
    for seq_len in axes["seq-len"]:
        head = ("", *(f"{number} {kind}{'s' * (number > 1)}{each}" for number in axes["gpus"]), "")
        rows = [head]
        for memory in axes["mem"]:
            row = [format_bytes(memory)]
            for num_gpus in axes["gpus"]:
                key = (num_gpus, memory, seq_len)
                row.append(_cell(cases[key], found[key], used) if key in cases else "-")
            rows.append((*row, ""))
        lines += ["", f"samples of {seq_len} tokens", *aligned(rows)]
    legend = [f"{letter} {meaning}" for letter, meaning in _LETTERS.items() if letter in used]
    lines += ["", "  seconds a step, tokens/s of each device, Z ZeRO stage" + "".join(f"; {each}" for each in legend)]
    return lines


def _cell(case: Case, candidate: Candidate | None, used: set[str]) -> str:
    if candidate is None:
        return "?"
    if not candidate.fits:
        return f"- {format_bytes(-(candidate.headroom_bytes or 0))} short"
    letters = _letters(candidate.strategy)
    used.update(letters)
    rate = case.request.batch_samples * case.request.seq_len / candidate.seconds / case.cluster.world_size
    return f"{format_seconds(candidate.seconds)} {_rate(rate)} Z{candidate.strategy.zero_stage}{letters}"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second / 1000:.1f}k/s" if tokens_per_second >= 1000 else f"{tokens_per_second:.0f}/s"


def _letters(strategy: Strategy) -> str:
    return (
        {"off": "", "full": "a", "selective": "s", "offloaded": "h"}[strategy.activation_checkpointing]
        + "t" * (strategy.loss == "tiled")
        + {"none": "", "cpu": "o", "nvme": "n"}[strategy.offload_optimizer]
        + {"none": "", "cpu": "p", "nvme": "q"}[strategy.offload_parameters]
    )
