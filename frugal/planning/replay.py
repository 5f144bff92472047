"""A step's stream of storages through CUDA's caching allocator, under any limit.

`frugal.planning.allocator` says what the allocator does, one request at a time, and a test holds this to it. A search
replays streams of ten thousand storages dozens of times, so here the same is told for a whole stream:

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

from frugal.planning.allocator import (
    ENDLESS,
    SEGMENT_ROUNDING,
    SMALL_REQUEST,
    SMALLEST_BLOCK,
    CachingAllocator,
    segment_bytes,
)

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


_Block = tuple[int, int]
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

    def take(self, length: int) -> _Block | None:
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

    def cut(self, address: int, found: int, length: int) -> _Block:
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

    def new_segment(self, segment: int, length: int) -> _Block:
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

    def more(self, pool: _Pool, length: int) -> _Block | None:
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
