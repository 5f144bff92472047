"""What a plan says of memory, as people read it: the breakdown of the fullest device, what binds, what is assumed."""

from frugal.config.hardware.cluster import NOMINAL_SHARE, Device
from frugal.planning.memory.breakdown import MemoryBreakdown, loading_host_bytes
from frugal.planning.memory.interval import Bounds
from frugal.planning.plan import Plan
from frugal.units import GIB, format_bytes

SHOWN_BYTES = 1 << 16


def breakdown_table(plan: Plan) -> list[str]:
    """The breakdown of the fullest device, ending at the card's memory."""
    memory = plan.memory
    device = memory.device_in(plan.cluster)
    rows = [(name, getattr(memory, name), "") for name in memory.CATEGORIES if getattr(memory, name) >= SHOWN_BYTES]
    width = max(len(name) for name in (*memory.CATEGORIES, "total"))
    lines = [
        f"memory of {'the fullest' if len(set(plan.batch.micro_batch)) > 1 else 'each'} "
        f"{plan.cluster.rank_noun} at its peak, in {_peak(memory)}"
    ]
    for name, size, _ in rows:
        lines.append(f"  {name:<{width}} {format_bytes(size):>12}")
    bounds = f"  {bounds_of(memory.interval)}" if memory.interval is not None else ""
    lines.append(f"  {'total':<{width}} {format_bytes(memory.total_bytes):>12}{bounds}")
    lines.append(f"  {'headroom':<{width}} {format_bytes(memory.headroom_bytes):>12}")
    if device.margin_bytes:
        lines.append(f"  {'margin':<{width}} {format_bytes(device.margin_bytes):>12}")
    if device.held_bytes:
        lines.append(f"  {'others':<{width}} {format_bytes(device.held_bytes):>12}")
    lines.append(f"  {'device':<{width}} {format_bytes(device.memory_bytes):>12}")
    if plan.strategy.offload_optimizer != "none":
        lines.append(f"  {'host, a node':<{width}} {format_bytes(memory.host_bytes_per_node):>12}")
    return [*lines, *_loading(plan)]


_WAYS = {
    "by-tensor": "each rank reads pretrained weights tensor by tensor",
    "by-rank-0": "rank 0 makes the random weights and sends them",
    "by-every-rank": "each rank makes the whole model",
}


def loading_in_words(memory: MemoryBreakdown) -> str:
    """How ranks get their weights."""
    assert memory.loading is not None
    return _WAYS[memory.loading.way]


def _loading(plan: Plan) -> list[str]:
    """What the host with rank 0 takes before the first step."""
    if plan.memory.loading is None:
        return []
    needed = loading_host_bytes(plan.memory, plan.cluster.nodes[0], plan.cluster)
    node = "its host" if len(plan.cluster.nodes) == 1 else "the host of rank 0"
    return [f"loading takes {format_bytes(needed)} of {node}: {loading_in_words(plan.memory)}"]


def _peak(memory: MemoryBreakdown) -> str:
    operator = memory.operator.removeprefix("aten.").removesuffix(".default")
    return f"{memory.phase} ({operator})" if operator else memory.phase


def assumptions(plan: Plan) -> list[str]:
    """What no dry run can know."""
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
    """In brackets: `(10.60 GiB to 10.90 GiB)`."""
    return f"({format_bytes(interval.lower_bytes)} to {format_bytes(interval.upper_bytes)})"


def _bounds(memory: MemoryBreakdown) -> list[str]:
    """How far from the total it may be, and for which causes."""
    if memory.interval is None:
        return []
    causes = ", ".join(
        f"{name} -{format_bytes(cause.below_bytes)} +{format_bytes(cause.above_bytes)}"
        for name, cause in memory.interval.causes.items()
        if max(cause.below_bytes, cause.above_bytes) >= SHOWN_BYTES
    )
    return [f"  it may come to {bounds_of(memory.interval)[1:-1]}{f': {causes}' if causes else ''}"]


def beyond_the_device(memory: MemoryBreakdown, device: Device) -> list[str]:
    """A note where data may make a run take more than `device` has; the other causes are what its margin is for."""
    room = memory.usable_bytes + device.context_bytes + device.margin_bytes
    if memory.interval is None or device.kind == "cpu" or memory.interval.upper_bytes <= room:
        return []
    return [
        f"other data may take up to {format_bytes(memory.interval.upper_bytes)} of the {format_bytes(room)} of a GPU; "
        "a run that goes out of memory goes on with smaller micro-batches"
    ]


def _margin(device: Device) -> str:
    """What stays free, and for what."""
    above, nominal = device.context_above_bytes, int(device.memory_bytes * NOMINAL_SHARE)
    parts = [f"a larger context {format_bytes(above)}"] if above else []
    rest = device.margin_bytes - above
    if device.memory_bytes % GIB == 0 and rest > nominal:
        parts.append(f"a driver that reports less than the box {format_bytes(nominal)}")
        rest -= nominal
    parts.append(f"fragmentation and kernels {format_bytes(rest)}")
    return f"margin {format_bytes(device.margin_bytes)}: {', '.join(parts)}"


def binding(plan: Plan) -> list[str]:
    """What keeps the micro-batch from being larger; the fullest moment, and the phases that come next."""
    memory = plan.memory
    operator = memory.operator.removeprefix("aten.").removesuffix(".default")
    parts = sorted(((getattr(memory, name), name) for name in memory.CATEGORIES), reverse=True)
    largest = ", ".join(f"{name} {format_bytes(size)} ({size / memory.total_bytes:.0%})" for size, name in parts[:3])
    limit = memory.total_bytes + memory.headroom_bytes
    lines = [
        "what binds",
        *(f"  {sentence}" for sentence in plan.why[-1:]),
        f"  the peak of a {plan.cluster.rank_noun} is in {memory.phase}{f' ({operator})' if operator else ''}: "
        f"{format_bytes(memory.total_bytes)} of {format_bytes(limit)} that may be used",
        *_bounds(memory),
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
