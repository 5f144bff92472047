"""Snapshots of torch's CUDA allocator (`torch.cuda.memory._dump_snapshot`), read without running any code.

A snapshot is a pickle of dicts, lists, numbers and strings. One that names anything else is refused. What is taken of
it are facts: sizes and order of requests, and which segments there were. Stacks, addresses and times are not kept.

Most recordings begin late: there are segments and blocks already. Which segments there were then follows from those at
the end and from what was made and given back since; where their blocks were, from the addresses of what was freed later
or is still there. What lies between two blocks was free, but for a rest of up to 1 MiB behind a block of more than
1 MiB, which the allocator does not split off: the first request in the memory behind shows it. So the start is known,
and a stream begins with requests that make just these segments, in an order that brings them to about these addresses,
and fill them; those that stand for free memory are freed before the recording begins.
"""

import pickle
from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.gpu.streams import GIVEN_BACK, Requests
from frugal.planning.memory.caching_allocator import RESERVATION

MOST_BYTES = 1 << 28
ROUNDING, SMALL, SMALL_SEGMENT = 512, 1 << 20, 2 << 20
"""Of torch's allocator, bytes: blocks are multiples of the first, and up to the second they lie in such segments."""
LOW = 1 << 40
"""An address: where all segments of a recording lie below, new ones were put above the others, elsewhere below."""


class SnapshotError(Exception):
    """A file that is no snapshot of torch's allocator."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The facts of a snapshot of one device.

    Attributes:
        requests: sizes and events as a `bench.gpu.streams.Stream` has them, those that make the start first.
        num_before: how many of the requests make the start.
        is_clean: whether the allocator had no segment at the start.
        reserved_bytes: the most in segments while it was recorded.
        made_bytes: the segments that were made while it was recorded.
        allocated_at_end_bytes: in blocks at the end, as `memory_allocated`.
        reserved_at_end_bytes: in segments at the end, as `memory_reserved`.
        expandable_segments: whether the allocator had them.
        addresses_fall: whether new reservations of addresses lay below the others, not above.
    """

    requests: Requests
    num_before: int
    is_clean: bool
    reserved_bytes: int
    made_bytes: int
    allocated_at_end_bytes: int
    reserved_at_end_bytes: int
    expandable_segments: bool
    addresses_fall: bool


class _Plain(pickle.Unpickler):
    """An unpickler of plain values."""

    def find_class(self, module: str, name: str) -> Any:
        raise SnapshotError(f"it names {module}.{name}, and a snapshot has plain values only")


def read(path: Path) -> Snapshot:
    """Return the facts of the snapshot in a file, of its first device with requests.

    Raises:
        SnapshotError: it is none, with the reason.
    """
    with opened(path) as (history, segments, is_expandable):
        return _facts(history, segments, is_expandable)


@contextmanager
def opened(path: Path) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]], bool]]:
    """Give history and segments of a snapshot's first device with requests, and whether these are expandable.

    Raises:
        SnapshotError: it is none, as found here or in the block, with the reason.
    """
    if path.stat().st_size > MOST_BYTES:
        raise SnapshotError(f"{path}: it has {path.stat().st_size:,} bytes, and {MOST_BYTES:,} are the most")
    try:
        with path.open("rb") as file:
            content = _Plain(file).load()
        traces, segments = content["device_traces"], content["segments"]
        device = next(
            number for number, trace in enumerate(traces) if any(entry["action"] == "alloc" for entry in trace)
        )
        history = [{"user_metadata": "", **entry} for entry in traces[device] if entry["action"] != "snapshot"]
        segments = [segment for segment in segments if segment.get("device", device) == device]
        yield history, segments, any(segment.get("is_expandable", False) for segment in segments)
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None
    except StopIteration:
        raise SnapshotError(f"{path}: no device has a recorded request") from None
    except Exception as error:  # a pickle can fail in any way
        raise SnapshotError(f"{path}: it cannot be read as a snapshot ({type(error).__name__}: {error})") from None


def _facts(history: list[dict[str, Any]], segments: list[dict[str, Any]], expandable: bool) -> Snapshot:
    reserved_at_end = sum(segment["total_size"] for segment in segments)
    grown = [_growth(entry) for entry in history]
    reserved = most = reserved_at_end - sum(grown)
    is_clean = reserved == 0
    for growth in grown:
        reserved += growth
        most = max(most, reserved)
    before = _alive_before(history, segments)
    at_start = segments_before(history, segments)
    fall = not expandable and max(segment["address"] for segment in segments) > LOW
    made = {base: at_start[base] for base in sorted(at_start, key=_as_reserved)} if fall else at_start
    start = list(_blocks_at_start(before) if expandable else _start(made, before))
    marked = [{**entry, "user_metadata": "/empty_cache" if entry["action"] in GIVEN_BACK else ""} for entry in history]
    requests = Requests()
    requests.read([*start, *marked])
    return Snapshot(
        requests=requests,
        num_before=sum(entry["action"] == "alloc" for entry in start),
        is_clean=is_clean,
        reserved_bytes=most,
        made_bytes=sum(growth for growth in grown if growth > 0),
        allocated_at_end_bytes=sum(segment["allocated_size"] for segment in segments),
        reserved_at_end_bytes=reserved_at_end,
        expandable_segments=expandable,
        addresses_fall=fall,
    )


def _as_reserved(address: int) -> tuple[int, int]:
    """Return a key that sorts addresses as most cards take them: reservations go down, and up inside each."""
    return -(address // RESERVATION), address


def _growth(entry: dict[str, Any]) -> int:
    """Return the bytes by which an event makes segments grow."""
    if entry["action"] in ("segment_alloc", "segment_map"):
        return int(entry["size"])
    return -int(entry["size"]) if entry["action"] in GIVEN_BACK else 0


def segments_before(history: list[dict[str, Any]], segments: list[dict[str, Any]]) -> dict[int, int]:
    """Return the bytes of each segment at the start, by address, in the order of addresses."""
    found = {segment["address"]: segment["total_size"] for segment in segments}
    for entry in reversed(history):
        if entry["action"] == "segment_alloc":
            del found[entry["addr"]]
        elif entry["action"] == "segment_free":
            found[entry["addr"]] = entry["size"]
    return dict(sorted(found.items()))


def _alive_before(history: list[dict[str, Any]], segments: list[dict[str, Any]]) -> dict[int, int]:
    """Return the bytes of each block at the start, by address, in the order of addresses."""
    made: set[int] = set()
    before: dict[int, int] = {}
    for entry in history:
        address = entry["addr"]
        if entry["action"] == "alloc":
            made.add(address)
        elif entry["action"] == "free_completed" and address not in made:
            before[address] = entry["size"]
        elif entry["action"] == "free_completed":
            made.discard(address)
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            place = block.get("address", address)
            if block["state"] == "active_allocated" and place not in made:
                before[place] = block["size"]
            address += block["size"]
    return _with_rests(dict(sorted(before.items())), history)


def _with_rests(before: dict[int, int], history: list[dict[str, Any]]) -> dict[int, int]:
    """Return the blocks with the rests behind them that the first request in the free memory behind shows."""
    whole, unseen, addresses = dict(before), set(before), list(before)
    for entry in history:
        if entry["action"] == "free_completed":
            unseen.discard(entry["addr"])
        elif entry["action"] == "alloc" and (index := bisect(addresses, entry["addr"])):
            block = addresses[index - 1]
            rest = entry["addr"] - block - -(-before[block] // ROUNDING) * ROUNDING
            if block in unseen and before[block] > SMALL and 0 <= rest <= SMALL:  # otherwise in another segment
                whole[block] = entry["addr"] - block
                unseen.discard(block)
    return whole


def _blocks_at_start(before: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yield a request for each block at the start, where segments grow by pages: they hold no other memory then."""
    return (_event("alloc", address, size) for address, size in before.items())


def _start(segments: dict[int, int], before: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the requests that make the segments of the start with these blocks in them, and free the rest."""
    blocks = list(before.items())
    free = []
    for base, length in segments.items():
        end = base + length
        if length != SMALL_SEGMENT:  # one request of all of it, freed at once, makes the segment
            yield from (_event(action, base, length) for action in ("alloc", "free_requested", "free_completed"))
        place = base
        inside = [(address, size) for address, size in blocks if base <= address < end]
        for (address, size), (following, _) in pairwise([*inside, (end, 0)]):
            for filler, filled in _fillers(place, address, length == SMALL_SEGMENT):
                free.append((filler, filled))
                yield _event("alloc", filler, filled)
            place = address + -(-size // ROUNDING) * ROUNDING
            if length != SMALL_SEGMENT and following - place <= SMALL:
                place = following
            yield _event("alloc", address, place - address)
        for filler, filled in _fillers(place, end, length == SMALL_SEGMENT):
            free.append((filler, filled))
            yield _event("alloc", filler, filled)
    for filler, filled in free:
        yield from (_event(action, filler, filled) for action in ("free_requested", "free_completed"))


def _fillers(begin: int, end: int, is_small: bool) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of blocks that fill the memory between, each small enough for its segment."""
    while begin < end:
        length = min(end - begin, SMALL) if is_small else end - begin
        yield begin, length
        begin += length


def _event(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "user_metadata": ""}
