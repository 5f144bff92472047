"""CUDA's caching allocator: a step's stream of storages replayed under any limit of memory.

After c10/cuda/CUDACachingAllocator.cpp: requests are rounded to 512 bytes; up to 1 MiB they come from segments of
2 MiB, up to 10 MiB from segments of 20 MiB, beyond that from their own, rounded to 2 MiB. The smallest free block
that is large enough is taken, and split if the rest is worth keeping. A free block merges with free neighbours. When
the device is full, segments without a live block are given back, and the request is tried once more.

With `expandable_segments` there is one segment a pool that grows in pages (2 MiB and 20 MiB), so only holes between
live blocks are lost.

Left out: more than one stream (frugal's engine uses one; NCCL's buffers are part of the context), a limit to
splitting, rounding to powers of two, and garbage collection thresholds; all are off by default.

`CachingAllocator` serves one request at a time. A search replays streams of ten thousand storages dozens of times, so
`Replays` does the same for a whole stream, and a test holds one to the other:

- Lengths and addresses are in units of 512 bytes. A free block is no object: it is an address in the list of its
  length, found by its ends when a neighbour is freed. Half of all requests find a block of just their length.
- What a limit decides is which new segments are granted. Two limits that grant and refuse the same ones lead through
  the same replay, which is done once.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frugal.units import MIB

SMALLEST_BLOCK = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from this size on a request gets a segment of its own
SEGMENT_ROUNDING = 2 * MIB
ENDLESS = 1 << 60  # bytes; the address space of an expandable segment, and a device without a limit


class _Block:
    """A stretch of a segment. `previous` and `next` are its neighbours there."""

    __slots__ = ("address", "free", "mapped", "next", "previous", "size", "small")

    def __init__(self, address: int, size: int, small: bool, *, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.free = True
        self.mapped = mapped
        self.previous: _Block | None = None
        self.next: _Block | None = None


class CachingAllocator:
    """The allocator of one device with `limit_bytes` for segments."""

    def __init__(self, limit_bytes: int = ENDLESS, *, expandable_segments: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.least_refused_bytes = ENDLESS + SMALLEST_BLOCK  # of all segments with one that was refused
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}  # by size, then address
        self._unmapped: dict[bool, list[tuple[int, _Block]]] = {True: [], False: []}  # by address
        self._next_address = 0
        if expandable_segments:
            for small in (True, False):
                block = _Block(self._new_address(ENDLESS), ENDLESS, small, mapped=False)
                self._unmapped[small].append((block.address, block))

    def allocate(self, size_bytes: int) -> _Block | None:
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

    def release(self, block: _Block) -> None:
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

    def _take_free(self, size: int, small: bool) -> _Block | None:
        pool = self._free[small]
        index = bisect_left(pool, (size,))
        return pool.pop(index)[2] if index < len(pool) else None

    def _add_free(self, block: _Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block))

    def _drop_free(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]

    def _split(self, block: _Block, size: int) -> _Block:
        """Cut `block` to `size` and return the rest."""
        rest = _Block(block.address + size, block.size - size, block.small, mapped=block.mapped)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        return rest

    def _merge(self, block: _Block) -> _Block:
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
    def _swallow(block: _Block, following: _Block) -> None:
        block.size += following.size
        block.next = following.next
        if following.next is not None:
            following.next.previous = block

    # Segments

    def _more(self, size: int, small: bool) -> _Block | None:
        """A free block of at least `size` from new memory; None: the limit is reached."""
        if self.expandable_segments:
            return self._expand(size, small)
        segment = segment_bytes(size)
        if not self._reserve(segment):
            return None
        return _Block(self._new_address(segment), segment, small)

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

    def _expand(self, size: int, small: bool) -> _Block | None:
        """Map pages at the lowest address where, with the free blocks around, there is room for `size`."""
        for _, hole in self._unmapped[small]:
            before = hole.previous
            start = before if before is not None and before.free and before.mapped else hole
            block: _Block | None = start
            room = 0
            while block is not None and block.free and room < size:
                room += block.size
                block = block.next
            if room >= size:
                return self._map(start, size)
        return None

    def _map(self, start: _Block, size: int) -> _Block | None:
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

    def _merge_taken(self, block: _Block, mapped: _Block) -> _Block:
        """`block`, which is in no pool, with the pages just mapped behind it and a free block behind those."""
        if mapped is not block:
            self._swallow(block, mapped)
        following = block.next
        if following is not None and following.free and following.mapped:
            self._drop_free(following)
            self._swallow(block, following)
        return block

    def _unmap(self, block: _Block, page: int) -> None:
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


def segment_bytes(size: int) -> int:
    """Bytes of the segment made for a request."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


SMALL = SMALL_REQUEST // SMALLEST_BLOCK  # units


@dataclass(frozen=True)
class Replay:
    """How a stream of storages went: highest bytes in live blocks and in segments, and whether all were granted.

    It goes the same way under every limit from `peak_reserved_bytes` to below `refused_bytes`: the least that segments
    would have held with one that was refused.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    survived: bool
    refused_bytes: int

    def holds_under(self, limit_bytes: int) -> bool:
        """Whether the same segments are granted and refused under this limit."""
        return self.peak_reserved_bytes <= limit_bytes < self.refused_bytes


class Replays:
    """Storages of `sizes` bytes that live and die as `events` says: an index at birth, again at death."""

    def __init__(self, sizes: Sequence[int], events: Sequence[int], *, expandable_segments: bool = False) -> None:
        self._sizes = array("q", sizes)  # a fifth of a list, and there is one for each micro-batch
        self._events = events
        self._expandable_segments = expandable_segments
        self._known: list[Replay] = []

    @property
    def num_replays(self) -> int:
        """Replays that were done, for all the limits that were asked for."""
        return len(self._known)

    def under(self, limit_bytes: int = ENDLESS) -> Replay:
        """The replay on a device with `limit_bytes` for segments."""
        for known in self._known:
            if known.holds_under(limit_bytes):
                return known
        if self._expandable_segments:
            found = replay_one_by_one(self._sizes, self._events, limit_bytes, expandable_segments=True)
        else:
            found = _replay(self._sizes, self._events, limit_bytes)
        self._known.append(found)
        return found

    def smallest_capacity(self, wanted_bytes: int = ENDLESS, tolerance: float = 0.002) -> int:
        """The fewest bytes for segments with which the whole stream survives, at most `tolerance` too many.

        Less than the bytes reserved without a limit, because a full device gives back what it does not use. Bisection:
        between what is allocated at the peak and what is reserved without a limit. Where `wanted_bytes` are enough, the
        result is never above them.
        """
        first = self.under(wanted_bytes)
        low = wanted_bytes
        if first.survived:
            low = first.peak_allocated_bytes
        else:
            first = self.under()
            low = max(low, first.peak_allocated_bytes)
        high = first.peak_reserved_bytes
        while high - low > max(SEGMENT_ROUNDING, tolerance * low):
            middle = (low + high) // 2
            attempt = self.under(middle)
            if attempt.survived:
                high = min(middle, attempt.peak_reserved_bytes)
            else:
                low = middle
        return high


def replay_one_by_one(
    sizes: Sequence[int], events: Sequence[int], limit_bytes: int = ENDLESS, *, expandable_segments: bool = False
) -> Replay:
    """The same by asking the allocator for each storage: in half the speed, and also in expandable segments."""
    allocator = CachingAllocator(limit_bytes, expandable_segments=expandable_segments)
    blocks: dict[int, Any] = {}
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


def _replay(sizes: "array[int]", events: Sequence[int], limit_bytes: int) -> Replay:
    """What nine in ten events do is written out, because calls would take a fifth longer."""
    lengths = [-(-size // SMALLEST_BLOCK) for size in sizes]
    device = _Device(limit_bytes // SMALLEST_BLOCK)
    small, large = device.small, device.large
    addresses, held = [0] * len(lengths), [0] * len(lengths)  # where each live storage's block is, and its length
    allocated = most_allocated = 0
    survived = True
    for storage in events:
        if length := held[storage]:
            held[storage] = 0
            allocated -= length
            pool = large if lengths[storage] > SMALL else small
            start = addresses[storage]
            end = start + length
            if end in pool.starts:
                more = pool.starts.pop(end)
                pool.of_length[more].remove(end)
                end += more
            if start in pool.ends:
                before = pool.ends.pop(start)
                pool.of_length[start - before].remove(before)
                start = before
            pool.add(start, end - start)
        elif length := lengths[storage]:
            pool = large if length > SMALL else small
            if length in pool.of_length and (same := pool.of_length[length]):
                address = addresses[storage] = same.pop(0)
                del pool.starts[address], pool.ends[address + length]
            else:
                block = pool.take(length) or device.more(pool, length)
                if block is None:
                    survived = False
                    break
                addresses[storage], length = block
            held[storage] = length
            allocated += length
            if allocated > most_allocated:
                most_allocated = allocated
    most, refused = device.most_reserved, device.least_refused
    return Replay(most_allocated * SMALLEST_BLOCK, most * SMALLEST_BLOCK, survived, refused * SMALLEST_BLOCK)


_ReplayBlock = tuple[int, int]
"""Address and length, in units."""


class _Pool:
    """The free blocks of one of the two kinds of segments. Those of one segment only merge with each other.

    Attributes:
        least_rest: what is left of a block is split off from this length on.
        segments: length of every segment, by address.
        starts: length of every free block, by the address where it starts.
        ends: address of every free block, by the address where it ends.
        of_length: addresses of the free blocks of each length, in order. Some are empty.
        lengths: the keys of `of_length`, in order.
        next_address: of a new segment.
    """

    __slots__ = ("ends", "least_rest", "lengths", "next_address", "of_length", "segments", "starts")

    def __init__(self, least_rest: int) -> None:
        self.least_rest = least_rest
        self.segments: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.of_length: dict[int, list[int]] = {}
        self.lengths: list[int] = []
        self.next_address = 0

    def take(self, length: int) -> _ReplayBlock | None:
        """The smallest free block that is large enough, or as much of it as is wanted; None: there is none."""
        lengths, index = self.lengths, bisect_left(self.lengths, length)
        while index < len(lengths):
            found = lengths[index]
            if addresses := self.of_length[found]:
                address = addresses.pop(0)
                del self.starts[address], self.ends[address + found]
                return self.cut(address, found, length)
            del self.of_length[found], lengths[index]
        return None

    def cut(self, address: int, found: int, length: int) -> _ReplayBlock:
        """As much of a block that is in no list as is wanted; the rest is free, if it is worth it."""
        if found - length < self.least_rest:
            return address, found
        self.add(address + length, found - length)
        return address, length

    def add(self, address: int, length: int) -> None:
        """A free block whose neighbours are not."""
        self.starts[address] = length
        self.ends[address + length] = address
        if length in self.of_length:
            insort(self.of_length[length], address)
        else:
            self.of_length[length] = [address]
            insort(self.lengths, length)

    def new_segment(self, segment: int, length: int) -> _ReplayBlock:
        """A block of a new segment."""
        address = self.next_address
        self.next_address += segment + 1  # segments are never neighbours
        self.segments[address] = segment
        return self.cut(address, segment, length)

    def release_cached(self) -> int:
        """Give back the segments without a live block: their length in all."""
        free = [(address, length) for address, length in self.segments.items() if self.starts.get(address) == length]
        for address, length in free:
            del self.segments[address], self.starts[address], self.ends[address + length]
            self.of_length[length].remove(address)
        return sum(length for _, length in free)


class _Device:
    """The two pools of a device with `limit` for their segments. Everything is in units.

    Attributes:
        reserved: in segments.
        most_reserved: so far.
        least_refused: in segments, with one that was refused.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.small, self.large = _Pool(least_rest=1), _Pool(least_rest=SMALL + 1)
        self.reserved = self.most_reserved = 0
        self.least_refused = ENDLESS // SMALLEST_BLOCK + 1

    def more(self, pool: _Pool, length: int) -> _ReplayBlock | None:
        """A block of a new segment, for which a full device gives back what holds no live block; None: not enough."""
        segment = segment_bytes(length * SMALLEST_BLOCK) // SMALLEST_BLOCK
        if self._is_refused(segment):
            self.reserved -= self.small.release_cached() + self.large.release_cached()
            if self._is_refused(segment):
                return None
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        return pool.new_segment(segment, length)

    def _is_refused(self, segment: int) -> bool:
        if self.reserved + segment <= self.limit:
            return False
        self.least_refused = min(self.least_refused, self.reserved + segment)
        return True
