"""CUDA's caching allocator: what a step's storages take, under any limit of memory.

After c10/cuda/CUDACachingAllocator.cpp: requests are rounded to 512 bytes; up to 1 MiB they come from segments of
2 MiB, up to 10 MiB from segments of 20 MiB, beyond that from their own, rounded to 2 MiB. The smallest free block
that is large enough is taken, and split if the rest is worth keeping. A free block merges with free neighbours. When
the device is full, segments without a live block are given back, and the request is tried once more. `empty_cache`
gives them back, too: DeepSpeed calls it while it initialises.

With `expandable_segments` there is one segment a pool that grows in pages (2 MiB and 20 MiB), so only holes between
live blocks are lost. A block that ends where the segment can grow is taken last, however well it fits. A limit is held
to what a request would take of segments (`alloc_block`), but it is pages that are mapped: what is reserved may exceed
`set_per_process_memory_fraction` by less than a page.

Left out: more than one stream (frugal's engine uses one; NCCL's buffers are part of the context), a limit to
splitting, rounding to powers of two, and garbage collection thresholds, which are off by default; that the address
space of an expandable segment ends at 9/8 of the device's memory.

`python -m bench.gpu.allocator` holds the replays to torch's own allocator, byte for byte.

A search replays streams of ten thousand storages dozens of times, so

- lengths and addresses are in units of 512 bytes. A free block is no object: it is an address in the list of its
  length, found by its ends when a neighbour is freed. Half of all requests find a block of just their length.
- What a limit decides is which new memory is granted. Two limits that grant and refuse the same requests lead through
  the same replay, which is done once.
- A replay is known again by what was replayed (`KNOWN`), so another plan of the same model, or another process that
  was given what this one knows, need not do it again.

The tests have an allocator of linked blocks, as torch's is, and hold these replays to it.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise

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

    It goes the same way under every limit from `granted_bytes`, the most that was asked for and granted, to below
    `refused_bytes`, the least that was refused; both with what segments held then. Granted are the bytes reserved at
    their peak, but for expandable segments.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    survived: bool
    granted_bytes: int
    refused_bytes: int

    def holds_under(self, limit_bytes: int) -> bool:
        """Whether the same segments are granted and refused under this limit."""
        return self.granted_bytes <= limit_bytes < self.refused_bytes

    @property
    def needed_bytes(self) -> int:
        """The least limit that neither refuses what was granted nor is exceeded."""
        return max(self.granted_bytes, self.peak_reserved_bytes)


KNOWN: dict[str, list[Replay]] = {}
"""What replays have shown, by the SHA-256 of what was replayed."""


class Replays:
    """Storages of `sizes` bytes that live and die as `events` says: an index at birth, again at death.

    `empties`: numbers of the events before which the cache is emptied, in order.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        events: Sequence[int],
        empties: Sequence[int] = (),
        *,
        expandable_segments: bool = False,
    ) -> None:
        self._sizes = array("q", sizes)  # a fifth of a list, and there is one for each micro-batch
        self._events = events
        self._empties = empties
        self._expandable_segments = expandable_segments

    @cached_property
    def _known(self) -> list[Replay]:
        stream = sha256(b"expandable" if self._expandable_segments else b"")
        for part in (self._sizes, array("q", self._events), array("q", self._empties)):
            stream.update(f"{len(part)} ".encode())
            stream.update(part)
        return KNOWN.setdefault(stream.hexdigest(), [])

    def under(self, limit_bytes: int = ENDLESS) -> Replay:
        """The replay on a device with `limit_bytes` for segments."""
        for known in self._known:
            if known.holds_under(limit_bytes):
                return known
        replay, _ = self._replay(limit_bytes)
        self._known.append(replay)
        return replay

    def survives(self, limit_bytes: int) -> bool:
        """Whether the whole stream is granted on a device with so much, and takes no more."""
        replay = self.under(limit_bytes)
        return replay.survived and replay.peak_reserved_bytes <= limit_bytes

    def block_bytes(self) -> tuple[int, ...]:
        """Of every storage the block it lives in where nothing limits the device; 0 for an empty one."""
        _, lengths = self._replay(ENDLESS)
        return tuple(length * SMALLEST_BLOCK for length in lengths)

    def smallest_capacity(self, wanted_bytes: int = ENDLESS, tolerance: float = 0.002) -> int:
        """The fewest bytes for segments with which the whole stream survives, at most `tolerance` too many.

        Less than the bytes reserved without a limit, because a full device gives back what it does not use. Bisection:
        between what is allocated at the peak and what is reserved without a limit. Where `wanted_bytes` are enough, the
        result is never above them.
        """
        low = wanted_bytes
        first = self.under(wanted_bytes)
        if self.survives(wanted_bytes):
            low = first.peak_allocated_bytes
        else:
            first = self.under()
            low = max(low, first.peak_allocated_bytes)
        high = first.needed_bytes
        while high - low > max(SEGMENT_ROUNDING, tolerance * low):
            middle = (low + high) // 2
            if self.survives(middle):
                high = min(middle, self.under(middle).needed_bytes)
            else:
                low = middle
        return high

    def _replay(self, limit_bytes: int) -> tuple[Replay, list[int]]:
        return _replay(self._sizes, self._events, self._empties, _Device(limit_bytes, self._expandable_segments))


def _replay(
    sizes: "array[int]", events: Sequence[int], empties: Sequence[int], device: "_Device"
) -> tuple[Replay, list[int]]:
    """How it went, and of every storage the length of its block, in units.

    What nine in ten events do is written out, because calls would take a fifth longer.
    """
    lengths = [-(-size // SMALLEST_BLOCK) for size in sizes]
    small, large = device.small, device.large
    addresses, blocks = [0] * len(lengths), [0] * len(lengths)  # where each storage's block is, and its length
    allocated = most_allocated = 0
    survived = True
    for first, end_of_stretch in pairwise([0, *empties, len(events)]):
        if first:
            device.empty_cache()
        for storage in events[first:end_of_stretch]:
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
                same = pool.of_length.get(length)
                if same and same[0] + length not in pool.holes:
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
        if not survived:
            break
    return device.replay(most_allocated, survived), blocks


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
        holes: length of each stretch of an expandable segment without memory, by address. No two are neighbours.
    """

    __slots__ = ("ends", "holes", "least_rest", "lengths", "of_length", "starts")

    def __init__(self, least_rest: int) -> None:
        self.least_rest = least_rest
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.of_length: dict[int, list[int]] = {}
        self.lengths: list[int] = []
        self.holes: dict[int, int] = {}

    def take(self, wanted: int) -> _Block | None:
        """The free block that fits best, or as much of it as is wanted; None: none is large enough.

        Written out, because a replay spends half of its time here.
        """
        lengths, index = self.lengths, bisect_left(self.lengths, wanted)
        while index < len(lengths):
            length = lengths[index]
            addresses = self.of_length[length]
            if not addresses:
                del self.of_length[length], lengths[index]
                continue
            address = addresses[0]
            if address + length in self.holes:
                address, length = self._before_holes(wanted)
                return self.cut(address, self.remove(address), wanted)
            del addresses[0], self.starts[address]
            rest = length - wanted
            if rest < self.least_rest:
                del self.ends[address + length]
                return address, length
            start = address + wanted
            self.starts[start] = rest
            self.ends[address + length] = start
            if rest in self.of_length:
                insort(self.of_length[rest], start)
            else:
                self.of_length[rest] = [start]
                insort(lengths, rest)
            return address, wanted
        return None

    def _before_holes(self, wanted: int) -> _Block:
        """The block to take where the one that fits best has a hole behind it, which counts as if it were filled
        (`get_free_block`)."""
        chosen, least = (-1, 0), 2 * ENDLESS
        for address, length in self._from(wanted):
            room = length + self.holes.get(address + length, 0)
            if room >= least:
                break
            chosen, least = (address, length), room
        return chosen

    def _from(self, wanted: int) -> Iterator[_Block]:
        """The free blocks of at least this length, the smallest and lowest first."""
        lengths, index = self.lengths, bisect_left(self.lengths, wanted)
        while index < len(lengths):
            length = lengths[index]
            if addresses := self.of_length[length]:
                yield from ((address, length) for address in addresses)
                index += 1
            else:
                del self.of_length[length], lengths[index]

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

    def grow(self, wanted: int) -> tuple[_Block, int]:
        """A block of new memory, and how much that is."""
        raise NotImplementedError  # by what the pool is made of

    def release_cached(self) -> int:
        """Give back what holds no live block: its length in all."""
        raise NotImplementedError  # as above


class _Addresses:
    """Where segments are: each at the lowest address with room, as first-fit drivers do. Segments are no neighbours."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # by the address where it starts, in order

    def take(self, length: int) -> int:
        """Of a new segment."""
        address = 0
        for start, end in self._ends.items():
            if start - address > length:
                break
            address = end + 1
        self._ends = dict(sorted([*self._ends.items(), (address, address + length)]))
        return address

    def give_back(self, address: int) -> None:
        """That of a segment that is gone."""
        del self._ends[address]


class _SegmentPool(_Pool):
    """Made of segments. `segments`: length of each, by address."""

    __slots__ = ("_addresses", "segments")

    def __init__(self, least_rest: int, addresses: _Addresses) -> None:
        super().__init__(least_rest)
        self.segments: dict[int, int] = {}
        self._addresses = addresses

    def grow(self, wanted: int) -> tuple[_Block, int]:
        """From a new segment."""
        segment = _segment(wanted)
        address = self._addresses.take(segment)
        self.segments[address] = segment
        return self.cut(address, segment, wanted), segment

    def release_cached(self) -> int:
        """The segments without a live block."""
        free = [(address, length) for address, length in self.segments.items() if self.starts.get(address) == length]
        for address, _ in free:
            del self.segments[address]
            self._addresses.give_back(address)
            self.remove(address)
        return sum(length for _, length in free)


class _ExpandablePool(_Pool):
    """One segment that grows in pages."""

    __slots__ = ("page",)

    def __init__(self, page: int) -> None:
        super().__init__(least_rest=1)
        self.page = page
        self.holes = {0: ENDLESS // SMALLEST_BLOCK}

    def grow(self, wanted: int) -> tuple[_Block, int]:
        """At the lowest address where there is room, together with the free blocks around."""
        start = next(start for hole in sorted(self.holes) if self._has_room(start := self.ends.get(hole, hole), wanted))
        length = self.remove(start) if start in self.starts else 0
        mapped = 0
        while length < wanted:
            hole = start + length
            pages = min(-(-(wanted - length) // self.page) * self.page, self.holes[hole])
            rest = self.holes.pop(hole) - pages
            if rest:
                self.holes[hole + pages] = rest
            mapped += pages
            length += pages
            if start + length in self.starts:
                length += self.remove(start + length)
        return self.cut(start, length, wanted), mapped

    def _has_room(self, start: int, wanted: int) -> bool:
        """Whether free blocks and holes from `start` on are long enough together."""
        end = start
        while end < start + wanted:
            stretch = self.starts.get(end) or self.holes.get(end)
            if stretch is None:
                return False
            end += stretch
        return True

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
        before = -1
        for hole in sorted(self.holes):
            if before >= 0 and before + self.holes[before] == hole:
                self.holes[before] += self.holes.pop(hole)
            else:
                before = hole
        return released


def _segment(length: int) -> int:
    """The length of the segment made for a block, in units."""
    return segment_bytes(length * SMALLEST_BLOCK) // SMALLEST_BLOCK


class _Device:
    """The two pools of a device with `limit_bytes` for their segments. The rest is in units.

    Attributes:
        reserved: in segments.
        most_reserved: so far.
        most_granted: in segments, with one that was granted.
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
            addresses = _Addresses()
            self.small, self.large = _SegmentPool(1, addresses), _SegmentPool(SMALL + 1, addresses)
        self.reserved = self.most_reserved = self.most_granted = 0
        self.least_refused = ENDLESS // SMALLEST_BLOCK + 1

    def more(self, pool: _Pool, length: int) -> _Block | None:
        """A block of new memory, for which a full device gives back what holds no live block; None: not enough."""
        segment = _segment(length)
        if not self._grants(segment):
            self.empty_cache()
            if not self._grants(segment):
                return None
        self.most_granted = max(self.most_granted, self.reserved + segment)
        block, new = pool.grow(length)
        self.reserved += new
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def _grants(self, segment: int) -> bool:
        """Whether there is so much for a new segment."""
        if self.reserved + segment <= self.limit:
            return True
        self.least_refused = min(self.least_refused, self.reserved + segment)
        return False

    def empty_cache(self) -> None:
        """Give back what holds no live block."""
        self.reserved -= self.small.release_cached() + self.large.release_cached()

    def replay(self, most_allocated: int, survived: bool) -> Replay:
        """How it went."""
        reserved, granted, refused = self.most_reserved, self.most_granted, self.least_refused
        return Replay(
            peak_allocated_bytes=most_allocated * SMALLEST_BLOCK,
            peak_reserved_bytes=reserved * SMALLEST_BLOCK,
            survived=survived,
            granted_bytes=granted * SMALLEST_BLOCK,
            refused_bytes=refused * SMALLEST_BLOCK,
        )
