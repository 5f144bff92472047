"""cuBLAS's workspaces: memory that torch takes for the first product of a thread and keeps.

After aten/src/ATen/cuda/CublasHandlePool.cpp: a workspace for each handle and stream, and a handle for each thread;
cuBLASLt takes the same one. They are blocks of the caching allocator like any other. A training step multiplies on two
threads: forward on the main one, backward on autograd's own, activations that are recomputed included. Each asks right
after the first product's result was allocated.

Left out: products before the first forward, and CUBLAS_WORKSPACE_CONFIG.
"""

from dataclasses import replace

from frugal.planning.memory.timeline import BACKWARD, FORWARD, TEMPORARY, Timeline
from frugal.units import KIB, MIB

OPERATOR = "cuBLAS workspace"
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"))
_WITH_32_MIB = (9, 10, 12)  # Hopper and Blackwell, major compute capability


def workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Of one workspace (`parseChosenWorkspaceSize`): two blocks of 4 MiB and eight of 16 KiB, or 32 MiB."""
    return 32 * MIB if compute_capability[0] in _WITH_32_MIB else 2 * 4096 * KIB + 8 * 16 * KIB


def with_workspaces(timeline: Timeline, size_bytes: int) -> Timeline:
    """The timeline of a run with a workspace of `size_bytes` for forward, and one for backward."""
    positions = [position for phase in (FORWARD, BACKWARD) if (position := _first_product(timeline, phase)) is not None]
    if not positions:
        return timeline
    events = list(timeline.events)
    first = len(timeline.fixed)
    for number, position in reversed(list(enumerate(positions))):
        events.insert(position + 1, first + number)

    def moved(event: int) -> int:
        return event + sum(position < event for position in positions)

    names = (*timeline.names, OPERATOR)
    more = len(positions)
    return replace(
        timeline,
        fixed=timeline.fixed + (size_bytes,) * more,
        per_sample=timeline.per_sample + (0,) * more,
        categories=timeline.categories + (TEMPORARY,) * more,
        operators=timeline.operators + (len(names) - 1,) * more,
        modules=timeline.modules + (names.index(""),) * more,
        names=names,
        events=tuple(events),
        phases=tuple((name, moved(event)) for name, event in timeline.phases),
        empties=tuple(map(moved, timeline.empties)),
    )


def _first_product(timeline: Timeline, phase: str) -> int | None:
    """The number of the event at which the first product's result begins in a phase."""
    products = {number for number, name in enumerate(timeline.names) if name in _PRODUCTS}
    is_birth = timeline.is_birth
    for name, events in timeline.phase_ranges:
        if name == phase:
            for event in events:
                if timeline.operators[timeline.events[event]] in products and is_birth[event]:
                    return event
    return None
