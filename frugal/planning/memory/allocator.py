"""CUDA's caching allocator: the memory that a step's storages take, under any limit.

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
  the same replay, which is done once. No limit that is asked for is below the live bytes of the peak, so replays of a
  stream under several limits have their beginning in common, up to the first request that those bytes alone refuse.
- Results are kept by what was replayed (`KnownReplays`), so another plan of the same model need not replay it again.

The tests have an allocator of linked blocks, as torch's is, and hold these replays to it.
"""

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise

from frugal.planning.memory.free_blocks import ENDLESS, SEGMENT_ROUNDING, SMALL, SMALLEST_BLOCK, DeviceSegments


@dataclass(frozen=True)
class Replay:
    """The result of a replay: highest bytes in live blocks and in segments, and whether all storages were granted.

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
        """Return whether the same segments are granted and refused under this limit."""
        return self.granted_bytes <= limit_bytes < self.refused_bytes

    @property
    def needed_bytes(self) -> int:
        """The least limit that neither refuses what was granted nor is exceeded."""
        return max(self.granted_bytes, self.peak_reserved_bytes)


KnownReplays = dict[str, list[Replay]]
"""Results of replays, by the SHA-256 of the stream that was replayed."""


class Replays:
    """Storages of `sizes` bytes that live and die as `events` says: an index at birth, again at death.

    `empties`: numbers of the events before which the cache is emptied, in order. `least_bytes`: the live bytes of the
    peak, if they are known.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        events: Sequence[int],
        empties: Sequence[int] = (),
        *,
        expandable_segments: bool = False,
        least_bytes: int = ENDLESS,
        known: KnownReplays | None = None,
    ) -> None:
        self._sizes = array("q", sizes)  # a fifth of a list, and there is one for each micro-batch
        self._events = events
        self._empties = empties
        self._expandable_segments = expandable_segments
        self._least_bytes = least_bytes
        self._all_known: KnownReplays = {} if known is None else known

    @cached_property
    def _known(self) -> list[Replay]:
        stream = sha256(b"expandable" if self._expandable_segments else b"")
        for part in (self._sizes, array("q", self._events), array("q", self._empties)):
            stream.update(f"{len(part)} ".encode())
            stream.update(part)
        return self._all_known.setdefault(stream.hexdigest(), [])

    def under(self, limit_bytes: int = ENDLESS) -> Replay:
        """Return the replay on a device with `limit_bytes` for segments."""
        for known in self._known:
            if known.holds_under(limit_bytes):
                return known
        replay = self._replay(limit_bytes).result()
        self._known.append(replay)
        return replay

    def survives(self, limit_bytes: int) -> bool:
        """Return whether the whole stream is granted on a device with `limit_bytes`, and takes no more."""
        replay = self.under(limit_bytes)
        return replay.survived and replay.peak_reserved_bytes <= limit_bytes

    def block_bytes(self) -> tuple[int, ...]:
        """Return the block of every storage where nothing limits the device; 0 for an empty one."""
        return tuple(length * SMALLEST_BLOCK for length in self._replay(ENDLESS).blocks)

    def smallest_capacity(self, wanted_bytes: int = ENDLESS, tolerance: float = 0.002) -> int:
        """Return the fewest bytes for segments with which the whole stream survives, at most `tolerance` too many.

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

    def _replay(self, limit_bytes: int) -> "_State":
        """Return the state at the end."""
        begins_alone = limit_bytes <= self._least_bytes
        state = self._at_first if begins_alone else pickle.loads(self._beginning)  # ten times as fast as `deepcopy`
        state.device.limit = limit_bytes // SMALLEST_BLOCK
        _replay(self._sizes, self._events, self._empties, state)
        return state

    @property
    def _at_first(self) -> "_State":
        none = [0] * len(self._sizes)
        return _State(DeviceSegments(self._expandable_segments), none, none[:])

    @cached_property
    def _beginning(self) -> bytes:
        """The pickled state before the first request that is refused with memory for the live bytes alone."""
        state = self._at_first
        state.device.limit = self._least_bytes // SMALLEST_BLOCK
        state.device.gives_back = False
        _replay(self._sizes, self._events, self._empties, state)
        state.device.gives_back = state.survived = True
        return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)


@dataclass(slots=True)
class _State:
    """The state of a replay before event number `event`.

    Attributes:
        device: with what limits it.
        addresses: where each storage's block is, in units.
        blocks: the length of each, in units; 0: none.
        event: number of the next one.
        allocated: in blocks, units.
        most_allocated: so far.
        survived: whether all requests were granted so far.
    """

    device: DeviceSegments
    addresses: list[int]
    blocks: list[int]
    event: int = 0
    allocated: int = 0
    most_allocated: int = 0
    survived: bool = True

    def result(self) -> Replay:
        """Return the result of the replay."""
        device = self.device
        return Replay(
            peak_allocated_bytes=self.most_allocated * SMALLEST_BLOCK,
            peak_reserved_bytes=device.most_reserved * SMALLEST_BLOCK,
            survived=self.survived,
            granted_bytes=device.most_granted * SMALLEST_BLOCK,
            refused_bytes=device.least_refused * SMALLEST_BLOCK,
        )


def _replay(sizes: "array[int]", events: Sequence[int], empties: Sequence[int], state: _State) -> None:
    """Continue to the end, or to the first refusal.

    What nine in ten events do is written out, because calls would take a fifth longer.
    """
    device, addresses, blocks = state.device, state.addresses, state.blocks
    allocated, most_allocated, begin = state.allocated, state.most_allocated, state.event
    number = len(events)
    lengths = [-(-size // SMALLEST_BLOCK) for size in sizes]
    small, large = device.small, device.large
    for first, end_of_stretch in pairwise([0, *empties, len(events)]):
        if first and first >= begin:
            device.empty_cache()
        rest = max(first, begin)
        for event, storage in enumerate(events[rest:end_of_stretch], rest):
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
                        state.survived, number = False, event
                        break
                    addresses[storage], length = block
                blocks[storage] = length
                allocated += length
                if allocated > most_allocated:
                    most_allocated = allocated
        if not state.survived:
            break
    state.event, state.allocated, state.most_allocated = number, allocated, most_allocated
