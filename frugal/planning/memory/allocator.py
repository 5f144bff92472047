"""The memory that a step's storages take of CUDA's caching allocator under any limit; see `caching_allocator`.

A search replays streams of ten thousand storages dozens of times, so

- two limits that grant and refuse the same requests lead through the same replay, which is done once.
- results are kept by what was replayed (`KnownReplays`), so another plan of the same model need not replay it again.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from frugal.planning.memory.caching_allocator import ENDLESS, SEGMENT_ROUNDING, replay


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

    @property
    def needed_bytes(self) -> int:
        """The least limit that neither refuses what was granted nor is exceeded."""
        return max(self.granted_bytes, self.peak_reserved_bytes)


KnownReplays = dict[str, list[Replay]]
"""Results of replays, by the SHA-256 of the stream that was replayed."""


class Replays:
    """Storages of `sizes` bytes that live and die as `events` says: an index at birth, again at death.

    `empties`: numbers of the events before which the cache is emptied, in order. `reservation_bytes`: see
    `caching_allocator`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        events: Sequence[int],
        empties: Sequence[int] = (),
        *,
        expandable_segments: bool = False,
        reservation_bytes: int = ENDLESS,
        known: KnownReplays | None = None,
    ) -> None:
        self._stream = array("q", sizes), array("q", events), array("q", empties)
        self._expandable_segments, self._reservation_bytes = expandable_segments, reservation_bytes
        self._all_known: KnownReplays = {} if known is None else known

    @cached_property
    def _known(self) -> list[Replay]:
        stream = sha256(f"{self._expandable_segments} {self._reservation_bytes} ".encode())
        for part in self._stream:
            stream.update(f"{len(part)} ".encode())
            stream.update(part)
        return self._all_known.setdefault(stream.hexdigest(), [])

    def under(self, limit_bytes: int = ENDLESS) -> Replay:
        """Return the replay on a device with `limit_bytes` for segments."""
        for known in self._known:
            if known.granted_bytes <= limit_bytes < known.refused_bytes:  # the same are granted and refused
                return known
        outcome = replay(*self._stream, self._expandable_segments, limit_bytes, None, self._reservation_bytes)
        self._known.append(Replay(*outcome))
        return self._known[-1]

    def survives(self, limit_bytes: int) -> bool:
        """Return whether the whole stream is granted on a device with `limit_bytes`, and takes no more."""
        replay = self.under(limit_bytes)
        return replay.survived and replay.peak_reserved_bytes <= limit_bytes

    def block_bytes(self) -> tuple[int, ...]:
        """Return the block of every storage where nothing limits the device; 0 for an empty one."""
        blocks = array("q", bytes(8 * len(self._stream[0])))
        replay(*self._stream, self._expandable_segments, ENDLESS, blocks, self._reservation_bytes)
        return tuple(blocks)

    def peaks_from(self, first: int, num_empties: int) -> tuple[int, int]:
        """Return the most bytes in blocks and in segments from event number `first` on, where nothing limits the
        device. `num_empties`: how often the cache had been emptied then.

        Segments only grow until the cache is emptied, so they are looked at before each time, and at the end.
        """
        _, events, empties = self._stream
        blocks = self.block_bytes()
        alive, allocated, after = set[int](), 0, [0]
        for storage in events:
            allocated += -blocks[storage] if storage in alive else blocks[storage]
            alive ^= {storage}
            after.append(allocated)
        ends = [(first, num_empties), (len(events), len(empties))]
        ends += [(empties[number], number) for number in range(num_empties, len(empties))]
        return max(after[first:]), max(self._segment_bytes(*end) for end in ends)

    def _segment_bytes(self, event: int, num_empties: int) -> int:
        """Return the bytes of segments before an event: a request that no segment has room for tells. Expandable ones
        would have room; there, those at their most, as if the cache had never been emptied."""
        sizes, events, empties = self._stream
        huge = 0 if self._expandable_segments else ENDLESS // 2
        told = Replays(
            [*sizes, huge],
            [*events[:event], len(sizes)],
            empties[:num_empties],
            expandable_segments=self._expandable_segments,
            reservation_bytes=self._reservation_bytes,
        )
        return told.under().peak_reserved_bytes - huge

    def smallest_capacity(self, wanted_bytes: int = ENDLESS, tolerance: float = 0.002) -> int:
        """Return the fewest bytes for segments with which the whole stream survives, at most `tolerance` too many.

        Less than the bytes reserved without a limit, because a full device gives back what it does not use. Bisection:
        between what is allocated at the peak and what is reserved without a limit. Where `wanted_bytes` are enough, the
        result is never above them. Where they are not, ever more is tried: holes lie elsewhere under each limit, so a
        stream may survive a limit and not one a little above it, and a bisection of all would end at any of these.
        """
        low = wanted_bytes
        first = self.under(wanted_bytes)
        if self.survives(wanted_bytes):
            low = first.peak_allocated_bytes
        else:
            first = self.under()
            low = max(low, first.peak_allocated_bytes)
        high = first.needed_bytes
        step = max(SEGMENT_ROUNDING, int(tolerance * low))
        while low >= wanted_bytes and low + step < high:
            if self.survives(low + step):
                high = min(low + step, self.under(low + step).needed_bytes)
                break
            low, step = low + step, 2 * step
        while high - low > max(SEGMENT_ROUNDING, tolerance * low):
            middle = (low + high) // 2
            if self.survives(middle):
                high = min(middle, self.under(middle).needed_bytes)
            else:
                low = middle
        return high
