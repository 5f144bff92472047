"""CUDA's caching allocator one request at a time, with an object a block: what `Replays` is held to.

Written after c10/cuda/CUDACachingAllocator.cpp as it stands, linked blocks and all, for expandable segments, too.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from frugal.planning.memory.allocator import (
    ENDLESS,
    LARGE_SEGMENT,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    SMALLEST_BLOCK,
    Replay,
    segment_bytes,
)


class Block:
    """A stretch of a segment. `previous` and `next` are its neighbours there."""

    __slots__ = ("address", "free", "mapped", "next", "previous", "size", "small")

    def __init__(self, address: int, size: int, small: bool, *, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.free = True
        self.mapped = mapped
        self.previous: Block | None = None
        self.next: Block | None = None


class CachingAllocator:
    """The allocator of one device with `limit_bytes` for segments."""

    def __init__(self, limit_bytes: int = ENDLESS, *, expandable_segments: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.least_refused_bytes = ENDLESS + SMALLEST_BLOCK  # of all segments with one that was refused
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by size, then address
        self._unmapped: dict[bool, list[tuple[int, Block]]] = {True: [], False: []}  # by address
        self._next_address = 0
        if expandable_segments:
            for small in (True, False):
                block = Block(self._new_address(ENDLESS), ENDLESS, small, mapped=False)
                self._unmapped[small].append((block.address, block))

    def allocate(self, size_bytes: int) -> Block | None:
        """A block for a request of more than 0 bytes; None: out of memory."""
        size = max(SMALLEST_BLOCK, -(-size_bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK)
        small = size <= SMALL_REQUEST
        block = self._take_free(size, small) or self._more(size, small)
        if block is None:
            self.release_cached()
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

    def release(self, block: Block) -> None:
        """The storage in `block` is gone."""
        self.allocated_bytes -= block.size
        block.free = True
        self._add_free(self._merge(block))

    def release_cached(self) -> None:
        """Give back what holds no live block: whole segments, or whole pages of an expandable one."""
        for small, pool in self._free.items():
            before, pool[:] = pool[:], []
            for _, _, block in before:
                if self.expandable_segments:
                    self._unmap(block, SMALL_SEGMENT if small else LARGE_SEGMENT)
                elif block.previous is None and block.next is None:
                    self.reserved_bytes -= block.size
                else:
                    insort(pool, (block.size, block.address, block))

    # Free blocks

    def _take_free(self, size: int, small: bool) -> Block | None:
        pool = self._free[small]
        index = bisect_left(pool, (size,))
        return pool.pop(index)[2] if index < len(pool) else None

    def _add_free(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block))

    def _drop_free(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]

    def _split(self, block: Block, size: int) -> Block:
        """Cut `block` to `size` and return the rest."""
        rest = Block(block.address + size, block.size - size, block.small, mapped=block.mapped)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        return rest

    def _merge(self, block: Block) -> Block:
        """`block` with its free neighbours, which leave the pool."""
        following = block.next
        if following is not None and following.free and following.mapped:
            self._drop_free(following)
            self._swallow(block, following)
        before = block.previous
        if before is not None and before.free and before.mapped:
            self._drop_free(before)
            self._swallow(before, block)
            return before
        return block

    @staticmethod
    def _swallow(block: Block, following: Block) -> None:
        block.size += following.size
        block.next = following.next
        if following.next is not None:
            following.next.previous = block

    # Segments

    def _more(self, size: int, small: bool) -> Block | None:
        """A free block of at least `size` from new memory; None: the limit is reached."""
        if self.expandable_segments:
            return self._expand(size, small)
        segment = segment_bytes(size)
        if not self._reserve(segment):
            return None
        return Block(self._new_address(segment), segment, small)

    def _reserve(self, size: int) -> bool:
        if self.reserved_bytes + size > self.limit_bytes:
            self.least_refused_bytes = min(self.least_refused_bytes, self.reserved_bytes + size)
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _new_address(self, size: int) -> int:
        address = self._next_address
        self._next_address += size + LARGE_SEGMENT - size % LARGE_SEGMENT  # segments are never neighbours
        return address

    def _expand(self, size: int, small: bool) -> Block | None:
        """Map pages at the lowest address where, with the free blocks around, there is room for `size`."""
        for _, hole in self._unmapped[small]:
            before = hole.previous
            start = before if before is not None and before.free and before.mapped else hole
            block: Block | None = start
            room = 0
            while block is not None and block.free and room < size:
                room += block.size
                block = block.next
            if room >= size:
                return self._map(start, size)
        return None

    def _map(self, start: Block, size: int) -> Block | None:
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
            if not self._reserve(mapped):
                if block.mapped:
                    self._add_free(block)
                return None
            index = bisect_left(self._unmapped[start.small], (hole.address,))
            del self._unmapped[start.small][index]
            if mapped < hole.size:
                rest = self._split(hole, mapped)
                self._unmapped[start.small].insert(index, (rest.address, rest))
            hole.mapped = True
            block = self._merge_taken(block, hole)
        return block

    def _merge_taken(self, block: Block, mapped: Block) -> Block:
        """`block`, which is in no pool, with the pages just mapped behind it and a free block behind those."""
        if mapped is not block:
            self._swallow(block, mapped)
        following = block.next
        if following is not None and following.free and following.mapped:
            self._drop_free(following)
            self._swallow(block, following)
        return block

    def _unmap(self, block: Block, page: int) -> None:
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
        insort(self._unmapped[block.small], (hole.address, hole))


def replay_one_by_one(
    sizes: Sequence[int], events: Sequence[int], limit_bytes: int = ENDLESS, *, expandable_segments: bool = False
) -> Replay:
    """The replay of a stream, by asking the allocator for each storage."""
    allocator = CachingAllocator(limit_bytes, expandable_segments=expandable_segments)
    blocks: dict[int, Block] = {}
    survived = True
    for storage in events:
        if storage in blocks:
            allocator.release(blocks.pop(storage))
        elif sizes[storage]:
            block = allocator.allocate(sizes[storage])
            if block is None:
                survived = False
                break
            blocks[storage] = block
    return Replay(
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, survived, allocator.least_refused_bytes
    )
