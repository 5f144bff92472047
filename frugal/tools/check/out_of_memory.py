"""torch's out-of-memory message, parsed from a log, and the matching request of a dry run.

Wordings, by the version of torch that first had them:

    1.0    (GPU 0; 10.92 GiB total capacity; 8.57 GiB already allocated; 1.28 GiB free; 4.68 MiB cached)
    1.4    ...; 8.90 GiB reserved in total by PyTorch)
    2.1    GPU 0 has a total capacty of ... of which ... is free. Process 7 has ... memory in use. Of the allocated
           memory ... is allocated by PyTorch, and ... is reserved by PyTorch but unallocated.
    2.2    "capacity" spelled right; "Including non-PyTorch memory, this process has ... memory in use."

torch writes `[rank3]:` before each line of a rank, torchrun's agent `[default3]:`. "Tried to allocate" is the request
to the driver (`get_allocation_size`, CUDACachingAllocator.cpp): a request up to 1 MiB becomes 2 MiB, up
to 10 MiB 20 MiB, above that a multiple of 2 MiB. It is printed with two decimals.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from frugal.dryrun.messages import DryRun
from frugal.errors import failure, refuse
from frugal.planning.memory.caching_allocator import SMALLEST_BLOCK, segment_bytes
from frugal.planning.memory.timeline import BACKWARD, FORWARD, INITIALISATION, OPTIMIZER_STEP
from frugal.tools.check.document import Place
from frugal.units import GIB, KIB, MIB, TIB

_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_REQUEST = re.compile(rf"out of memory\. Tried to allocate {_SIZE}")
_RANK = re.compile(r"^\s*\[(?:rank|default|trainer|worker)?-?(\d+)\]:")
_GPU = re.compile(r"GPU (\d+)")
_SIZES = {
    "total": rf"{_SIZE} total capacity|total capaci?ty of {_SIZE}",
    "free": rf"{_SIZE} free|of which {_SIZE} is free",
    "allocated": rf"{_SIZE} already allocated|allocated memory {_SIZE} is allocated",
    "reserved": rf"{_SIZE} (?:reserved in total|cached)",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "in_use": rf"this process has {_SIZE} memory in use",
}

_PHASES = (
    (r"in (evaluate|evaluation_loop|prediction_step|generate)\b", "evaluation"),
    (r"run_backward|in backward\b", BACKWARD),
    (r"(optim|deepspeed)/.*in (step|_take_model_step|_optimizer_step)\b", OPTIMIZER_STEP),
    (r"deepspeed/.*in (initialize|_configure_\w+|initialize_optimizer_states)\b", INITIALISATION),
    (r"in (forward|_call_impl|compute_loss)\b", FORWARD),
    (r"in (from_pretrained|_load_\w+|_apply)\b", "loading"),
)
"""The phase by patterns of a traceback's frames, tried in this order."""

_LINES_OF_TRACEBACK = 400


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryMessage:
    """One out-of-memory message. Sizes are bytes, rounded as torch prints them; None where the wording has no such
    number.

    Attributes:
        requested_bytes: asked of the driver.
        rounding_bytes: half of the last digit that is printed of it.
        total_bytes: of the card.
        free_bytes: that the driver had.
        allocated_bytes: in torch's live blocks.
        reserved_bytes: in torch's segments.
        in_use_bytes: of this process, its context included.
        gpu: its number on the host.
        rank: as the line's beginning says.
        phase: as the traceback says; empty: it does not.
        place: the line in the log.
        num_ranks: ranks whose lines have such a message; 1 where none says which it is.
    """

    requested_bytes: int
    rounding_bytes: int
    total_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    in_use_bytes: int | None
    gpu: int | None
    rank: int | None
    phase: str
    place: Place
    num_ranks: int = 1

    @property
    def unallocated_bytes(self) -> int | None:
        """Return the bytes that torch had reserved outside of live blocks."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def others_bytes(self) -> int | None:
        """Return the bytes of other processes and of CUDA contexts."""
        if self.total_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)


def read(path: Path) -> OutOfMemoryMessage:
    """Return the first message in a log, which is the one that stopped the run.

    Raises:
        RequestError: it cannot be read, or has none.
    """
    with failure(f"cannot read {path}", OSError):
        lines = path.read_text(errors="replace").splitlines()
    numbers = [number for number, line in enumerate(lines) if _REQUEST.search(line)]
    refuse(
        (
            not numbers,
            f"{path} has no message of torch's that a GPU is out of memory",
            "no line says `out of memory. Tried to allocate ...`",
            "give the log with the whole traceback, of all ranks",
        )
    )
    number = numbers[0]
    text = " ".join(lines[number : number + 3])  # a terminal may have cut it
    request, rank, gpu = _REQUEST.search(text), _RANK.match(lines[number]), _GPU.search(text)
    assert request is not None
    sizes = {name: _size(match) for name, pattern in _SIZES.items() if (match := re.search(pattern, text))}
    if {"allocated", "unallocated"} <= sizes.keys():
        sizes.setdefault("reserved", sizes["allocated"] + sizes["unallocated"])
    decimals = len(request[1].partition(".")[2])
    # the traceback that ends here, in lines of the same rank only
    before = lines[max(0, number - _LINES_OF_TRACEBACK) : number]
    own = [line for line in before if line.lstrip().startswith(rank[0].strip() if rank else "")]
    starts = [i for i, line in enumerate(own) if "Traceback (most recent call last)" in line]
    frames = "\n".join(own[starts[-1] :]) if starts else ""
    return OutOfMemoryMessage(
        requested_bytes=round(float(request[1]) * _UNITS[request[2]]),
        rounding_bytes=int(_UNITS[request[2]] / 10**decimals / 2) + 1 if request[2] != "bytes" else 0,
        total_bytes=sizes.get("total"),
        free_bytes=sizes.get("free"),
        allocated_bytes=sizes.get("allocated"),
        reserved_bytes=sizes.get("reserved"),
        in_use_bytes=sizes.get("in_use"),
        gpu=int(gpu[1]) if gpu else None,
        rank=int(rank[1]) if rank else None,
        phase=next((phase for pattern, phase in _PHASES if re.search(pattern, frames)), ""),
        place=Place(path, "", number + 1),
        num_ranks=max(1, len({match[1] for each in numbers if (match := _RANK.match(lines[each]))})),
    )


def _size(match: re.Match[str]) -> int:
    number, unit = filter(None, match.groups())
    return round(float(number) * _UNITS[unit])


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Requests of a dry run that torch would print like the message's, grouped by phase, operator and kind of module.

    `live_bytes`: the most live bytes before one of them.
    """

    phase: str
    operator: str
    module: str
    size_bytes: int
    live_bytes: int


_NUMBER = re.compile(r"\.\d+(?=\.|$)")  # of a layer in a dotted name


def askers(message: OutOfMemoryMessage, dry_runs: Sequence[DryRun]) -> list[Asked]:
    """Return the operators of a dry run that request this many bytes, the likeliest first: those in the traceback's
    phase, then those whose live memory is nearest to the message's."""
    groups: dict[tuple[str, str, str], Asked] = {}
    for dry_run in dry_runs:
        timeline = dry_run.timeline
        is_birth, changes = timeline.is_birth.tolist(), timeline.changes(dry_run.micro_batch).tolist()
        live = 0
        for phase, events in timeline.phase_ranges:
            for event in events:
                size = changes[event]
                asked = segment_bytes(-(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK) if is_birth[event] and size else 0
                if asked and abs(asked - message.requested_bytes) <= message.rounding_bytes:
                    storage = timeline.events[event]
                    module = _NUMBER.sub(".*", timeline.names[timeline.modules[storage]])
                    key = (phase, timeline.names[timeline.operators[storage]], module)
                    before = groups.get(key)
                    most = max(live, before.live_bytes if before else 0)
                    groups[key] = Asked(phase=phase, operator=key[1], module=module, size_bytes=size, live_bytes=most)
                live += size

    def distance(asked: Asked) -> tuple[bool, int]:
        return asked.phase != message.phase, abs(asked.live_bytes - (message.allocated_bytes or asked.live_bytes))

    return sorted(groups.values(), key=distance)
