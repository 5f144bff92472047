"""CUDA's caching allocator in Python, with linked blocks as in c10/cuda/CUDACachingAllocator.cpp.

The compiled one (`frugal/planning/memory/_caching_allocator.c`) is held to it, and it is easier to read: see
`frugal.planning.memory.caching_allocator` for what both leave out.
"""

from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass

from frugal.planning.memory.caching_allocator import (
    ENDLESS,
    LARGE_SEGMENT,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    SMALLEST_BLOCK,
    segment_bytes,
)

Outcome = tuple[int, int, bool, int, int]
"""Peaks of bytes in live blocks and in segments, whether all requests were granted, and the bytes of segments that
were at most granted and at least refused, each with what was asked for."""


def segment_address(segments: list[tuple[int, int]], size: int, reservation: int) -> int:
    """Return where a driver puts a segment of `size` bytes: at the lowest address with room in what it has reserved.

    Where none has room, the driver reserves at the highest free address, whole multiples of `reservation` bytes.

    Args:
        segments: start and end of each, in order.
        size: bytes.
        reservation: bytes; with `ENDLESS` all is reserved, so segments go to the lowest free address.
    """
    needed = -(-size // reservation) * reservation
    address = before = 0
    for start, end in [*segments, (ENDLESS, ENDLESS)]:
        low = min(-(-before // reservation) * reservation, start)
        high = max(start // reservation * reservation, before)
        for first, last in ((before, low), (high, start)):  # what is reserved between two segments
            if last - first >= size:
                return first
        if high - low >= needed:
            address = high - needed
        before = end
    return address


def replay(
    sizes: "array[int]",
    events: "array[int]",
    empties: "array[int]",
    expandable_segments: bool,
    limit_bytes: int,
    blocks: "array[int] | None" = None,
    reservation_bytes: int = ENDLESS,
) -> Outcome:
    """Play storages of `sizes` bytes that begin and end as `events` says, an index at birth and again at death.

    Args:
        sizes: bytes of every storage, signed 64-bit as all arrays.
        events: indices into `sizes`.
        empties: numbers of the events before which the cache is emptied, in order.
        expandable_segments: whether the allocator has them.
        limit_bytes: the most that segments may take.
        blocks: is given the bytes of each storage's block; as long as `sizes`.
        reservation_bytes: see `segment_address`.
    """
    allocator = CachingAllocator(limit_bytes, expandable_segments=expandable_segments, reservation=reservation_bytes)
    live: dict[int, LinkedBlock] = {}
    emptied, survived = set(empties), True
    for number, storage in enumerate(events):
        if number in emptied:
            allocator.empty_cache()
        if storage in live:
            allocator.release(live.pop(storage))
        elif sizes[storage]:
            block = allocator.allocate(sizes[storage])
            if block is None:
                survived = False
                break
            live[storage] = block
            if blocks is not None:
                blocks[storage] = block.size
    return (
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, survived, allocator.most_granted_bytes,
        allocator.least_refused_bytes,
    )  # fmt: skip


@dataclass(eq=False, slots=True)
class LinkedBlock:
    """A stretch of a segment. `previous` and `next` are its neighbours there."""

    address: int
    size: int
    small: bool
    mapped: bool = True
    free: bool = True
    previous: "LinkedBlock | None" = None
    next: "LinkedBlock | None" = None


class CachingAllocator:
    """The allocator of one device with `limit_bytes` for segments."""

    def __init__(
        self, limit_bytes: int = ENDLESS, *, expandable_segments: bool = False, reservation: int = ENDLESS
    ) -> None:
        self.limit_bytes, self.reservation = limit_bytes, reservation
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.most_granted_bytes = 0  # of all segments with one that was granted
        self.least_refused_bytes = ENDLESS + SMALLEST_BLOCK  # of all segments with one that was refused
        self._free: dict[bool, list[tuple[int, int, LinkedBlock]]] = {True: [], False: []}  # by size, then address
        self._unmapped: dict[bool, list[tuple[int, LinkedBlock]]] = {True: [], False: []}  # by address
        self._segments: list[tuple[int, int]] = []  # start and end of each, in order
        if expandable_segments:
            for small in (True, False):
                block = LinkedBlock(ENDLESS * small, ENDLESS, small, mapped=False)
                self._unmapped[small].append((block.address, block))

    def allocate(self, size_bytes: int) -> LinkedBlock | None:
        """Return a block for a request of more than 0 bytes; None: out of memory."""
        size = max(SMALLEST_BLOCK, -(-size_bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK)
        small = size <= SMALL_REQUEST
        block = self._take_free(size, small) or self._more(size, small)
        if block is None:
            self.empty_cache()
            block = self._more(size, small)
            if block is None:
                return None
        rest = block.size - size
        if rest >= SMALLEST_BLOCK and (small or self.expandable_segments or rest > SMALL_REQUEST):
            self._add_free(self._split(block, size))
        block.free = False
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def release(self, block: LinkedBlock) -> None:
        """Free the block of a storage that has ended."""
        self.allocated_bytes -= block.size
        block.free = True
        self._add_free(self._merge(block))

    def empty_cache(self) -> None:
        """Give back what holds no live block: whole segments, or whole pages of an expandable one."""
        for small, pool in self._free.items():
            before, pool[:] = pool[:], []
            for _, _, block in before:
                if self.expandable_segments:
                    self._unmap(block, SMALL_SEGMENT if small else LARGE_SEGMENT)
                elif block.previous is None and block.next is None:
                    self.reserved_bytes -= block.size
                    self._segments.remove((block.address, block.address + block.size))
                else:
                    insort(pool, (block.size, block.address, block))

    # Free blocks

    def _take_free(self, size: int, small: bool) -> LinkedBlock | None:
        pool = self._free[small]
        index = bisect_left(pool, (size,))
        if index == len(pool):
            return None
        while index + 1 < len(pool) and self._room(pool[index + 1][2]) < self._room(pool[index][2]):
            index += 1
        return pool.pop(index)[2]

    def _room(self, block: LinkedBlock) -> int:
        """Return what a block can grow to: its size, but at the edge of an expandable segment."""
        following = block.next
        return block.size + (following.size if following is not None and not following.mapped else 0)

    def _add_free(self, block: LinkedBlock) -> None:
        insort(self._free[block.small], (block.size, block.address, block))

    def _drop_free(self, block: LinkedBlock) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]

    def _split(self, block: LinkedBlock, size: int) -> LinkedBlock:
        """Cut `block` to `size` and return the rest."""
        rest = LinkedBlock(block.address + size, block.size - size, block.small, mapped=block.mapped)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        return rest

    def _merge(self, block: LinkedBlock) -> LinkedBlock:
        """Return `block` with its free neighbours, which leave the pool."""
        self._merge_next(block)
        before = block.previous
        if before is None or not before.free or not before.mapped:
            return block
        self._drop_free(before)
        self._swallow(before, block)
        return before

    def _merge_next(self, block: LinkedBlock) -> None:
        following = block.next
        if following is not None and following.free and following.mapped:
            self._drop_free(following)
            self._swallow(block, following)

    @staticmethod
    def _swallow(block: LinkedBlock, following: LinkedBlock) -> None:
        block.size += following.size
        block.next = following.next
        if following.next is not None:
            following.next.previous = block

    # Segments

    def _more(self, size: int, small: bool) -> LinkedBlock | None:
        """Return a free block of at least `size` from new memory; None: the limit is reached."""
        segment = segment_bytes(size)
        if self.reserved_bytes + segment > self.limit_bytes:
            self.least_refused_bytes = min(self.least_refused_bytes, self.reserved_bytes + segment)
            return None
        self.most_granted_bytes = max(self.most_granted_bytes, self.reserved_bytes + segment)
        if self.expandable_segments:
            return self._expand(size, small)
        self._reserve(segment)
        address = segment_address(self._segments, segment, self.reservation)
        insort(self._segments, (address, address + segment))
        return LinkedBlock(address, segment, small)

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _expand(self, size: int, small: bool) -> LinkedBlock:
        """Map pages at the lowest address where, with the free blocks around, there is room for `size`."""
        for _, hole in self._unmapped[small]:
            before = hole.previous
            start = before if before is not None and before.free and before.mapped else hole
            block: LinkedBlock | None = start
            room = 0
            while block is not None and block.free and room < size:
                room += block.size
                block = block.next
            if room >= size:
                return self._map(start, size)
        raise AssertionError("the address space has no end")

    def _map(self, start: LinkedBlock, size: int) -> LinkedBlock:
        """Map from `start` on until the free block there has `size`; it leaves the pool."""
        page = SMALL_SEGMENT if start.small else LARGE_SEGMENT
        block = start
        if block.mapped:
            self._drop_free(block)
        while not block.mapped or block.size < size:
            hole = block.next if block.mapped else block
            assert hole is not None and not hole.mapped
            missing = size - block.size if block.mapped else min(size, hole.size)
            mapped = min(-(-missing // page) * page, hole.size)
            self._reserve(mapped)
            index = bisect_left(self._unmapped[start.small], (hole.address,))
            del self._unmapped[start.small][index]
            if mapped < hole.size:
                rest = self._split(hole, mapped)
                self._unmapped[start.small].insert(index, (rest.address, rest))
            hole.mapped = True
            if hole is not block:
                self._swallow(block, hole)
            self._merge_next(block)
        return block

    def _unmap(self, block: LinkedBlock, page: int) -> None:
        """Give back the whole pages of a free block that has left the pool; what is left of it goes back."""
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if end <= start:
            self._add_free(block)
            return
        hole = block
        if start > block.address:
            hole = self._split(block, start - block.address)
            self._add_free(block)
        if end < hole.address + hole.size:
            self._add_free(self._split(hole, end - start))
        hole.mapped = False
        self.reserved_bytes -= hole.size
        following, before = hole.next, hole.previous
        if following is not None and not following.mapped:
            self._unmapped[block.small].remove((following.address, following))
            self._swallow(hole, following)
        if before is not None and not before.mapped:
            self._swallow(before, hole)
        else:
            insort(self._unmapped[block.small], (hole.address, hole))
