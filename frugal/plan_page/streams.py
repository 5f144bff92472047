"""Timelines as a page carries them: every event, in a tenth of a byte.

A storage's size, category and operator are one of a hundred classes. An event is 0 for a birth, or how many storages
were born since the one that dies and still live, itself included: in each of a model's layers these are the same
numbers, which is what compresses. A page takes a stream apart in `assets/plan_timeline.js`.

Parts are variable-length integers of 7 bits, deflated, in base64, and kept once however many timelines share them.
"""

import zlib
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from frugal.planning.memory.timeline import Timeline
from frugal.planning.memory.workspaces import SCRATCH


class Streams:
    """Timelines, and what they have in common.

    Attributes:
        parts: deflated integers in base64; timelines name them by their place here.
        names: operators and modules; classes and modules of timelines are places here.
        num_bytes: of all parts, as they are written.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.names: list[str] = []
        self.num_bytes = 0
        self._known: dict[bytes, int] = {}
        self._number: dict[str, int] = {}

    def add(self, timeline: Timeline, element_bytes: int) -> dict[str, Any]:
        """`timeline` in plain types. Parameters have `element_bytes` an element, which tells a sum's columns."""
        renamed = [self._name(name) for name in timeline.names]
        births, events, modules, classes = _taken_apart(timeline, renamed, element_bytes)
        return {
            "births": self._part(births),
            "events": self._part(events),
            "modules": self._part(map(_unsigned, _differences(modules))),
            "classes": self._part(number for each in classes for number in each),
            "phases": [[name, first] for name, first in timeline.phases],
            "empties": list(timeline.empties),
        }

    def _name(self, name: str) -> int:
        if name not in self._number:
            self._number[name] = len(self.names)
            self.names.append(name)
        return self._number[name]

    def _part(self, numbers: Iterable[int]) -> int:
        packed = packed_integers(numbers)
        if packed not in self._known:
            self._known[packed] = len(self.parts)
            deflater = zlib.compressobj(9, wbits=-15)  # "deflate-raw", as browsers call it
            self.parts.append(b64encode(deflater.compress(packed) + deflater.flush()).decode())
            self.num_bytes += len(self.parts[-1])
        return self._known[packed]


def _taken_apart(
    timeline: Timeline, renamed: list[int], element_bytes: int
) -> tuple[list[int], list[int], list[int], Iterable[tuple[int, int, int, int, int]]]:
    """Of every birth its class and its module, of every event what the module says, and the classes.

    A class: fixed bytes (as `_unsigned`), bytes a sample, category, operator, and for scratch of a sum its columns,
    from which another card's scratch follows.
    """
    fixed, per_sample, categories, operators = (
        timeline.fixed,
        timeline.per_sample,
        timeline.categories,
        timeline.operators,
    )
    scratch = timeline.names.index(SCRATCH) if SCRATCH in timeline.names else -1
    classes: dict[tuple[int, int, int, int, int], int] = {}
    births, events, modules = [], [], []
    place: dict[int, int] = {}  # of each storage, in the order of birth
    live: list[int] = []
    before = -1
    for storage in timeline.events:
        number = place.get(storage)
        if number is None:
            place[storage] = number = len(place)
            live.append(number)
            events.append(0)
            operator = operators[storage]
            columns = fixed[before] // element_bytes if operator == scratch else 0  # it is asked for after the sum
            key = (_unsigned(fixed[storage]), per_sample[storage], categories[storage], renamed[operator], columns)
            births.append(classes.setdefault(key, len(classes)))
            modules.append(renamed[timeline.modules[storage]])
        else:
            at = bisect_left(live, number)
            events.append(len(live) - at)
            del live[at]
        before = storage
    return births, events, modules, classes


def _differences(numbers: Iterable[int]) -> Iterable[int]:
    before = 0
    for number in numbers:
        yield number - before
        before = number


def _unsigned(number: int) -> int:
    """0, -1, 1, -2 ... as 0, 1, 2, 3 ..."""
    return 2 * number if number >= 0 else -2 * number - 1


def packed_integers(numbers: Iterable[int]) -> bytes:
    """Numbers from 0 on, seven bits a byte, the lowest first; a byte from 128 on has another behind it."""
    packed = bytearray()
    for number in numbers:
        while number >= 128:
            packed.append(number & 127 | 128)
            number >>= 7
        packed.append(number)
    return bytes(packed)
