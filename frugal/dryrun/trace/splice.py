"""The stream of a model's step cut where its repeated layers begin and end, and what each part says of itself.

A trace is cut at the beginning of each layer in forward and at the end of each in backward; between the cuts of two
neighbours lies one layer's part. Where layers alternate, a period of several takes the part of one.

A trace of a few layers made into one of many: the events of a middle layer are repeated.

Repeated layers do the same, so their births and deaths are the same but for whose storages they are. Two parts in the
middle (see `frugal.dryrun.trace.splice`) must say the same, each about itself and its neighbours: then any number
of layers can stand between.

Not seen by that: storages outside the layers whose size depends on how many there are. Who splices compares traces
of different numbers of layers for that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from frugal.planning.memory.model_trace import GRADIENT, HOLD, LAYER, LET_GO, Mark
from frugal.planning.memory.timeline import Timeline

Marks = tuple[tuple[Mark, ...], ...]


class NotPeriodicError(Exception):
    """The layers of a trace do not do the same."""


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
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

    def __init__(self, stream: Timeline, marks: Marks, layout: LayerLayout) -> None:
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


def splice(stream: Timeline, marks: Marks, layout: LayerLayout, num_periods: int) -> tuple[Timeline, Marks]:
    """The stream and the marks of the same model with at least as many periods of layers.

    Raises:
        NotPeriodicError: its layers do not do the same.
    """
    parts = Parts(stream, marks, layout)
    middle, more = parts.middle, num_periods - layout.num_periods
    for kind, other in ((FORWARD_PART, middle + 1), (BACKWARD_PART, middle - 1)):
        if parts.said(kind, middle) != parts.said(kind, other):
            raise NotPeriodicError("two layers in the middle do not do the same")
    made = _Made(parts, more)
    before, forward, between, backward, after = _arranged(parts.parts, middle, more)
    for part, number in (*before, *forward, *between, *backward, *after):
        made.play(part, number)
    return made.result()


def _arranged(parts: Sequence[Part], middle: int, more: int) -> Iterator[list[tuple[Part, int]]]:
    """The parts in their new order, each with the number of its period there."""
    outside = [part for part in parts if part.kind == OUTSIDE]
    for i, kind in enumerate((FORWARD_PART, BACKWARD_PART)):
        yield [(outside[i], i)]
        own = sorted((part for part in parts if part.kind == kind), key=lambda part: part.number)
        placed = [(part, part.number) for part in own[: middle + 1]]
        placed += [(own[middle], middle + 1 + i) for i in range(more)]
        placed += [(part, part.number + more) for part in own[middle + 1 :]]
        yield placed if kind == FORWARD_PART else placed[::-1]
    yield [(outside[2], 2)]


class _Made:
    """The longer stream, while it is written."""

    def __init__(self, parts: Parts, more: int) -> None:
        self._parts = parts
        self._more = more
        self._template: list[int] = []  # of every new storage, which it is like
        self._modules: list[str] = []
        self._storage: dict[Owner, int] = {}
        self._hold: dict[Owner, int] = {}
        self._events: list[int] = []
        self._phases: list[tuple[str, int]] = []
        self._marks: list[list[Mark]] = []

    def play(self, part: Part, number: int) -> None:
        """Write `part` as that of period `number`."""
        parts, shift = self._parts, number - part.number
        names = parts.stream.names
        births = holds = 0
        for position in range(part.start, part.end):
            item = parts.items[position]
            if parts.births[position]:
                storage = len(self._template)
                self._storage[part.kind, number, births] = storage
                births += 1
                self._template.append(item[1])
                name = names[parts.stream.modules[item[1]]]
                self._modules.append(parts.renamed(name, part, shift, self._more))
                self._events.append(storage)
            elif item[0] == EVENT:
                self._events.append(self._find(self._storage, parts.owner[item[1]], part, shift))
            elif item[0] == PHASE:
                self._phases.append((item[1], len(self._events)))
                self._marks.append([])
            else:
                _, what, about, storage = item
                if what == HOLD:
                    self._hold[part.kind, number, holds] = storage = len(self._hold)
                    holds += 1
                elif what == LET_GO:
                    storage = self._find(self._hold, parts.hold_owner[storage], part, shift)
                elif storage >= 0:
                    storage = self._find(self._storage, parts.owner[storage], part, shift)
                about = parts.numbered(what, about, part, shift, self._more)
                self._marks[-1].append((len(self._events), what, about, storage))

    def _find(self, known: dict[Owner, int], owner: Owner, part: Part, shift: int) -> int:
        kind, number, ordinal = owner
        if kind != OUTSIDE:
            if part.kind == OUTSIDE:
                shift = self._more if number > self._parts.middle else 0
            number += shift
        storage = known.get((kind, number, ordinal))
        if storage is None:
            raise NotPeriodicError("a layer frees what was never made")
        return storage

    def result(self) -> tuple[Timeline, Marks]:
        """What was written, names in the order of their use, as a recorder has them."""
        stream = self._parts.stream
        names: dict[str, int] = {"": 0}
        operators, modules = [], []
        for template, module in zip(self._template, self._modules, strict=True):
            operator = stream.names[stream.operators[template]]
            operators.append(names.setdefault(operator, len(names)))
            modules.append(names.setdefault(module, len(names)))
        return Timeline(
            fixed=tuple(stream.fixed[i] for i in self._template),
            per_sample=tuple(stream.per_sample[i] for i in self._template),
            categories=tuple(stream.categories[i] for i in self._template),
            operators=tuple(operators),
            modules=tuple(modules),
            names=tuple(names),
            events=tuple(self._events),
            phases=tuple(self._phases),
        ), tuple(map(tuple, self._marks))
