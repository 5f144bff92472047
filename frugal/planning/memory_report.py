"""A plan's memory as text: the breakdown of the fullest device, what binds, and what is assumed."""

from frugal.config.hardware.cluster import NOMINAL_SHARE, Device
from frugal.planning.memory.breakdown import MemoryBreakdown, loading_host_bytes
from frugal.planning.memory.interval import Bounds, of_device
from frugal.planning.plan import Plan
from frugal.units import GIB, format_bytes

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
