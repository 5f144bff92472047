"""Request streams: what a run asked of CUDA's caching allocator, in order, and the peaks that torch counted.

A file NAME.json.xz is one `Stream`, as compressed JSON. It holds sizes and order, no addresses and no stacks, so that
a run of twenty thousand requests takes some ten KB. A frugal.planning.memory.allocator that is told of the same
requests must come to the same peaks, to the byte.

How events are written. A request is 0. A block that is free for others again is a number above 0: how many requests
ago its own was made. Two steps of the same work are thereby the same numbers, which xz writes once. A block that
another CUDA stream still uses when it is released is counted as free at once, by `max_memory_allocated`, and is free
for others later: its release is a number below 0, its return one above 0.
"""

import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from frugal.planning.memory.allocator import Replays
from frugal.planning.memory.caching_allocator import ENDLESS, RESERVATION, SMALL_SEGMENT
from frugal.planning.memory.timeline import BACKWARD, FORWARD, INITIALISATION, OPTIMIZER_STEP

SUFFIX = ".json.xz"
PHASES = (INITIALISATION, FORWARD, BACKWARD, OPTIMIZER_STEP)
EMPTY_CACHE = "empty_cache"
GIVEN_BACK = ("segment_free", "segment_unmap")


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's run.

    Attributes:
        name: what ran.
        device: the card.
        is_emulated: whether the card was address space without a GPU (`bench/emulated_gpu`).
        versions: of torch, DeepSpeed and others.
        date: when it ran.
        command: what made the stream.
        world_size: number of ranks; `rank`: this one.
        expandable_segments: whether the allocator had them.
        addresses_fall: whether new reservations of addresses lay below the others, not above.
        cap_bytes: what the allocator was allowed; None: all of the card.
        sizes: of every request, in order, bytes.
        cuda_streams: of every request the CUDA stream, 0 the default one; empty: all of them are on that.
        events: see above.
        empty_caches: events before which `torch.cuda.empty_cache` ran, where that gave back anything.
        phases: the name of every phase and its first event; a name may return.
        allocated_bytes: the peak of each phase, as `max_memory_allocated`.
        reserved_bytes: the peak of all, as `max_memory_reserved`.
    """

    name: str
    device: str
    is_emulated: bool
    versions: dict[str, str]
    date: str
    command: str
    world_size: int = 1
    rank: int = 0
    expandable_segments: bool = False
    addresses_fall: bool = False
    cap_bytes: int | None = None
    sizes: list[int]
    cuda_streams: list[int] = []
    events: list[int]
    empty_caches: list[int] = []
    phases: list[tuple[str, int]]
    allocated_bytes: dict[str, int]
    reserved_bytes: int

    @property
    def peak_allocated_bytes(self) -> int:
        """The peak of all phases."""
        return max(self.allocated_bytes.values())

    @property
    def empties(self) -> list[int]:
        """`empty_caches` among `lifetimes`."""
        before = list(accumulate((event >= 0 for event in self.events), initial=0))
        return [before[event] for event in self.empty_caches]

    @property
    def lifetimes(self) -> list[int]:
        """The number of a request when it is made, and again when its block is free for others."""
        return [number for number, kind in self.numbered() if kind != "released"]

    def replays(self) -> Replays:
        """The requests for frugal's model of the allocator."""
        stream = self.sizes, self.lifetimes, self.empties
        expandable, reservation = self.expandable_segments, self.reservation_bytes
        return Replays(*stream, expandable_segments=expandable, reservation_bytes=reservation)

    @property
    def reservation_bytes(self) -> int:
        """As the replay takes it."""
        return RESERVATION if self.addresses_fall else ENDLESS

    def numbered(self) -> Iterator[tuple[int, str]]:
        """Yield of every event the number of the request and what happens: `requested`, `released` or `returned`."""
        made = 0
        for event in self.events:
            if event == 0:
                yield made, "requested"
                made += 1
            else:
                yield made - abs(event), "returned" if event > 0 else "released"

    def write(self, folder: Path) -> Path:
        """Keep it in `folder`, under its name; the file."""
        folder.mkdir(parents=True, exist_ok=True)
        words = [self.name, *(["expandable"] if self.expandable_segments else [])]
        if self.world_size > 1:
            words.append(f"rank {self.rank}")
        if self.cap_bytes is not None:
            words.append("capped")
        path = folder / (" ".join(words).replace(" ", "-") + SUFFIX)
        path.write_bytes(lzma.compress(msgspec.json.encode(self), preset=9 | lzma.PRESET_EXTREME))
        return path

    @classmethod
    def read(cls, path: Path) -> "Stream":
        """The stream in a file."""
        return msgspec.json.decode(lzma.decompress(path.read_bytes()), type=cls)


@dataclass
class Requests:
    """The fields of a `Stream` that the allocator's history tells."""

    sizes: list[int] = field(default_factory=list)
    cuda_streams: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    empty_caches: list[int] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    addresses_fall: bool = False
    is_whole: bool = True

    def read(self, history: list[dict[str, Any]]) -> None:
        """Take them from a history whose entries say the phase in their metadata."""
        numbers: dict[int, int] = {0: 0}
        live: dict[int, int] = {}  # address -> number of its request
        for index, entry in enumerate(history):
            action, address = entry["action"], entry["addr"]
            phase, _, doing = entry["user_metadata"].partition("/")
            if phase in PHASES and (not self.phases or self.phases[-1][0] != phase):  # autograd's thread has others
                self.phases.append((phase, len(self.events)))
            if doing == EMPTY_CACHE and action in GIVEN_BACK and self.empty_caches[-1:] != [len(self.events)]:
                self.empty_caches.append(len(self.events))
            if action == "alloc":
                live[address] = len(self.sizes)
                self.sizes.append(entry["size"])
                self.cuda_streams.append(numbers.setdefault(entry["stream"], len(numbers)))
                self.events.append(0)
            elif action == "free_requested" and address in live:
                following = history[index + 1] if index + 1 < len(history) else {"action": ""}
                if following["action"] != "free_completed" or following["addr"] != address:
                    self.events.append(live[address] - len(self.sizes))
            elif action == "free_completed" and address in live:
                self.events.append(len(self.sizes) - live.pop(address))
        if not any(self.cuda_streams):
            self.cuda_streams.clear()


def addresses_fall(history: list[dict[str, Any]]) -> bool:
    """Return whether more new segments lay below all before them than above, in a history from an empty allocator."""
    made = [entry["addr"] for entry in history if entry["action"] == "segment_alloc" and entry["size"] > SMALL_SEGMENT]
    lowest, highest = accumulate(made, min), accumulate(made, max)
    trend = sum((address == low) - (address == high) for address, low, high in zip(made, lowest, highest, strict=True))
    return trend > 0


@contextmanager
def recording() -> Iterator[Requests]:
    """The requests made inside the `with` block, known at its end. `is_whole`: the allocator was empty before."""
    import torch

    from frugal.memory_watch import CudaGauge

    found = Requests(is_whole=torch.cuda.memory_reserved() == 0)
    phase = INITIALISATION
    mark, empty_cache = CudaGauge.mark, torch.cuda.empty_cache

    def marked(gauge: Any, name: str) -> None:
        nonlocal phase
        mark(gauge, name)
        phase = name
        torch.cuda.memory._set_memory_metadata(phase)

    def emptied() -> None:
        torch.cuda.memory._set_memory_metadata(f"{phase}/{EMPTY_CACHE}")
        empty_cache()
        torch.cuda.memory._set_memory_metadata(phase)

    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    torch.cuda.memory._set_memory_metadata(phase)
    try:
        with (
            patch.object(CudaGauge, "mark", marked),
            patch.object(torch.cuda, "empty_cache", emptied),
            patch.object(torch.cuda.memory, "empty_cache", emptied),
        ):
            yield found
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        found.read(history)
        found.addresses_fall = addresses_fall(history)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.memory._set_memory_metadata("")
