"""The free blocks of CUDA's caching allocator, and the segments that they are in; see `allocator` beside this.

All lengths and addresses are in units of 512 bytes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from frugal.units import MIB

SMALLEST_BLOCK = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from this size on a request gets a segment of its own
SEGMENT_ROUNDING = 2 * MIB
ENDLESS = 1 << 60  # bytes; the address space of an expandable segment, and a device without a limit


def segment_bytes(size: int) -> int:
    """Return the bytes of the segment made for a request."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


SMALL = SMALL_REQUEST // SMALLEST_BLOCK  # units

Block = tuple[int, int]
"""Address and length, in units."""


class BlockPool:
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

    def take(self, wanted: int) -> Block | None:
        """Take the best-fitting free block, or as much of it as is wanted; None: none is large enough.

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

    def _before_holes(self, wanted: int) -> Block:
        """Return the block to take where the best fit is followed by a hole, which counts as if it were filled
        (`get_free_block`).
        """
        chosen, least = (-1, 0), 2 * ENDLESS
        for address, length in self._from(wanted):
            room = length + self.holes.get(address + length, 0)
            if room >= least:
                break
            chosen, least = (address, length), room
        return chosen

    def _from(self, wanted: int) -> Iterator[Block]:
        """Yield the free blocks of at least this length, the smallest and lowest first."""
        lengths, index = self.lengths, bisect_left(self.lengths, wanted)
        while index < len(lengths):
            length = lengths[index]
            if addresses := self.of_length[length]:
                yield from ((address, length) for address in addresses)
                index += 1
            else:
                del self.of_length[length], lengths[index]

    def cut(self, address: int, length: int, wanted: int) -> Block:
        """Return as much of a block that is in no list as is wanted; free the rest, if it is worth it."""
        if length - wanted < self.least_rest:
            return address, length
        self.add(address + wanted, length - wanted)
        return address, wanted

    def add(self, address: int, length: int) -> None:
        """Add a free block whose neighbours are not free."""
        self.starts[address] = length
        self.ends[address + length] = address
        if length in self.of_length:
            insort(self.of_length[length], address)
        else:
            self.of_length[length] = [address]
            insort(self.lengths, length)

    def remove(self, address: int) -> int:
        """Remove the free block at `address`; return its length."""
        length = self.starts.pop(address)
        del self.ends[address + length]
        self.of_length[length].remove(address)
        return length

    def grow(self, wanted: int) -> tuple[Block, int]:
        """Return a block of new memory, and how much memory that is."""
        raise NotImplementedError  # by what the pool is made of

    def release_cached(self) -> int:
        """Give back what holds no live block: its length in all."""
        raise NotImplementedError  # as above


class _Addresses:
    """Where segments are: each at the lowest address with room, as first-fit drivers do. Segments are no neighbours."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # by the address where it starts, in order

    def take(self, length: int) -> int:
        """Return the address of a new segment."""
        address = 0
        for start, end in self._ends.items():
            if start - address > length:
                break
            address = end + 1
        self._ends = dict(sorted([*self._ends.items(), (address, address + length)]))
        return address

    def give_back(self, address: int) -> None:
        """Free the address of a segment."""
        del self._ends[address]


class SegmentPool(BlockPool):
    """Made of segments. `segments`: length of each, by address."""

    __slots__ = ("_addresses", "segments")

    def __init__(self, least_rest: int, addresses: _Addresses) -> None:
        super().__init__(least_rest)
        self.segments: dict[int, int] = {}
        self._addresses = addresses

    def grow(self, wanted: int) -> tuple[Block, int]:
        """Cut a block from a new segment."""
        segment = _segment(wanted)
        address = self._addresses.take(segment)
        self.segments[address] = segment
        return self.cut(address, segment, wanted), segment

    def release_cached(self) -> int:
        """Give back the segments without a live block."""
        free = [(address, length) for address, length in self.segments.items() if self.starts.get(address) == length]
        for address, _ in free:
            del self.segments[address]
            self._addresses.give_back(address)
            self.remove(address)
        return sum(length for _, length in free)


class ExpandablePool(BlockPool):
    """One segment that grows in pages."""

    __slots__ = ("page",)

    def __init__(self, page: int) -> None:
        super().__init__(least_rest=1)
        self.page = page
        self.holes = {0: ENDLESS // SMALLEST_BLOCK}

    def grow(self, wanted: int) -> tuple[Block, int]:
        """Map pages at the lowest address with room, together with the free blocks around."""
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
        """Return whether free blocks and holes from `start` on are long enough together."""
        end = start
        while end < start + wanted:
            stretch = self.starts.get(end) or self.holes.get(end)
            if stretch is None:
                return False
            end += stretch
        return True

    def release_cached(self) -> int:
        """Give back the whole pages of free blocks."""
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
    return segment_bytes(length * SMALLEST_BLOCK) // SMALLEST_BLOCK


class DeviceSegments:
    """The two pools of a device, in units.

    Attributes:
        limit: of what segments may take.
        gives_back: whether what holds no live block is given back before anything is refused; if not, a refusal leaves
            no trace.
        reserved: in segments.
        most_reserved: so far.
        most_granted: in segments, with one that was granted.
        least_refused: in segments, with one that was refused.
    """

    def __init__(self, expandable_segments: bool) -> None:
        self.limit = ENDLESS // SMALLEST_BLOCK
        self.gives_back = True
        self.small: BlockPool
        self.large: BlockPool
        if expandable_segments:
            self.small, self.large = (ExpandablePool(page // SMALLEST_BLOCK) for page in (SMALL_SEGMENT, LARGE_SEGMENT))
        else:
            addresses = _Addresses()
            self.small, self.large = SegmentPool(1, addresses), SegmentPool(SMALL + 1, addresses)
        self.reserved = self.most_reserved = self.most_granted = 0
        self.least_refused = ENDLESS // SMALLEST_BLOCK + 1

    def more(self, pool: BlockPool, length: int) -> Block | None:
        """Return a block of new memory; a full device first gives back unused segments. None: not enough."""
        segment = _segment(length)
        if not self.gives_back and self.reserved + segment > self.limit:
            return None
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
        """Return whether there is room for a new segment."""
        if self.reserved + segment <= self.limit:
            return True
        self.least_refused = min(self.least_refused, self.reserved + segment)
        return False

    def empty_cache(self) -> None:
        """Give back what holds no live block."""
        self.reserved -= self.small.release_cached() + self.large.release_cached()
