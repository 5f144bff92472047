"""The stream of a model's step cut where its repeated layers begin and end, and what each part says of itself.

A trace is cut at the beginning of each layer in forward and at the end of each in backward; between the cuts of two
neighbours lies one layer's part. Where layers alternate, a period of several takes the part of one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from frugal.planning.timeline import Timeline
from frugal.planning.zero.trace import GRADIENT, HOLD, LAYER, LET_GO, Mark

Marks = tuple[tuple[Mark, ...], ...]


class NotPeriodicError(Exception):
    """The layers of a trace do not do the same."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the repeated layers are. Numbers of layers, parameters and modules are those of the traced model.

    Attributes:
        path: name of the list of layers.
        first_layer: the layer that begins the first period.
        period: layers in a period.
        num_periods: that were traced.
        first_parameter: of the first period.
        parameters: of one period.
        first_module: of the first period.
        modules: of one period.
    """

    path: str
    first_layer: int
    period: int
    num_periods: int
    first_parameter: int
    parameters: int
    first_module: int
    modules: int


EVENT, MARK, PHASE = range(3)
FORWARD_PART, BACKWARD_PART, OUTSIDE = range(3)


@dataclass(frozen=True)
class Part:
    """A stretch of the stream. `number`: of its period, or of a part outside the layers."""

    kind: int
    number: int
    start: int
    end: int


Owner = tuple[int, int, int]
"""Kind and number of the part that a storage is born in, and how many are born there before."""


class Parts:
    """A stream cut into parts."""

    def __init__(self, stream: Timeline, marks: Marks, layout: Layout) -> None:
        self.stream = stream
        self.layout = layout
        self.items = list(_items(stream, marks))
        self.parts = self._cut()
        self.owner: dict[int, Owner] = {}
        self.hold_owner: dict[int, Owner] = {}
        self.births: list[bool] = []
        for part in self.parts:
            births = holds = 0
            for item in self.items[part.start : part.end]:
                is_birth = item[0] == EVENT and item[1] not in self.owner
                if is_birth:
                    self.owner[item[1]] = (part.kind, part.number, births)
                    births += 1
                elif item[0] == MARK and item[1] == HOLD:
                    self.hold_owner[item[3]] = (part.kind, part.number, holds)
                    holds += 1
                self.births.append(is_birth)

    def _cut(self) -> list[Part]:
        layout = self.layout
        q, last = layout.num_periods, len(self.items)
        forward = [-1] * q
        gradients: dict[int, int] = {}
        for position, item in enumerate(self.items):
            if item[0] == MARK and item[1] == LAYER:
                period, rest = divmod(item[2] - layout.first_layer, layout.period)
                if rest == 0 and period >= 0 and forward[period] < 0:
                    forward[period] = position
            elif item[0] == MARK and item[1] == GRADIENT:
                gradients[item[2]] = position
        own = range(layout.first_parameter + layout.parameters, layout.first_parameter + 2 * layout.parameters)
        trained = [parameter for parameter in own if parameter in gradients]
        if not trained or min(forward) < 0:
            raise NotPeriodicError("a layer does not run, or has no gradient")
        offset = max(trained, key=gradients.__getitem__) - layout.first_parameter - layout.parameters
        ends = [gradients.get(layout.first_parameter + i * layout.parameters + offset, -1) + 1 for i in range(q)]
        cuts = [*forward, *reversed(ends)]
        if sorted(cuts) != cuts or cuts[0] < 0:
            raise NotPeriodicError("layers do not run one after the other")
        parts = [Part(OUTSIDE, 0, 0, forward[0])]
        parts += [Part(FORWARD_PART, i, forward[i], forward[i + 1]) for i in range(q - 1)]
        parts.append(Part(OUTSIDE, 1, forward[-1], ends[-1]))
        parts += [Part(BACKWARD_PART, i, ends[i + 1], ends[i]) for i in reversed(range(q - 1))]
        parts.append(Part(OUTSIDE, 2, ends[0], last))
        return parts

    def said(self, kind: int, number: int) -> list[Any]:
        """What a part says, in words that are the same for all layers."""
        (part,) = [part for part in self.parts if (part.kind, part.number) == (kind, number)]
        words: list[Any] = []
        stream = self.stream
        for position in range(part.start, part.end):
            item = self.items[position]
            if self.births[position]:
                storage = item[1]
                words.append(
                    (
                        stream.fixed[storage],
                        stream.per_sample[storage],
                        stream.categories[storage],
                        stream.operators[storage],
                        self.renamed(stream.names[stream.modules[storage]], part, -number),
                    )
                )
            elif item[0] == EVENT:
                words.append(_relative(self.owner[item[1]], number))
            elif item[0] == MARK:
                _, what, about, storage = item
                who = self.hold_owner.get(storage) if what in (HOLD, LET_GO) else self.owner.get(storage)
                words.append((what, self.numbered(what, about, part, -number), who and _relative(who, number)))
            else:
                raise NotPeriodicError("a phase begins in the middle of the layers")
        return words

    def renamed(self, name: str, part: Part, shift: int, after: int = 0) -> str:
        """A module's name, its layer moved by `shift` periods; outside of parts those behind the splice by `after`."""
        head, dot, tail = name[len(self.layout.path) + 1 :].partition(".")
        if not name.startswith(self.layout.path + ".") or not head.isdecimal():
            return name
        layer = int(head)
        if part.kind == OUTSIDE:
            shift = after if (layer - self.layout.first_layer) // self.layout.period > self.middle else 0
        if layer < self.layout.first_layer:
            return name
        return f"{self.layout.path}.{layer + shift * self.layout.period}{dot}{tail}"

    def numbered(self, what: int, number: int, part: Part, shift: int, after: int = 0) -> int:
        """The number of a mark's parameter, module or layer, moved likewise; behind all layers by `after` anyway."""
        layout = self.layout
        first, size = (
            (layout.first_parameter, layout.parameters)
            if what in (GRADIENT, HOLD, LET_GO)
            else (layout.first_layer, layout.period)
            if what == LAYER
            else (layout.first_module, layout.modules)
        )
        if number < first:
            return number
        period = (number - first) // size
        if period >= layout.num_periods:
            return number + after * size
        if part.kind == OUTSIDE:
            return number + (after * size if period > self.middle else 0)
        return number + shift * size

    @property
    def middle(self) -> int:
        """The period that is repeated: with two others on each side, since the first and the last are not alike."""
        return self.layout.num_periods // 2


def _items(stream: Timeline, marks: Marks) -> Iterator[tuple[Any, ...]]:
    """Phases, events and marks in one row."""
    ends = [first for _, first in stream.phases[1:]] + [len(stream.events)]
    for (phase, position), end, own in zip(stream.phases, ends, marks, strict=True):
        yield PHASE, phase
        for event, what, number, storage in own:
            for i in range(position, event):
                yield EVENT, stream.events[i]
            position = event
            yield MARK, what, number, storage
        for i in range(position, end):
            yield EVENT, stream.events[i]


def _relative(owner: Owner, number: int) -> Owner:
    """As seen from period `number`."""
    kind, own, ordinal = owner
    return (kind, own if kind == OUTSIDE else own - number, ordinal)
