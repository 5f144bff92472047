"""A plan as people read it: plain text, the same in a terminal, a pipe and a log."""

from collections import Counter

from frugal.planning.cluster import Node
from frugal.planning.ladder import ladder
from frugal.planning.memory import MemoryBreakdown
from frugal.planning.plan import Plan
from frugal.planning.request import Request
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
        ladder(plan, shown=SHOWN_REJECTED) if plan.rejected else [],
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
        return f"{total} = {gpus} x micro-batch {batch.largest_cell} x {steps}"
    return f"{total} = {gpus} x {batch.accumulation_steps} micro-step{_s(batch.accumulation_steps)} of {_sizes(plan)}"


def _sizes(plan: Plan) -> str:
    """What a cell holds: `7 or 8 samples`, or per group of ranks where their micro-batches differ."""
    cut = plan.batch.cut
    texts = []
    for group, num_ranks in enumerate(cut.groups.values()):
        sizes = {
            size
            for steps in cut.micro_steps
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
        f"ds_config.json says train_batch_size {batch.capacity}, what the cells could hold: DeepSpeed's JSON knows no "
        f"uneven cells; plan.json has them, and frugal trains exactly {_samples(batch.global_batch)}"
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
    """What no rehearsal can know."""
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
