"""The caching allocators of device and host: what a step's storages take, under any limit of memory.

After c10/cuda/CUDACachingAllocator.cpp: requests are rounded to 512 bytes; up to 1 MiB they come from segments of
2 MiB, up to 10 MiB from segments of 20 MiB, beyond that from their own, rounded to 2 MiB. The smallest free block
that is large enough is taken, and split if the rest is worth keeping. A free block merges with free neighbours. When
the device is full, segments without a live block are given back, and the request is tried once more.

With `expandable_segments` there is one segment a pool that grows in pages (2 MiB and 20 MiB), so only holes between
live blocks are lost.

Left out: more than one stream (frugal's engine uses one; NCCL's buffers are part of the context), a limit to
splitting, rounding to powers of two, and garbage collection thresholds; all are off by default.

A search replays streams of ten thousand storages dozens of times, so

- lengths and addresses are in units of 512 bytes. A free block is no object: it is an address in the list of its
  length, found by its ends when a neighbour is freed. Half of all requests find a block of just their length.
- What a limit decides is which new memory is granted. Two limits that grant and refuse the same requests lead through
  the same replay, which is done once.

The tests have an allocator of linked blocks, as torch's is, and hold these replays to it.
"""

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from frugal.units import MIB

SMALLEST_BLOCK = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from this size on a request gets a segment of its own
SEGMENT_ROUNDING = 2 * MIB
ENDLESS = 1 << 60  # bytes; the address space of an expandable segment, and a device without a limit


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

    def under(self, limit_bytes: int = ENDLESS) -> Replay:
        """The replay on a device with `limit_bytes` for segments."""
        for known in self._known:
            if known.holds_under(limit_bytes):
                return known
        replay, _ = _replay(self._sizes, self._events, _Device(limit_bytes, self._expandable_segments))
        self._known.append(replay)
        return replay

    def block_bytes(self) -> tuple[int, ...]:
        """Of every storage the block it lives in where nothing limits the device; 0 for an empty one."""
        _, lengths = _replay(self._sizes, self._events, _Device(ENDLESS, self._expandable_segments))
        return tuple(length * SMALLEST_BLOCK for length in lengths)

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


def _replay(sizes: "array[int]", events: Sequence[int], device: "_Device") -> tuple[Replay, list[int]]:
    """How it went, and of every storage the length of its block, in units.

    What nine in ten events do is written out, because calls would take a fifth longer.
    """
    lengths = [-(-size // SMALLEST_BLOCK) for size in sizes]
    small, large = device.small, device.large
    addresses, blocks = [0] * len(lengths), [0] * len(lengths)  # where each storage's block is, and its length
    allocated = most_allocated = 0
    survived = True
    for storage in events:
        if length := blocks[storage]:
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
            blocks[storage] = length
            allocated += length
            if allocated > most_allocated:
                most_allocated = allocated
    most, refused = device.most_reserved, device.least_refused
    replay = Replay(most_allocated * SMALLEST_BLOCK, most * SMALLEST_BLOCK, survived, refused * SMALLEST_BLOCK)
    return replay, blocks


_Block = tuple[int, int]
"""Address and length, in units."""


class _Pool:
    """The free blocks of one of the two kinds of segments. Those of one segment only merge with each other.

    Attributes:
        least_rest: what is left of a block is split off from this length on.
        starts: length of every free block, by the address where it starts.
        ends: address of every free block, by the address where it ends.
        of_length: addresses of the free blocks of each length, in order. Some are empty.
        lengths: the keys of `of_length`, in order.
    """

    __slots__ = ("ends", "least_rest", "lengths", "of_length", "starts")

    def __init__(self, least_rest: int) -> None:
        self.least_rest = least_rest
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.of_length: dict[int, list[int]] = {}
        self.lengths: list[int] = []

    def take(self, wanted: int) -> _Block | None:
        """The smallest free block that is large enough, or as much of it as is wanted; None: there is none."""
        lengths, index = self.lengths, bisect_left(self.lengths, wanted)
        while index < len(lengths):
            length = lengths[index]
            if addresses := self.of_length[length]:
                address = addresses.pop(0)
                del self.starts[address], self.ends[address + length]
                return self.cut(address, length, wanted)
            del self.of_length[length], lengths[index]
        return None

    def cut(self, address: int, length: int, wanted: int) -> _Block:
        """As much of a block that is in no list as is wanted; the rest is free, if it is worth it."""
        if length - wanted < self.least_rest:
            return address, length
        self.add(address + wanted, length - wanted)
        return address, wanted

    def add(self, address: int, length: int) -> None:
        """A free block whose neighbours are not."""
        self.starts[address] = length
        self.ends[address + length] = address
        if length in self.of_length:
            insort(self.of_length[length], address)
        else:
            self.of_length[length] = [address]
            insort(self.lengths, length)

    def remove(self, address: int) -> int:
        """The free block at `address` is none any more; its length."""
        length = self.starts.pop(address)
        del self.ends[address + length]
        self.of_length[length].remove(address)
        return length

    def grow(self, wanted: int, reserve: Callable[[int], bool]) -> _Block | None:
        """A block of new memory, for which `reserve` is asked; None: it was refused."""
        raise NotImplementedError  # by what the pool is made of

    def release_cached(self) -> int:
        """Give back what holds no live block: its length in all."""
        raise NotImplementedError  # as above


class _SegmentPool(_Pool):
    """Made of segments. `segments`: length of each, by address."""

    __slots__ = ("next_address", "segments")

    def __init__(self, least_rest: int) -> None:
        super().__init__(least_rest)
        self.segments: dict[int, int] = {}
        self.next_address = 0

    def grow(self, wanted: int, reserve: Callable[[int], bool]) -> _Block | None:
        """From a new segment."""
        segment = segment_bytes(wanted * SMALLEST_BLOCK) // SMALLEST_BLOCK
        if not reserve(segment):
            return None
        address = self.next_address
        self.next_address += segment + 1  # segments are never neighbours
        self.segments[address] = segment
        return self.cut(address, segment, wanted)

    def release_cached(self) -> int:
        """The segments without a live block."""
        free = [(address, length) for address, length in self.segments.items() if self.starts.get(address) == length]
        for address, _ in free:
            del self.segments[address]
            self.remove(address)
        return sum(length for _, length in free)


class _ExpandablePool(_Pool):
    """One segment that grows in pages. `holes`: length of each stretch without memory, by address; never merged."""

    __slots__ = ("holes", "page")

    def __init__(self, page: int) -> None:
        super().__init__(least_rest=1)
        self.page = page
        self.holes = {0: ENDLESS // SMALLEST_BLOCK}

    def grow(self, wanted: int, reserve: Callable[[int], bool]) -> _Block | None:
        """At the lowest address where there is room, together with the free blocks around."""
        for hole in sorted(self.holes):
            start = self.ends.get(hole, hole)
            if self._has_room(start, wanted):
                return self._map(start, wanted, reserve)
        return None

    def _has_room(self, start: int, wanted: int) -> bool:
        """Whether free blocks and holes from `start` on are long enough together."""
        end = start
        while end < start + wanted:
            stretch = self.starts.get(end) or self.holes.get(end)
            if stretch is None:
                return False
            end += stretch
        return True

    def _map(self, start: int, wanted: int, reserve: Callable[[int], bool]) -> _Block | None:
        """Fill holes until the block at `start` is long enough. What is filled when memory ends stays so."""
        length = self.remove(start) if start in self.starts else 0
        while length < wanted:
            hole = start + length
            pages = min(-(-(wanted - length) // self.page) * self.page, self.holes[hole])
            if not reserve(pages):
                if length:
                    self.add(start, length)
                return None
            rest = self.holes.pop(hole) - pages
            if rest:
                self.holes[hole + pages] = rest
            length += pages
            if start + length in self.starts:
                length += self.remove(start + length)
        return self.cut(start, length, wanted)

    def release_cached(self) -> int:
        """The whole pages of free blocks."""
        released = 0
        for address, length in list(self.starts.items()):
            first = -(-address // self.page) * self.page
            end = (address + length) // self.page * self.page
            if first >= end:
                continue
            self.remove(address)
            if first > address:
                self.add(address, first - address)
            if end < address + length:
                self.add(end, address + length - end)
            self.holes[first] = end - first
            released += end - first
        return released


class _Device:
    """The two pools of a device with `limit_bytes` for their segments. The rest is in units.

    Attributes:
        reserved: in segments.
        most_reserved: so far.
        least_refused: in segments, with one that was refused.
    """

    def __init__(self, limit_bytes: int, expandable_segments: bool) -> None:
        self.limit = limit_bytes // SMALLEST_BLOCK
        self.small: _Pool
        self.large: _Pool
        if expandable_segments:
            self.small, self.large = (
                _ExpandablePool(page // SMALLEST_BLOCK) for page in (SMALL_SEGMENT, LARGE_SEGMENT)
            )
        else:
            self.small, self.large = _SegmentPool(least_rest=1), _SegmentPool(least_rest=SMALL + 1)
        self.reserved = self.most_reserved = 0
        self.least_refused = ENDLESS // SMALLEST_BLOCK + 1

    def more(self, pool: _Pool, length: int) -> _Block | None:
        """A block of new memory, for which a full device gives back what holds no live block; None: not enough."""
        block = pool.grow(length, self._reserve)
        if block is None:
            self.reserved -= self.small.release_cached() + self.large.release_cached()
            block = pool.grow(length, self._reserve)
        return block

    def _reserve(self, length: int) -> bool:
        """Whether there is so much for segments."""
        if self.reserved + length > self.limit:
            self.least_refused = min(self.least_refused, self.reserved + length)
            return False
        self.reserved += length
        self.most_reserved = max(self.most_reserved, self.reserved)
        return True


class HostAllocator:
    """What tensors take of a host's memory, bytes: now, and at most so far.

    Pinned memory comes in blocks, and a block that is freed is kept for the next one of its size
    (`CachingHostAllocatorImpl` in ATen/core/CachingHostAllocator.h).
    """

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._free_pinned: Counter[int] = Counter()  # bytes of a pinned block -> how many are kept

    @staticmethod
    def pinned_bytes(size_bytes: int) -> int:
        """Of the block for a pinned tensor: a power of two."""
        return 1 << (size_bytes - 1).bit_length()

    def allocate(self, size_bytes: int, *, pinned: bool = False) -> None:
        """A tensor begins, or the pinned block for one."""
        if pinned and self._free_pinned[size_bytes]:
            self._free_pinned[size_bytes] -= 1  # it is counted already
            return
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, size_bytes: int, *, pinned: bool = False) -> None:
        """It is gone."""
        if pinned:
            self._free_pinned[size_bytes] += 1
        else:
            self.live_bytes -= size_bytes
