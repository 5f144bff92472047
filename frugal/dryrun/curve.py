"""The live bytes of a rehearsal over its events, for plotting. No torch here.

One row an event, a storage that begins or ends to live. Columns:

    event        number, from 0
    phase        initialisation, forward, backward, optimizer step
    operator     what made the storage that begins; empty where one ends
    module       that was running when the storage began, a dotted name; empty outside of the model
    parameters, gradients, optimizer, activations, logits, communication, temporary
                 bytes alive in each category after the event
    total        their sum: live tensors, before the allocator rounds them up

A .csv file has them as lines under a head, a .json file as one object with a list for each column.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from frugal.errors import RequestError
from frugal.planning.timeline import CATEGORIES, Recording

COLUMNS = ("event", "phase", "operator", "module", *CATEGORIES, "total")
SUFFIXES = (".csv", ".json")


def check(path: Path) -> None:
    """Refuse a file that could not be written, before the work is done.

    Raises:
        RequestError: another kind of file, or no such folder.
    """
    if path.suffix not in SUFFIXES:
        raise RequestError(
            f"a timeline cannot be written to {path}",
            because="its name ends neither in .csv nor in .json",
            hint=f"call it {path.with_suffix('.csv')}",
        )
    if not path.parent.is_dir():
        raise RequestError(f"a timeline cannot be written to {path}", because=f"there is no folder {path.parent}")


def rows(recording: Recording) -> Iterator[tuple[Any, ...]]:
    """One for every event; see the module's table."""
    live = [0] * len(CATEGORIES)
    alive = bytearray(len(recording.sizes))
    starts = {first: name for name, first in recording.phases}
    phase = ""
    for event, storage in enumerate(recording.events):
        phase = starts.get(event, phase)
        ends = bool(alive[storage])
        alive[storage] ^= 1
        size = recording.sizes[storage]
        live[recording.categories[storage]] += -size if ends else size
        operator = "" if ends else recording.names[recording.operators[storage]]
        yield event, phase, operator, recording.names[recording.modules[storage]], *live, sum(live)


def write(recording: Recording, path: Path) -> None:
    """All rows into a .csv or .json file.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        if path.suffix == ".csv":
            with path.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(COLUMNS)
                writer.writerows(rows(recording))
        else:
            columns = zip(*rows(recording), strict=True)
            path.write_bytes(msgspec.json.encode(dict(zip(COLUMNS, columns, strict=True))) + b"\n")
    except OSError as error:
        raise RequestError(f"a timeline cannot be written to {path}", because=str(error.strerror)) from None
