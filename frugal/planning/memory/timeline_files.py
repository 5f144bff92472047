"""A timeline as a file that other tools open: spreadsheets, torch's memory_viz, Perfetto.

What the end of a file's name says:

    .csv, .json   one row an event, a storage that begins or ends to live: lines under a head, or a list for each column
    .pickle       a snapshot as of `torch.cuda.memory._dump_snapshot`: https://pytorch.org/memory_viz draws it, and
                  `torch.cuda._memory_viz` reads it. Each timeline is a device of its own, in the order given
    .trace.json   Chrome's trace events: https://ui.perfetto.dev and chrome://tracing draw them. Each timeline is a
                  process, with its phases and counters of live bytes, by category where that is known

The columns of a table:

    event        number, from 0
    phase        initialisation, forward, backward, optimizer step
    operator     what made the storage that begins; empty where one ends
    module       that was running when the storage began, a dotted name; empty outside of the model
    parameters, gradients, optimizer, activations, logits, communication, temporary
                 bytes alive in each category after the event
    total        their sum: live tensors, before the allocator rounds them up

Nothing here has seconds: an event counts as a microsecond. Where there are two timelines, one predicted and one
measured, a phase that both have begins and ends for both at the same time.
"""

import csv
import pickle
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from frugal.errors import RequestError
from frugal.planning.memory.timeline import CATEGORIES, Timeline

COLUMNS = ("event", "phase", "operator", "module", *CATEGORIES, "total")
TABLES, SNAPSHOT, TRACE = (".csv", ".json"), ".pickle", ".trace.json"
FIRST_ADDRESS, ALIGNMENT = 1 << 40, 512
"""Of the storages in a snapshot, each of which has an address that no other ever has."""


def check_file(path: Path, *, has_tables: bool = True) -> None:
    """Refuse a file that could not be written, before the work is done. `has_tables`: whether a table is possible.

    Raises:
        RequestError: another kind of file, or no such folder.
    """
    kinds = (*(TABLES if has_tables else ()), SNAPSHOT, TRACE)
    is_table = path.suffix in TABLES and not path.name.endswith(TRACE)
    if not path.name.endswith(kinds) or (is_table and not has_tables):
        raise RequestError(
            f"a timeline cannot be written to {path}",
            because=f"its name ends in none of {', '.join(kinds)}",
            hint=f"call it {path.with_suffix(kinds[0])}",
        )
    if not path.parent.is_dir():
        raise RequestError(f"a timeline cannot be written to {path}", because=f"there is no folder {path.parent}")


def write(path: Path, timelines: Mapping[str, Timeline]) -> None:
    """One timeline or two, by name, into a file of the kind that its name says; a table has room for the first alone.

    Raises:
        RequestError: it cannot be written.
    """
    first = next(iter(timelines.values()))
    try:
        if path.name.endswith(TRACE):
            path.write_bytes(msgspec.json.encode({"traceEvents": list(trace_events(timelines))}) + b"\n")
        elif path.suffix == SNAPSHOT:
            path.write_bytes(pickle.dumps(snapshot(timelines)))
        elif path.suffix == ".csv":
            with path.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(COLUMNS)
                writer.writerows(rows(first))
        else:
            columns = zip(*rows(first), strict=True)
            path.write_bytes(msgspec.json.encode(dict(zip(COLUMNS, columns, strict=True))) + b"\n")
    except OSError as error:
        raise RequestError(f"a timeline cannot be written to {path}", because=str(error.strerror)) from None


def rows(timeline: Timeline) -> Iterator[tuple[Any, ...]]:
    """One for every event; see the module's table."""
    live = [0] * len(CATEGORIES)
    changes, is_birth = timeline.changes(0).tolist(), timeline.is_birth.tolist()
    for phase, events in timeline.phase_ranges:
        for event in events:
            storage = timeline.events[event]
            live[timeline.categories[storage]] += changes[event]
            operator = timeline.names[timeline.operators[storage]] if is_birth[event] else ""
            yield event, phase, operator, timeline.names[timeline.modules[storage]], *live, sum(live)


def snapshot(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """What torch's `_memory_viz` takes. Blocks are as large as the tensors in them, and there are no segments."""
    times = _microseconds(timelines)
    traces = [_device_trace(timeline, times[name]) for name, timeline in timelines.items()]
    annotations = [
        {"name": f"{name}: {phase}", "stage": stage, "device": device, "time_us": moments[at]}
        for device, (name, timeline) in enumerate(timelines.items())
        for moments in [times[name]]
        for phase, events in timeline.phase_ranges
        if events
        for stage, at in (("START", events.start), ("END", events.stop - 1))
    ]
    return {"segments": [], "device_traces": traces, "external_annotations": annotations}


def _device_trace(timeline: Timeline, microseconds: Sequence[int]) -> list[dict[str, Any]]:
    places = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in timeline.fixed), initial=FIRST_ADDRESS)
    addresses = list(places)
    has_categories = len(set(timeline.categories)) > 1  # one that was measured has none
    entries = []
    for event, (storage, begins) in enumerate(zip(timeline.events, timeline.is_birth.tolist(), strict=True)):
        if not timeline.fixed[storage]:
            continue
        operator = timeline.names[timeline.operators[storage]]
        place = timeline.names[timeline.modules[storage]]
        if not place and has_categories:
            place = CATEGORIES[timeline.categories[storage]]
        entries.append(
            {
                "action": "alloc" if begins else "free_completed",
                "addr": addresses[storage],
                "size": timeline.fixed[storage],
                "stream": 0,
                "time_us": microseconds[event],
                "frames": [{"name": operator, "filename": place, "line": 0}],
            }
        )
    return entries


def trace_events(timelines: Mapping[str, Timeline]) -> Iterator[dict[str, Any]]:
    """Chrome's trace events: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    times = _microseconds(timelines)
    for process, (name, timeline) in enumerate(timelines.items(), 1):
        moments = times[name]
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        for phase, events in timeline.phase_ranges:
            if events:
                begins, ends = moments[events.start], moments[events.stop - 1]
                yield {"ph": "X", "name": phase, "pid": process, "tid": 0, "ts": begins, "dur": ends - begins + 1}
        live, total, has_categories = [0] * len(CATEGORIES), 0, len(set(timeline.categories)) > 1
        for event, change in enumerate(timeline.changes(0).tolist()):
            category = timeline.categories[timeline.events[event]]
            live[category] += change
            total += change
            if not change:
                continue
            counters = {"total": total} | ({CATEGORIES[category]: live[category]} if has_categories else {})
            for counter, size in counters.items():
                yield {"ph": "C", "name": counter, "pid": process, "ts": moments[event], "args": {"bytes": size}}


def _microseconds(timelines: Mapping[str, Timeline]) -> dict[str, list[int]]:
    """When each event of each timeline is: in a phase that all have, the events of each are spread over its time."""
    ranges = [timeline.phase_ranges for timeline in timelines.values()]
    times: list[list[int]] = [[] for _ in timelines]
    begin = 0
    for slot in _slots([[phase for phase, _ in each] for each in ranges]):
        events = [0 if place is None else len(each[place][1]) for each, place in zip(ranges, slot, strict=True)]
        length = max(events)
        for moments, number in zip(times, events, strict=True):
            moments.extend(begin + i * length // number for i in range(number))
        begin += length
    return dict(zip(timelines, times, strict=True))


def _slots(phases: Sequence[Sequence[str]]) -> list[tuple[int | None, ...]]:
    """Stretches of time in order: for each timeline the number of the phase that it is in, if it is in one.

    A prediction may do fewer micro-steps in its first optimizer step than a run, so phases are matched as lines of two
    texts are.
    """
    if len(phases) == 1:
        return [(number,) for number in range(len(phases[0]))]
    first, second = phases
    slots: list[tuple[int | None, ...]] = []
    for kind, a, end_of_a, b, end_of_b in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "equal":
            slots += zip(range(a, end_of_a), range(b, end_of_b), strict=True)
        else:
            slots += [(number, None) for number in range(a, end_of_a)]
            slots += [(None, number) for number in range(b, end_of_b)]
    return slots
