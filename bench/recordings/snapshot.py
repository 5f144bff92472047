"""Snapshots of torch's CUDA allocator (`torch.cuda.memory._dump_snapshot`), read without running any code.

A snapshot is a pickle of dicts, lists, numbers and strings. One that names anything else is refused. What is taken of
it are facts: sizes and order of requests, and which segments there were. Stacks, addresses and times are not kept.

A recording is *clean* if the allocator had no segment when it began, or gave all back before the first request. Its
requests then say all that decides about segments. Otherwise blocks that were there already are requested first, in the
order of their addresses, which is not how they came to be: what is reserved is then near the truth, and not equal.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.streams import GIVEN_BACK, Requests

MOST_BYTES = 1 << 28


class SnapshotError(Exception):
    """A file that is no snapshot of torch's allocator."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The facts of a snapshot of one device.

    Attributes:
        requests: sizes and events as a `bench.gpu.streams.Stream` has them, those from before the recording first.
        num_before: how many of the requests are from before.
        is_clean: see above.
        reserved_bytes: the most in segments while it was recorded.
        allocated_at_end_bytes: in blocks at the end, as `memory_allocated`.
        reserved_at_end_bytes: in segments at the end, as `memory_reserved`.
        expandable_segments: whether the allocator had them.
    """

    requests: Requests
    num_before: int
    is_clean: bool
    reserved_bytes: int
    allocated_at_end_bytes: int
    reserved_at_end_bytes: int
    expandable_segments: bool


class _Plain(pickle.Unpickler):
    """An unpickler of plain values."""

    def find_class(self, module: str, name: str) -> Any:
        raise SnapshotError(f"it names {module}.{name}, and a snapshot has plain values only")


def read(path: Path) -> Snapshot:
    """Return the facts of the snapshot in a file, of its first device with requests.

    Raises:
        SnapshotError: it is none, with the reason.
    """
    if path.stat().st_size > MOST_BYTES:
        raise SnapshotError(f"{path}: it has {path.stat().st_size:,} bytes, and {MOST_BYTES:,} are the most")
    try:
        with path.open("rb") as file:
            content = _Plain(file).load()
        traces, segments = content["device_traces"], content["segments"]
        device = next(number for number, trace in enumerate(traces) if trace)
        history = [{"user_metadata": "", **entry} for entry in traces[device] if entry["action"] != "snapshot"]
        segments = [segment for segment in segments if segment.get("device", device) == device]
        expandable = any(segment.get("is_expandable", False) for segment in segments)
        return _facts(history, segments, expandable)
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
    first = next(index for index, entry in enumerate(history) if entry["action"] == "alloc")
    at_first = reserved + sum(growth for growth in grown[:first] if growth < 0)
    for growth in grown:
        reserved += growth
        most = max(most, reserved)
    before = _alive_before(history, segments)
    marked = [
        {**entry, "user_metadata": "/empty_cache" if entry["action"] in GIVEN_BACK and index > first else ""}
        for index, entry in enumerate(history)
    ]
    requests = Requests()
    requests.read([*before, *marked])
    return Snapshot(
        requests=requests,
        num_before=len(before),
        is_clean=not before and at_first == 0,
        reserved_bytes=most,
        allocated_at_end_bytes=sum(segment["allocated_size"] for segment in segments),
        reserved_at_end_bytes=reserved_at_end,
        expandable_segments=expandable,
    )


def _growth(entry: dict[str, Any]) -> int:
    """Return the bytes by which an event makes segments grow."""
    if entry["action"] in ("segment_alloc", "segment_map"):
        return int(entry["size"])
    return -int(entry["size"]) if entry["action"] in GIVEN_BACK else 0


def _alive_before(history: list[dict[str, Any]], segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a request for each block that was there when the recording began, in the order of addresses."""
    made: set[int] = set()
    before: dict[int, dict[str, Any]] = {}
    for entry in history:
        address = entry["addr"]
        if entry["action"] == "alloc":
            made.add(address)
        elif entry["action"] == "free_completed" and address not in made:
            before[address] = entry
        elif entry["action"] == "free_completed":
            made.discard(address)
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block.get("address", address) not in made:
                size = block.get("requested_size", block["size"])
                before[block.get("address", address)] = {"size": size, "stream": segment["stream"]}
            address += block["size"]
    return [
        {"action": "alloc", "addr": address, "size": entry["size"], "stream": entry["stream"], "user_metadata": ""}
        for address, entry in sorted(before.items())
    ]
