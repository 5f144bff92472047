"""A plan as plain text, the same in a terminal, a pipe and a log.

`summary` is what `frugal plan -v` prints, `explanation` what `frugal explain` knows from the plan alone; both have the
memory of the fullest device, and the evaluated strategies as a table: aligned by spaces in a pipe, drawn to the width
of a terminal by the command line. `bar` is a device as a bar, which a terminal shows with a plan.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from frugal.config.hardware.cluster import NOMINAL_SHARE, Device, Node
from frugal.planning.batch import in_proportion
from frugal.planning.memory.breakdown import Bounds, MemoryBreakdown, loading_host_bytes, of_device
from frugal.planning.plan import Plan, Rejected, StepTime
from frugal.planning.strategy import MODES_NOTE, brief_name
from frugal.units import GIB, format_bytes, format_count, format_seconds, plural

WIDE = 100
"""Columns of plain text that a table may take."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of equally many texts under a title; the last column is the one that may be long. `has_head`: the first row
    names the columns. `note` stands below. `width`: as plain text no line is longer than so many columns."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    has_head: bool = False
    width: int | None = None

    @property
    def lines(self) -> list[str]:
        """As plain text."""
        if self.width is None:
            return [self.title, *aligned(self.rows), *([f"  {self.note}"] if self.note else [])]
        before = sum(2 + max(map(len, column)) for column in list(zip(*self.rows, strict=True))[:-1])
        rows = [
            (*(row[:-1] if not number else [""] * (len(row) - 1)), line)
            for row in self.rows
            for number, line in enumerate(wrap(row[-1], self.width - before - 2, subsequent_indent="  ") or [""])
        ]
        return [self.title, *aligned(rows), *wrap(self.note, self.width, initial_indent="  ", subsequent_indent="  ")]


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as indented lines; all columns but the last are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(f"{text:>{width}}" for text, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


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


def select_texts(*cases: tuple[object, str]) -> list[str]:
    """Return the texts whose condition holds, in order: `(condition, text)`."""
    return [text for holds, text in cases if holds]


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
        _facts(plan),
        breakdown_table(plan),
        _list("why", plan.why),
        _list("note", plan.warnings),
        strategy_table(plan, shown=SHOWN_REJECTED) if plan.rejected else [],
        _list("defaults", [", ".join(_default(plan, name) for name in plan.defaults)] if plan.defaults else []),
        _list("assumed", assumptions(plan)),
    ]


def _facts(plan: Plan) -> list[str]:
    """Describe what runs where, and what the plan knows of the data."""
    request, model, optimizer, time = plan.request, plan.model, plan.request.optimizer, plan.time
    parameters = f"{format_count(model.parameters)} parameters"
    if model.trainable_parameters != model.parameters:
        adapter = f": LoRA {request.lora}" if request.lora is not None else ""
        base = f"; base in {request.quantize}" if request.quantize is not None else ""
        parameters += f" ({format_count(model.trainable_parameters)} trainable{adapter}{base})"
    nodes = [f"{plural(count, 'node')} of {node}" for node, count in Counter(map(_node, plan.cluster.nodes)).items()]
    implementation = f" ({optimizer.implementation})" if optimizer.implementation else ""
    momentum = f" with momentum {optimizer.momentum:g}" if optimizer.momentum else ""
    has_betas = optimizer.name != "sgd"
    settings = select_texts(
        (True, f"{optimizer.name}{implementation}{momentum}"),
        (True, f"learning rate {request.learning_rate_in_words}"),
        (has_betas, f"betas {optimizer.beta1:g} and {optimizer.beta2:g}, epsilon {optimizer.epsilon:g}"),
        (True, f"weight decay {request.weight_decay:g}{'' if request.decays_all else ' but of norms and biases'}"),
        (request.gradient_clipping, f"gradient norm at most {request.gradient_clipping:g}"),
    )
    packed = ", packed with documents" if request.pack else ""
    states = ", master weights and optimizer states in bf16" if optimizer.states == "bf16" else ""
    shares = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in time.parts.items() if seconds)
    rows = {
        "model": f"{request.model}, {model.task}, {parameters}, samples of {request.seq_len} tokens{packed}",
        "cluster": " + ".join(nodes) if len(plan.cluster.nodes) > 1 else _node(plan.cluster.nodes[0]),
        "strategy": str(plan.strategy),
        "numbers": f"{request.precision}, gradients summed in {plan.strategy.gradient_accumulation_dtype}{states}",
        "optimizer": ", ".join(settings),
        "step": f"{format_seconds(time.total_seconds)} estimated: {shares}",
    }
    if (grouping := plan.grouping) is not None:
        source = f" ({grouping.source})" if grouping.source else ""
        most = max(plan.batch.micro_batch)
        largest = most * request.seq_len // (plan.batch.shortest or request.seq_len)
        rows |= {
            "data": f"{grouping.num_samples:,} samples{source}, {format_count(grouping.num_tokens)} tokens: half have "
            f"up to {grouping.median}, 99 % up to {grouping.percentile_99}, the longest has {grouping.longest}",
            "typical": f"{plural(grouping.step_samples, 'sample')} are {grouping.step_tokens:,} tokens in "
            f"{plural(grouping.micro_steps, 'micro-step')}, with up to {plural(largest, 'sample')} in one micro-batch",
            "padding": f"{100 * grouping.padding:.0f} % of the tokens; micro-batches of {plural(most, 'sample')} in "
            f"random order would have {100 * grouping.fixed_padding:.0f} %",
        }
    return [f"{name:<10} {text}" for name, text in rows.items()]


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
    notes = select_texts(
        (any(each.is_bound for each in rejected), "> lower bound, < upper bound: pruned, not fully evaluated"),
        (rest, f"{rest} more: `frugal explain`"),
        (True, MODES_NOTE),
    )
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
        note="; ".join(notes),
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
    """Return the breakdown of the fullest device as lines that end with the card's memory, then what it takes on the
    whole card, whose allocator keeps more than is needed, and what loading takes.
    """
    memory, cluster = plan.memory, plan.cluster
    device = memory.device_in(cluster)
    which = "the fullest" if len(set(plan.batch.micro_batch)) > 1 else "each"
    parts = {name: size for name in memory.CATEGORIES if (size := getattr(memory, name)) >= SHOWN_BYTES}
    whole = {"total": memory.total_bytes, "headroom": memory.headroom_bytes}
    beside = {"margin": device.margin_bytes, "others": device.held_bytes, "device": device.memory_bytes}
    if plan.strategy.offload_optimizer != "none":
        beside["host, a node"] = memory.host_bytes_per_node
    sizes = parts | whole | {name: size for name, size in beside.items() if size}
    width = max(len(name) for name in (*memory.CATEGORIES, "total"))
    rows = {name: f"  {name:<{width}} {format_bytes(size):>12}" for name, size in sizes.items()}
    if memory.interval is not None:
        rows["total"] += f"  {bounds_of(memory.interval)}"
    lines = [f"memory of {which} {cluster.rank_noun} at its peak, in {_peak(memory)}", *rows.values()]
    if memory.reserved_bytes:
        bounds = of_device(memory.live_bytes, memory.reserved_bytes, device)
        most = min(bounds.upper_bytes + memory.reserved_above_bytes, device.memory_bytes)
        seen = bounds_of(replace(bounds, upper_bytes=max(bounds.upper_bytes, most)))
        reserved, shown = memory.reserved_bytes, memory.reserved_bytes + device.context_bytes
        steps = " over the data's lengths" if memory.counts_lengths else " for equal lengths, more for others"
        lines.append(
            f"it needs {format_bytes(memory.total_bytes)}; on the whole card its allocator reserves "
            f"{format_bytes(reserved)}{steps if plan.request.lengths is not None else ''}, and nvidia-smi shows "
            f"{format_bytes(shown)} {seen}"
        )
    if memory.loading is not None:
        needed = loading_host_bytes(memory, cluster.nodes[0], cluster)
        node = "its host" if len(cluster.nodes) == 1 else "the host of rank 0"
        lines.append(f"loading takes {format_bytes(needed)} of {node}: {loading_in_words(memory)}")
    return lines


_WAYS = {
    "by-tensor": "each rank reads pretrained weights tensor by tensor",
    "by-rank-0": "rank 0 makes the random weights and sends them",
    "by-every-rank": "each rank makes the whole model",
}


def loading_in_words(memory: MemoryBreakdown) -> str:
    """Say how ranks get their weights."""
    assert memory.loading is not None
    return _WAYS[memory.loading.way]


def _peak(memory: MemoryBreakdown) -> str:
    operator = memory.operator.removeprefix("aten.").removesuffix(".default")
    return f"{memory.phase} ({operator})" if operator else memory.phase


def assumptions(plan: Plan) -> list[str]:
    """List what no dry run can know."""
    device, cluster = plan.cluster.devices[0], plan.cluster
    is_gpu, is_measured = device.kind == "cuda", device.measured_on is not None
    parts = "driver, kernels" + (", NCCL" if cluster.world_size > 1 else "")
    least = format_bytes(device.context_bytes - device.context_below_bytes)
    most = format_bytes(device.context_bytes + device.context_above_bytes)
    speed = f"{device.matrix_flops / 1e12:.3g} TFLOP/s reached, {device.memory_bandwidth / 1e9:.0f} GB/s of memory"
    inside = f"{cluster.intra_bandwidth / 1e9:.0f} GB/s between {cluster.rank_noun}s"
    between = f", {cluster.inter_bandwidth / 1e9:.0f} GB/s between nodes" if len(cluster.nodes) > 1 else ""
    return select_texts(
        (
            is_gpu and not is_measured,
            f"context {format_bytes(device.context_bytes)} ({least} to {most}: {parts}), not measured on your "
            "card: `frugal measure --calibrate` does",
        ),
        (is_gpu, _margin(device)),
        (not is_measured, f"{device.name}: {speed}, {inside}{between}; only the seconds depend on it"),
    )


def bounds_of(interval: Bounds) -> str:
    """Format bounds in brackets: `(10.60 GiB to 10.90 GiB)`."""
    return f"({format_bytes(interval.lower_bytes)} to {format_bytes(interval.upper_bytes)})"


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
    is_nominal = device.memory_bytes % GIB == 0 and device.margin_bytes - above > nominal
    rest = device.margin_bytes - above - nominal * is_nominal
    parts = select_texts(
        (above, f"a larger context {format_bytes(above)}"),
        (is_nominal, f"a driver that reports less than the box {format_bytes(nominal)}"),
        (True, f"fragmentation and kernels {format_bytes(rest)}"),
    )
    return f"margin {format_bytes(device.margin_bytes)}: {', '.join(parts)}"


def binding(plan: Plan) -> list[str]:
    """Say what keeps the micro-batch from being larger: the fullest moment, how far from the total the memory may be
    and for which causes, and the phases that come next.
    """
    memory = plan.memory
    total = format_bytes(memory.total_bytes)
    parts = sorted(((getattr(memory, name), name) for name in memory.CATEGORIES), reverse=True)
    largest = ", ".join(f"{name} {format_bytes(size)} ({size / memory.total_bytes:.0%})" for size, name in parts[:3])
    limit = format_bytes(memory.total_bytes + memory.headroom_bytes)
    lines = [
        "what binds",
        *(f"  {sentence}" for sentence in plan.why[-1:]),
        f"  the peak of a {plan.cluster.rank_noun} is in {_peak(memory)}: {total} of {limit} that may be used",
    ]
    if (bounds := memory.interval) is not None and format_bytes(bounds.lower_bytes) != format_bytes(bounds.upper_bytes):
        causes = ", ".join(
            f"{name} -{format_bytes(cause.below_bytes)} +{format_bytes(cause.above_bytes)}"
            for name, cause in bounds.causes.items()
            if max(cause.below_bytes, cause.above_bytes) >= SHOWN_BYTES
        )
        lines.append(f"  it may come to {bounds_of(bounds)[1:-1]}{f': {causes}' if causes else ''}")
    lines.append(f"  most of it: {largest}")
    phases = sorted(memory.phase_peaks.items(), key=lambda phase: -phase[1])
    below = [
        f"{name} {format_bytes(max(0, memory.live_bytes - size))} lower"
        for name, size in phases
        if name != memory.phase
    ]
    host = min((node.host_memory_bytes for node in plan.cluster.nodes if node.host_memory_bytes), default=None)
    there = f" of {format_bytes(host)}" if host is not None else "; what it has is not known, see --host-mem"
    return lines + select_texts(
        (below, f"  next would be {', '.join(below[:2])}"),
        (
            plan.strategy.offload_optimizer != "none",
            f"  the host of a node holds {format_bytes(memory.host_bytes_per_node)}{there}",
        ),
    )


# Okabe and Ito's colours, which colour-blind people can tell apart, for light and dark; letters on them have a contrast
# of at least 4.5.
_PARTS = {
    "parameters": ("p", "#ffffff on #0072B2"), "gradients": ("g", "#000000 on #E69F00"),
    "optimizer": ("o", "#000000 on #009E73"), "activations": ("a", "#000000 on #CC79A7"),
    "logits": ("l", "#000000 on #56B4E9"), "communication": ("c", "#000000 on #D55E00"),
    "temporary": ("t", "#000000 on #F0E442"), "slack": ("s", "#000000 on #999999"),
    "context": ("x", "#000000 on #777777"), "headroom": (".", "dim"), "margin": ("-", "dim"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """A part of a device's memory: a category of the breakdown, or what stays free as `headroom` and as `margin`.

    `style`: as `rich` writes it, letters on a colour; free memory is dim.
    """

    name: str
    letter: str
    style: str
    size_bytes: int

    def named(self, share: int) -> str:
        """Return `share` characters, with name and size where there is room: `lll logits 1.00 GiB lll`."""
        for words in (f" {self.name} {format_bytes(self.size_bytes)} ", f" {self.name} "):
            if len(words) + 2 <= share:
                return words.center(share, self.letter)
        return self.letter * share


def bar(memory: MemoryBreakdown, device_bytes: int, width: int) -> list[tuple[BarPart, int]]:
    """Return the parts of a device, which are `device_bytes` together, with characters of each, `width` together."""
    sizes = {name: getattr(memory, name) for name in memory.CATEGORIES} | {"headroom": memory.headroom_bytes}
    sizes["margin"] = max(0, device_bytes - sum(sizes.values()))
    parts = [
        BarPart(name=name, letter=_PARTS[name][0], style=_PARTS[name][1], size_bytes=sizes[name]) for name in _PARTS
    ]
    return list(zip(parts, in_proportion(width, [part.size_bytes for part in parts]), strict=True))
