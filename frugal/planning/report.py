"""A plan as plain text, the same in a terminal, a pipe and a log.

`summary` is what `frugal plan -v` prints, `explanation` what `frugal explain` knows from the plan alone; both have the
memory of the fullest device, and the evaluated strategies as a table.
"""

from collections import Counter
from collections.abc import Iterable

from frugal.config.hardware.cluster import NOMINAL_SHARE, Device, Node
from frugal.config.request import Request
from frugal.planning.memory.breakdown import Bounds, MemoryBreakdown, loading_host_bytes, of_device
from frugal.planning.plan import Plan, Rejected, StepTime
from frugal.planning.strategy import MODES_NOTE, brief_name
from frugal.planning.table import WIDE, Table
from frugal.units import GIB, format_bytes, format_count, format_seconds, plural

SPLIT_MATTERS = "the gradient depends on how a global batch is split"
PADDING_MATTERS = "the gradient depends on padding"
DROPOUT = "dropout masks depend on how the batch is split across ranks and micro-steps"
DRAWS = "numbers that forward draws at random depend on how the batch is split across ranks and micro-steps"
LAYER_DROP = "LayerDrop is off"
DRAWN_PARTS = "which parameters are used is drawn at random"
ADDED_LOSS = "its loss is more than a sum over targets"
"""The beginnings of a plan's warnings that training repeats, except for those of random draws, which are ordinary."""

SHOWN_REJECTED = 7

Block = list[str] | Table
"""A part of a report: lines, or a table."""


def as_text(blocks: Iterable[Block]) -> str:
    """Return blocks as plain text, separated by empty lines."""
    lines = (block.lines if isinstance(block, Table) else block for block in blocks)
    return "\n\n".join("\n".join(block) for block in lines if block)


def summary(plan: Plan) -> str:
    """Return everything a plan says, as text."""
    return as_text(summary_blocks(plan))


def summary_blocks(plan: Plan) -> list[Block]:
    """Return everything a plan says, as blocks."""
    return [
        [plan.arithmetic],
        [*_facts(plan), *_data(plan)],
        breakdown_table(plan),
        _list("why", plan.why),
        _list("note", plan.warnings),
        strategy_table(plan, shown=SHOWN_REJECTED) if plan.rejected else [],
        _list("defaults", [", ".join(_default(plan, name) for name in plan.defaults)] if plan.defaults else []),
        _list("assumed", assumptions(plan)),
    ]


def _facts(plan: Plan) -> list[str]:
    request, model, time = plan.request, plan.model, plan.time
    parameters = f"{format_count(model.parameters)} parameters"
    if model.trainable_parameters != model.parameters:
        adapter = f": LoRA {request.lora}" if request.lora is not None else ""
        base = f"; base in {request.quantize}" if request.quantize is not None else ""
        parameters += f" ({format_count(model.trainable_parameters)} trainable{adapter}{base})"
    clipping = f", gradient norm at most {request.gradient_clipping:g}" if request.gradient_clipping else ""
    rate = request.learning_rate_scaling or f"{request.learning_rate:g}"
    packed = ", packed with documents" if request.pack else ""
    states = ", master weights and optimizer states in bf16" if request.optimizer.states == "bf16" else ""
    shares = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in time.parts.items() if seconds)
    return _rows(
        model=f"{request.model}, {model.task}, {parameters}, samples of {request.seq_len} tokens{packed}",
        cluster=_cluster(plan),
        strategy=str(plan.strategy),
        numbers=f"{request.precision}, gradients summed in {plan.strategy.gradient_accumulation_dtype}{states}",
        optimizer=f"{_optimizer(request)}, learning rate {rate}, {_numbers(request)}{clipping}",
        step=f"{format_seconds(time.total_seconds)} estimated: {shares}",
    )


def _rows(**texts: str) -> list[str]:
    return [f"{name:<10} {text}" for name, text in texts.items()]


def _data(plan: Plan) -> list[str]:
    """Describe what the plan knows of the data, and a typical global batch of it."""
    grouping, batch = plan.grouping, plan.batch
    if grouping is None:
        return []
    source = f" ({grouping.source})" if grouping.source else ""
    most = max(batch.micro_batch)
    largest = most * plan.request.seq_len // (batch.shortest or plan.request.seq_len)
    return _rows(
        data=f"{grouping.num_samples:,} samples{source}, {format_count(grouping.num_tokens)} tokens: half have up to "
        f"{grouping.median}, 99 % up to {grouping.percentile_99}, the longest has {grouping.longest}",
        typical=f"{plural(grouping.step_samples, 'sample')} are {grouping.step_tokens:,} tokens in "
        f"{plural(grouping.micro_steps, 'micro-step')}, with up to {plural(largest, 'sample')} in one micro-batch",
        padding=f"{100 * grouping.padding:.0f} % of the tokens; micro-batches of {plural(most, 'sample')} in random "
        f"order would have {100 * grouping.fixed_padding:.0f} %",
    )


def _optimizer(request: Request) -> str:
    momentum = f" with momentum {request.optimizer.momentum:g}" if request.optimizer.momentum else ""
    implementation = f" ({request.optimizer.implementation})" if request.optimizer.implementation else ""
    return f"{request.optimizer.name}{implementation}{momentum}"


def _numbers(request: Request) -> str:
    decay = f"weight decay {request.weight_decay:g}" + ("" if request.decays_all else " but of norms and biases")
    if request.optimizer.name == "sgd":
        return decay
    optimizer = request.optimizer
    return f"betas {optimizer.beta1:g} and {optimizer.beta2:g}, epsilon {optimizer.epsilon:g}, {decay}"


def _cluster(plan: Plan) -> str:
    kinds = Counter(map(_node, plan.cluster.nodes))
    if len(plan.cluster.nodes) == 1:
        return next(iter(kinds))
    return " + ".join(f"{plural(count, 'node')} of {node}" for node, count in kinds.items())


def _node(node: Node) -> str:
    devices = Counter((device.name, device.memory_bytes) for device in node.devices)
    return " and ".join(f"{count} x {name} with {format_bytes(memory)}" for (name, memory), count in devices.items())


def _default(plan: Plan, name: str) -> str:
    value = plan.batch.global_batch if name == "global_batch" else getattr(plan.request, name)
    return f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"


def _list(title: str, lines: Iterable[str]) -> list[str]:
    texts = [f"  {line}" for line in lines]
    return [title, *texts] if texts else []


HEAD = ("step", "", "batch", "peak", "headroom", "")


def strategy_table(plan: Plan, *, shown: int | None = None) -> Table:
    """Return the chosen strategy and the others, fastest first; at most `shown` of these.

    A batch is micro-batch x accumulation steps.
    """
    rejected = plan.rejected if shown is None else plan.rejected[:shown]
    rest = len(plan.rejected) - len(rejected)
    notes = ["> lower bound, < upper bound: pruned, not fully evaluated"] * any(each.is_bound for each in rejected)
    notes += [f"{rest} more: `frugal explain`"] * (rest > 0)
    memory, total = plan.memory, plan.time.total_seconds
    chosen = (
        format_seconds(total),
        "1.00x",
        f"{plan.batch.largest_micro_batch} x {plan.batch.accumulation_steps}",
        format_bytes(memory.total_bytes),
        format_bytes(memory.headroom_bytes),
        f"{brief_name(plan.strategy)}: chosen",
    )
    return Table(
        title="strategies",
        rows=(HEAD, chosen, *(_row(plan.time, each) for each in rejected)),
        note="; ".join([*notes, MODES_NOTE]),
        has_head=True,
        width=WIDE,
    )


def _row(chosen: StepTime, rejected: Rejected) -> tuple[str, ...]:
    lower, upper = (">", "<") if rejected.is_bound else ("", "")
    seconds, headroom = rejected.step_seconds, rejected.headroom_bytes
    step, ratio = "-", ""
    if seconds is not None and (headroom is None or headroom >= 0):
        step = f"{lower}{format_seconds(seconds)}"
        ratio = f"{seconds / chosen.total_seconds:.2f}x" if chosen.total_seconds else ""
    steps = f" x {rejected.accumulation_steps}" if rejected.accumulation_steps else ""
    return (
        step,
        ratio,
        f"{rejected.micro_batch}{steps}",
        f"{lower}{format_bytes(rejected.peak_bytes)}" if rejected.peak_bytes is not None else "",
        f"{upper}{format_bytes(headroom)}" if headroom is not None else "",
        f"{brief_name(rejected.strategy)}: {_verdict(chosen, rejected)}",
    )


def _verdict(chosen: StepTime, rejected: Rejected) -> str:
    """Return the reason in few words: of a slower strategy the part of the step that is longer."""
    if rejected.reason.startswith("cannot fit"):
        return "cannot fit"
    if rejected.time is None or not rejected.reason.startswith(("slower", "cannot be faster")):
        return rejected.reason
    parts = {name: seconds - chosen.parts[name] for name, seconds in rejected.time.parts.items()}
    longest = max(parts, key=lambda name: parts[name])
    return f"{longest} +{format_seconds(parts[longest])}" if parts[longest] > 0 else rejected.reason


def explanation(plan: Plan, *, in_full: bool = False) -> list[Block]:
    """Return what binds, why, and all strategies that were evaluated; `in_full`: the rest of the plan, too."""
    reasoned: list[Block] = [
        binding(plan),
        ["why", *(f"  {sentence}" for sentence in plan.why[:-1])],
        strategy_table(plan),
    ]
    if not in_full:
        return [[plan.arithmetic, f"{plan.strategy}: {format_seconds(plan.time.total_seconds)} a step"], *reasoned]
    headline, facts, breakdown, _, notes, _, defaults, assumed = summary_blocks(plan)
    return [headline, facts, breakdown, *reasoned, notes, defaults, assumed]


SHOWN_BYTES = 1 << 16


def breakdown_table(plan: Plan) -> list[str]:
    """Return the breakdown of the fullest device as lines that end with the card's memory."""
    memory = plan.memory
    device = memory.device_in(plan.cluster)
    which = "the fullest" if len(set(plan.batch.micro_batch)) > 1 else "each"
    sizes = {name: size for name in memory.CATEGORIES if (size := getattr(memory, name)) >= SHOWN_BYTES}
    sizes |= {"total": memory.total_bytes, "headroom": memory.headroom_bytes}
    sizes |= {"margin": device.margin_bytes} if device.margin_bytes else {}
    sizes |= {"others": device.held_bytes} if device.held_bytes else {}
    sizes |= {"device": device.memory_bytes}
    sizes |= {"host, a node": memory.host_bytes_per_node} if plan.strategy.offload_optimizer != "none" else {}
    bounds = f"  {bounds_of(memory.interval)}" if memory.interval is not None else ""
    width = max(len(name) for name in (*memory.CATEGORIES, "total"))
    return [
        f"memory of {which} {plan.cluster.rank_noun} at its peak, in {_peak(memory)}",
        *(
            f"  {name:<{width}} {format_bytes(size):>12}{bounds if name == 'total' else ''}"
            for name, size in sizes.items()
        ),
        *_with_room(plan, device),
        *_loading(plan),
    ]


def _with_room(plan: Plan, device: Device) -> list[str]:
    """Say what a run on the whole card is seen to take: its allocator keeps more than is needed."""
    memory = plan.memory
    if not memory.reserved_bytes:
        return []
    seen = of_device(memory.live_bytes, memory.reserved_bytes, device)
    needed, reserved = format_bytes(memory.total_bytes), format_bytes(memory.reserved_bytes)
    shown = format_bytes(memory.reserved_bytes + device.context_bytes)
    steps = ""
    if plan.request.lengths is not None:
        steps = " over the data's lengths" if memory.counts_lengths else " for equal lengths, more for others"
    return [
        f"it needs {needed}; on the whole card its allocator reserves {reserved}{steps}, and nvidia-smi shows {shown} "
        f"{bounds_of(seen)}"
    ]


_WAYS = {
    "by-tensor": "each rank reads pretrained weights tensor by tensor",
    "by-rank-0": "rank 0 makes the random weights and sends them",
    "by-every-rank": "each rank makes the whole model",
}


def loading_in_words(memory: MemoryBreakdown) -> str:
    """Say how ranks get their weights."""
    assert memory.loading is not None
    return _WAYS[memory.loading.way]


def _loading(plan: Plan) -> list[str]:
    """Say what the host with rank 0 takes before the first step."""
    if plan.memory.loading is None:
        return []
    needed = loading_host_bytes(plan.memory, plan.cluster.nodes[0], plan.cluster)
    node = "its host" if len(plan.cluster.nodes) == 1 else "the host of rank 0"
    return [f"loading takes {format_bytes(needed)} of {node}: {loading_in_words(plan.memory)}"]


def _peak(memory: MemoryBreakdown) -> str:
    operator = memory.operator.removeprefix("aten.").removesuffix(".default")
    return f"{memory.phase} ({operator})" if operator else memory.phase


def assumptions(plan: Plan) -> list[str]:
    """List what no dry run can know."""
    device = plan.cluster.devices[0]
    if device.measured_on is not None:
        return [_margin(device)] if device.kind == "cuda" else []
    lines = []
    if device.kind == "cuda":
        least = format_bytes(device.context_bytes - device.context_below_bytes)
        most = format_bytes(device.context_bytes + device.context_above_bytes)
        lines += [
            f"context {format_bytes(device.context_bytes)} ({least} to {most}: driver, kernels, NCCL), not measured on "
            "your card: `frugal measure --calibrate` does",
            _margin(device),
        ]
    speed = f"{device.matrix_flops / 1e12:.3g} TFLOP/s reached, {device.memory_bandwidth / 1e9:.0f} GB/s of memory"
    links = f"{plan.cluster.intra_bandwidth / 1e9:.0f} GB/s between {plan.cluster.rank_noun}s"
    if len(plan.cluster.nodes) > 1:
        links += f", {plan.cluster.inter_bandwidth / 1e9:.0f} GB/s between nodes"
    lines.append(f"{device.name}: {speed}, {links}; only the seconds depend on it")
    return lines


def bounds_of(interval: Bounds) -> str:
    """Format bounds in brackets: `(10.60 GiB to 10.90 GiB)`."""
    return f"({format_bytes(interval.lower_bytes)} to {format_bytes(interval.upper_bytes)})"


def _bounds(memory: MemoryBreakdown) -> list[str]:
    """Say how far from the total the memory may be, and for which causes."""
    if memory.interval is None:
        return []
    causes = ", ".join(
        f"{name} -{format_bytes(cause.below_bytes)} +{format_bytes(cause.above_bytes)}"
        for name, cause in memory.interval.causes.items()
        if max(cause.below_bytes, cause.above_bytes) >= SHOWN_BYTES
    )
    return [f"  it may come to {bounds_of(memory.interval)[1:-1]}{f': {causes}' if causes else ''}"]


def beyond_the_device(memory: MemoryBreakdown, device: Device) -> list[str]:
    """Note where data may make a run take more than `device` has; for the other causes there is the margin."""
    room = memory.usable_bytes + device.context_bytes + device.margin_bytes
    if memory.interval is None or device.kind == "cpu" or memory.interval.upper_bytes <= room:
        return []
    return [
        f"other data may take up to {format_bytes(memory.interval.upper_bytes)} of the {format_bytes(room)} of a GPU; "
        "a run that goes out of memory continues with smaller micro-batches"
    ]


def _margin(device: Device) -> str:
    """Say what stays free, and for what."""
    above, nominal = device.context_above_bytes, int(device.memory_bytes * NOMINAL_SHARE)
    parts = [f"a larger context {format_bytes(above)}"] if above else []
    rest = device.margin_bytes - above
    if device.memory_bytes % GIB == 0 and rest > nominal:
        parts.append(f"a driver that reports less than the box {format_bytes(nominal)}")
        rest -= nominal
    parts.append(f"fragmentation and kernels {format_bytes(rest)}")
    return f"margin {format_bytes(device.margin_bytes)}: {', '.join(parts)}"


def binding(plan: Plan) -> list[str]:
    """Say what keeps the micro-batch from being larger: the fullest moment, and the phases that come next."""
    memory = plan.memory
    parts = sorted(((getattr(memory, name), name) for name in memory.CATEGORIES), reverse=True)
    largest = ", ".join(f"{name} {format_bytes(size)} ({size / memory.total_bytes:.0%})" for size, name in parts[:3])
    limit = memory.total_bytes + memory.headroom_bytes
    lines = [
        "what binds",
        *(f"  {sentence}" for sentence in plan.why[-1:]),
        f"  the peak of a {plan.cluster.rank_noun} is in {_peak(memory)}: {format_bytes(memory.total_bytes)} of "
        f"{format_bytes(limit)} that may be used",
        *_bounds(memory),
        f"  most of it: {largest}",
    ]
    phases = sorted(memory.phase_peaks.items(), key=lambda phase: -phase[1])
    below = [
        f"{name} {format_bytes(max(0, memory.live_bytes - size))} lower"
        for name, size in phases
        if name != memory.phase
    ]
    if below:
        lines.append(f"  next would be {', '.join(below[:2])}")
    host = min((node.host_memory_bytes for node in plan.cluster.nodes if node.host_memory_bytes), default=None)
    if plan.strategy.offload_optimizer != "none":
        there = f" of {format_bytes(host)}" if host is not None else "; what it has is not known, see --host-mem"
        lines.append(f"  the host of a node holds {format_bytes(memory.host_bytes_per_node)}{there}")
    return lines
