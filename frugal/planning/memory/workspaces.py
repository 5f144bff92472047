"""Memory that CUDA's libraries and kernels request from torch's allocator, and that depends on the card.

**cuBLAS's workspaces**, which torch takes for the first product of a thread and keeps. After
aten/src/ATen/cuda/CublasHandlePool.cpp: a workspace for each handle and stream, and a handle for each thread; cuBLASLt,
which adds biases, takes the same one in torch 2.13 and has its own in others. A training step multiplies on two
threads: forward on the main one, backward on autograd's own, activations that are recomputed included. Each asks right
after the first product's result was allocated.

**Sums over rows**, such as the gradient of a bias of `width` elements over all tokens. Where one block of threads
would add too many, several share a column, and meet in scratch memory that lives inside the kernel. A dry run of one
micro-batch counts it exactly, and that of all other sums (`frugal.dryrun.trace.kernel_memory`). It is no affine
function of the micro-batch, so a search over micro-batches takes the most that keeps every multiprocessor busy: blocks
of 128 threads, 32 across with 4 outputs each and 4 down.

Left out: products before the first forward, CUBLAS_WORKSPACE_CONFIG; in a search scratch of other sums.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress

from frugal.planning.memory.timeline import BACKWARD, FORWARD, TEMPORARY, Timeline
from frugal.units import KIB, MIB

WORKSPACE, LT_WORKSPACE, SCRATCH = "cuBLAS workspace", "cuBLASLt workspace", "scratch of a sum"
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"))
_SUMS = frozenset(("aten.sum.dim_IntList",))
_WITH_32_MIB = (9, 10, 12)  # Hopper and Blackwell, major compute capability
_HOPPER_ALONE = (2, 11)  # the last torch under which recordings of B200 and RTX PRO 6000 have the smaller ones
_WITH_ONE_FOR_ALL = (2, 13)  # recordings under 2.4, 2.9, 2.11 and 2.14 have 1 MiB of cuBLASLt's
LAST_WITH_LT_IN_A_CALL = (2, 6)  # until then it lives inside a call
_OUTPUTS_OF_A_BLOCK, _THREADS_OF_A_BLOCK = 128, 128
_FEWEST_ROWS, _ROWS_ALONE = 4 * 16, 4 * 255  # of a block that shares its columns at least, of one that does not at most
ANY_ROWS = 1 << 62


def workspace_bytes(compute_capability: tuple[int, int], torch_version: tuple[int, int] | None = None) -> int:
    """Return the bytes of one workspace (`parseChosenWorkspaceSize`): two blocks of 4 MiB and eight of 16 KiB, or 32
    MiB. `torch_version`: None is the one that frugal is made for.
    """
    is_older = torch_version is not None and torch_version <= _HOPPER_ALONE
    large = _WITH_32_MIB[:1] if is_older else _WITH_32_MIB
    return 32 * MIB if compute_capability[0] in large else 2 * 4096 * KIB + 8 * 16 * KIB


def lt_workspace_bytes(torch_version: tuple[int, int] | None = None) -> int:
    """Return the bytes of cuBLASLt's own workspace (`parseCUDABlasLtWorkspaceSize`), 0 where it takes cuBLAS's.

    `torch_version`: None is the one that frugal is made for.
    """
    return 0 if torch_version in (None, _WITH_ONE_FOR_ALL) else MIB


def scratch_bytes(width: int, resident_threads: int, most_rows: int = ANY_ROWS) -> int:
    """Return the scratch of a sum over rows of `width` columns, on a card that holds `resident_threads` at once.

    Of as many rows as keep it busy, which is the most but for rows beyond 256 x 4 x the blocks of a column; or of
    `most_rows`, which may be too few.
    """
    across, blocks = -(-width // _OUTPUTS_OF_A_BLOCK), resident_threads // _THREADS_OF_A_BLOCK
    if width % 4 or width < _OUTPUTS_OF_A_BLOCK or across > blocks:
        return 0
    down = -(-blocks // across)
    down = min(down, -(-most_rows // _FEWEST_ROWS)) if most_rows > _ROWS_ALONE else 0
    return 4 * width * down * _OUTPUTS_OF_A_BLOCK if down > 1 else 0


def with_workspaces(timeline: Timeline, size_bytes: int) -> Timeline:
    """Return the timeline of a run with a workspace of `size_bytes` for forward, and one for backward."""
    positions = (_first_product(timeline, phase) for phase in (FORWARD, BACKWARD))
    return _with(timeline, {each: size_bytes for each in positions if each is not None}, WORKSPACE, is_kept=True)


def with_scratch(
    timeline: Timeline,
    widths: Collection[int],
    element_bytes: int,
    resident_threads: int,
    most_rows: int = ANY_ROWS,
) -> Timeline:
    """Return the timeline with the scratch of gradients that are sums over rows, at most over `most_rows`.

    They are the sums in backward of `widths` elements, those of trainable parameters, with so many bytes each.
    """
    sums = {number for number, name in enumerate(timeline.names) if name in _SUMS}
    wanted: dict[int, int] = {}  # storage -> bytes of scratch
    for storage in _where(timeline.operators, sums):
        width = timeline.fixed[storage] // element_bytes
        if width in widths and not timeline.per_sample[storage]:
            wanted[storage] = scratch_bytes(width, resident_threads, most_rows)
    asked = {}
    for event in _where(timeline.events, wanted):
        size_bytes = wanted.pop(timeline.events[event], 0)  # at its birth, which comes first
        if size_bytes and timeline.phase_of(event) == BACKWARD:
            asked[event] = size_bytes
    return _with(timeline, asked, SCRATCH, is_kept=False)


def _where(numbers: Sequence[int], wanted: Collection[int]) -> list[int]:
    """Return the positions of the wanted numbers; half the time of a loop over a hundred thousand."""
    return [] if not wanted else list(compress(range(len(numbers)), map(wanted.__contains__, numbers)))


def _with(timeline: Timeline, requests: Mapping[int, int], operator: str, *, is_kept: bool) -> Timeline:
    """Return the timeline with requests of `operator`: event, in order -> bytes that are requested right after it, and
    live beyond the kernel where they are kept.
    """
    if not requests:
        return timeline
    events: list[int] = []
    start = 0
    for storage, after in enumerate(requests, len(timeline.fixed)):
        events += timeline.events[start : after + 1]
        events += [storage] if is_kept else [storage, storage]
        start = after + 1
    events += timeline.events[start:]

    def moved(event: int) -> int:
        return event + (1 if is_kept else 2) * sum(after < event for after in requests)

    more = len(requests)
    return replace(
        timeline,
        fixed=timeline.fixed + tuple(requests.values()),
        per_sample=timeline.per_sample + (0,) * more,
        categories=timeline.categories + (TEMPORARY,) * more,
        operators=timeline.operators + (len(timeline.names),) * more,
        modules=timeline.modules + (timeline.names.index(""),) * more,
        names=(*timeline.names, operator),
        events=tuple(events),
        phases=tuple((name, moved(event)) for name, event in timeline.phases),
        empties=tuple(map(moved, timeline.empties)),
    )


def _first_product(timeline: Timeline, phase: str) -> int | None:
    """Return the number of the event at which the first product's result begins in a phase."""
    products = {number for number, name in enumerate(timeline.names) if name in _PRODUCTS}
    of_phase = (event for name, events in timeline.phase_ranges if name == phase for event in events)
    made = (event for event in of_phase if timeline.operators[timeline.events[event]] in products)
    births = (event for event in made if timeline.events.index(timeline.events[event]) == event)
    return next(births, None)  # which come soon: to find all births of a timeline takes longer
