"""CUDA's caching allocator, request by request, with linked blocks as in c10/cuda/CUDACachingAllocator.cpp.

Requests are rounded to 512 bytes; up to 1 MiB they come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB,
beyond that from their own, rounded to 2 MiB. The smallest free block that is large enough is taken, and split if the
rest is worth keeping. A free block merges with free neighbours. When the device is full, segments without a live block
are given back, and the request is tried once more. `empty_cache` gives them back, too: DeepSpeed calls it while it
initialises.

With `expandable_segments` there is one segment a pool that grows in pages (2 MiB and 20 MiB), so only holes between
live blocks are lost. A block that ends where the segment can grow is taken last, however well it fits. A limit is held
to what a request would take of segments (`alloc_block`), but it is pages that are mapped: what is reserved may exceed
`set_per_process_memory_fraction` by less than a page.

Of free blocks of one length the one at the lowest address is taken, so where a driver puts segments decides which
stay whole: at the lowest address with room in the multiples of `reservation_bytes` that it has reserved, else in new
ones at the highest free address. With ENDLESS all is reserved, so segments go up. A block in the middle of a segment
keeps a request of all of it from fitting: with attention's scores in memory up to 9 % of segments depend on it.
docs/recordings.md has what real cards show.

Left out: more than one stream (frugal's engine uses one; NCCL's buffers are part of the context), a limit to
splitting, rounding to powers of two, and garbage collection thresholds, which are off by default; that the address
space of an expandable segment ends at 9/8 of the device's memory; what else a process has mapped.

`replay` is `_caching_allocator.c` beside this. Tests hold it to the same in Python (`bench/caching_allocator.py`),
`python -m bench.recordings` to recordings of real cards, and `python -m bench.gpu.allocator` to torch's own allocator
on a GPU.
"""

from frugal.errors import RequestError
from frugal.units import MIB

try:
    from frugal.planning.memory._caching_allocator import replay as replay
except ImportError:
    raise RequestError(
        "frugal was installed without its model of CUDA's allocator",
        because="it is compiled where frugal is installed, and there was no C compiler",
        hint="install one (gcc) and then frugal again, or install frugal from its wheel",
    ) from None

SMALLEST_BLOCK = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from this size on a request gets a segment of its own
SEGMENT_ROUNDING = 2 * MIB
RESERVATION = 32 * MIB  # of addresses, by drivers of most cards that were recorded
ENDLESS = 1 << 60  # bytes; the address space of an expandable segment, and a device without a limit


def segment_bytes(size: int) -> int:
    """Return the bytes of the segment made for a request."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
