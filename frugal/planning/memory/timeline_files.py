"""A timeline as a file that other tools open, by the end of the file's name:

    .csv      one row an event: a storage that begins or ends to live. Columns as in `COLUMNS`; by category and in total
              the bytes of live tensors after the event, before the allocator rounds them up
    .pickle   a snapshot as of `torch.cuda.memory._dump_snapshot`, which https://pytorch.org/memory_viz draws and
              `torch.cuda._memory_viz` reads. Each timeline is a device of its own, in the order given

Nothing here has seconds: an event counts as a microsecond.
"""

import csv
import pickle
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from frugal.errors import failure, refuse
from frugal.planning.memory.timeline import CATEGORIES, Timeline

COLUMNS = ("event", "phase", "operator", "module", *CATEGORIES, "total")
TABLE, SNAPSHOT = ".csv", ".pickle"
FIRST_ADDRESS, ALIGNMENT = 1 << 40, 512
"""The base for storages in a snapshot, each of which has an address of its own."""


def check_file(path: Path, *, has_table: bool = True) -> None:
    """Refuse a file that could not be written, before the work is done. `has_table`: whether a table is possible.

    Raises:
        RequestError: another kind of file, or no such folder.
    """
    kinds = (TABLE, SNAPSHOT) if has_table else (SNAPSHOT,)
    what = f"a timeline cannot be written to {path}"
    because = f"its name does not end in {' or '.join(kinds)}"
    refuse(
        (path.suffix not in kinds, what, because, f"call it {path.with_suffix(kinds[0])}"),
        (not path.parent.is_dir(), what, f"there is no folder {path.parent}", None),
    )


def write(path: Path, timelines: Mapping[str, Timeline]) -> None:
    """Write timelines by name into a file of the kind that its name says; a table holds the first one only.

    Raises:
        RequestError: it cannot be written.
    """
    with failure(f"a timeline cannot be written to {path}", OSError):
        if path.suffix == SNAPSHOT:
            path.write_bytes(pickle.dumps(snapshot(timelines)))
            return
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(_rows(next(iter(timelines.values()))))


def _rows(timeline: Timeline) -> Iterator[tuple[Any, ...]]:
    live = [0] * len(CATEGORIES)
    changes, is_birth = timeline.changes(0).tolist(), timeline.is_birth.tolist()
    for phase, events in timeline.phase_ranges:
        for event in events:
            storage = timeline.events[event]
            live[timeline.categories[storage]] += changes[event]
            operator = timeline.names[timeline.operators[storage]] if is_birth[event] else ""
            yield event, phase, operator, timeline.names[timeline.modules[storage]], *live, sum(live)


def snapshot(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return what torch's `_memory_viz` reads. Blocks are as large as their tensors, and there are no segments."""
    annotations = [
        {"name": f"{name}: {phase}", "stage": stage, "device": device, "time_us": moment}
        for device, (name, timeline) in enumerate(timelines.items())
        for phase, events in timeline.phase_ranges
        if events
        for stage, moment in (("START", events.start), ("END", events.stop - 1))
    ]
    traces = [_device_trace(timeline) for timeline in timelines.values()]
    return {"segments": [], "device_traces": traces, "external_annotations": annotations}


def _device_trace(timeline: Timeline) -> list[dict[str, Any]]:
    blocks = (-(-size // ALIGNMENT) * ALIGNMENT for size in timeline.fixed)
    addresses = list(accumulate(blocks, initial=FIRST_ADDRESS))
    has_categories = len(set(timeline.categories)) > 1  # a measured one has none
    entries = []
    for event, (storage, begins) in enumerate(zip(timeline.events, timeline.is_birth.tolist(), strict=True)):
        if not timeline.fixed[storage]:
            continue
        category = CATEGORIES[timeline.categories[storage]] if has_categories else ""
        place = timeline.names[timeline.modules[storage]] or category
        frame = {"name": timeline.names[timeline.operators[storage]], "filename": place, "line": 0}
        entries.append(
            {
                "action": "alloc" if begins else "free_completed",
                "addr": addresses[storage],
                "size": timeline.fixed[storage],
                "stream": 0,
                "time_us": event,
                "frames": [frame],
            }
        )
    return entries
