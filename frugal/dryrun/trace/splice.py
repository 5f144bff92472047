"""A trace of a few layers made into one of many: the events of a middle layer are repeated.

A trace is cut at the beginning of each layer in forward and at the end of each in backward; between the cuts of two
neighbours lies one layer's part. Where layers alternate, a period of several takes the part of one.

Repeated layers do the same, so their births and deaths are equal except for the numbers of storages. Two parts in the
middle must be equal relative to themselves and their neighbours: then any number of layers can stand between.

This does not notice storages outside the layers whose size depends on the number of layers. `frugal.dryrun.trace.trace`
compares traces of different numbers of layers for that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from frugal.planning.memory.timeline import Mark, MarkKind, Marks, Timeline, TimelineBuilder


class NotPeriodicError(Exception):
    """The layers of a trace do not do the same."""


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """The position of the repeated layers. Numbers of layers, parameters and modules are those of the traced model.

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

    @property
    def middle(self) -> int:
        """Return the period to repeat. It has two others on each side, because the first and the last differ."""
        return self.num_periods // 2

    def module_numbers(self, traced: Sequence[int], num_periods: int) -> tuple[int, ...]:
        """Return the traced modules' numbers in a model of `num_periods` periods."""
        end, more = self.first_module + self.num_periods * self.modules, num_periods - self.num_periods
        before = [number for number in traced if number < end]
        last = [number for number in before if number >= end - self.modules]
        between = [number + i * self.modules for i in range(1, more + 1) for number in last]
        return (*before, *between, *(number + more * self.modules for number in traced if number >= end))


class PhaseBegins(NamedTuple):
    """The beginning of a phase of the trace."""

    name: str


class Event(NamedTuple):
    """The beginning or the end of a storage."""

    storage: int
    is_birth: bool


class PartKind(Enum):
    """The kind of a part: one period's forward, one period's backward, or outside of the layers."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class Part:
    """A stretch of the trace. `number`: of its period, or 0, 1, 2 for what is before, between and after the layers."""

    kind: PartKind
    number: int
    items: list[PhaseBegins | Event | Mark]


class Origin(NamedTuple):
    """The beginning of a storage, or of a hold: its part, and how many begin there before."""

    kind: PartKind
    number: int
    ordinal: int

    def seen_from(self, period: int) -> "Origin":
        """Return the origin with periods counted from this one."""
        return self if self.kind is PartKind.OUTSIDE else self._replace(number=self.number - period)


class Parts:
    """A trace cut into parts.

    Attributes:
        stream: the trace's events.
        layout: of the traced model.
        parts: in order.
        births: of every storage its origin.
        holds: of every hold its origin.
    """

    def __init__(self, stream: Timeline, marks: Marks, layout: LayerLayout) -> None:
        self.stream = stream
        self.layout = layout
        self.parts = _cut(list(_items(stream, marks)), layout)
        self.births: dict[int, Origin] = {}
        self.holds: dict[int, Origin] = {}
        for part in self.parts:
            num_births = num_holds = 0
            for item in part.items:
                if isinstance(item, Event) and item.is_birth:
                    self.births[item.storage] = Origin(part.kind, part.number, num_births)
                    num_births += 1
                elif isinstance(item, Mark) and item.kind is MarkKind.HOLD:
                    self.holds[item.storage] = Origin(part.kind, part.number, num_holds)
                    num_holds += 1

    def of_kind(self, kind: PartKind) -> list[Part]:
        """Return the parts of a kind, by number."""
        return sorted((part for part in self.parts if part.kind is kind), key=lambda part: part.number)

    def said(self, kind: PartKind, number: int) -> list[tuple[object, ...]]:
        """Describe a period's part in terms that are the same for all periods.

        Raises:
            NotPeriodicError: a phase begins in it.
        """
        part, stream = self.of_kind(kind)[number], self.stream
        move = Move(self.layout, part, shift=-number)
        words: list[tuple[object, ...]] = []
        for item in part.items:
            if isinstance(item, PhaseBegins):
                raise NotPeriodicError("a phase begins in the middle of the layers")
            if isinstance(item, Mark):
                origins = self.holds if item.kind in (MarkKind.HOLD, MarkKind.LET_GO) else self.births
                origin = origins.get(item.storage)
                words.append((item.kind, move.number(item), origin and origin.seen_from(number)))
            elif item.is_birth:
                i = item.storage
                module = move.name(stream.names[stream.modules[i]])
                words.append((stream.fixed[i], stream.per_sample[i], stream.categories[i], stream.operators[i], module))
            else:
                words.append(self.births[item.storage].seen_from(number))
        return words


def _items(stream: Timeline, marks: Marks) -> Iterator[PhaseBegins | Event | Mark]:
    """Yield phases, events and marks in order."""
    events = list(map(Event, stream.events, stream.is_birth.tolist()))
    for (phase, numbers), of_phase in zip(stream.phase_ranges, marks, strict=True):
        yield PhaseBegins(phase)
        position = numbers.start
        for mark in of_phase:
            yield from events[position : mark.event]
            position = mark.event
            yield mark
        yield from events[position : numbers.stop]


def _cut(items: list[PhaseBegins | Event | Mark], layout: LayerLayout) -> list[Part]:
    """Return the parts, in order: a period's forward begins with its first layer, its backward ends with its last
    gradient.

    Raises:
        NotPeriodicError: the parts cannot be distinguished.
    """
    num_periods = layout.num_periods
    begins = [-1] * num_periods  # of each period in forward, a position in `items`
    gradients: dict[int, int] = {}  # parameter -> the position where its gradient is whole
    for position, item in enumerate(items):
        if isinstance(item, Mark) and item.kind is MarkKind.LAYER:
            period, rest = divmod(item.number - layout.first_layer, layout.period)
            if rest == 0 and period >= 0 and begins[period] < 0:
                begins[period] = position
        elif isinstance(item, Mark) and item.kind is MarkKind.GRADIENT:
            gradients[item.number] = position
    second = layout.first_parameter + layout.parameters  # the first period may be special
    trained = [parameter for parameter in range(second, second + layout.parameters) if parameter in gradients]
    if not trained or min(begins) < 0:
        raise NotPeriodicError("a layer does not run, or has no gradient")
    last = max(trained, key=gradients.__getitem__) - layout.parameters  # in the first period
    ends = [gradients.get(last + period * layout.parameters, -1) + 1 for period in range(num_periods)]
    cuts = [*begins, *reversed(ends)]
    if sorted(cuts) != cuts or cuts[0] < 0:
        raise NotPeriodicError("layers do not run one after the other")
    between = range(num_periods - 1)  # the last forward and backward belong to what is between the layers
    return [
        Part(PartKind.OUTSIDE, 0, items[: begins[0]]),
        *(Part(PartKind.FORWARD, i, items[begins[i] : begins[i + 1]]) for i in between),
        Part(PartKind.OUTSIDE, 1, items[begins[-1] : ends[-1]]),
        *(Part(PartKind.BACKWARD, i, items[ends[i + 1] : ends[i]]) for i in reversed(between)),
        Part(PartKind.OUTSIDE, 2, items[ends[0] :]),
    ]


@dataclass(frozen=True)
class Move:
    """The new numbers of a part that is moved by `shift` periods, where `more` periods are inserted.

    A period's part refers to itself and its neighbours, which move as it does. A part outside of the layers stays; of
    its references, those behind the repeated period move.
    """

    layout: LayerLayout
    part: Part
    shift: int = 0
    more: int = 0

    def periods(self, period: int) -> int:
        """Return by how many periods that one moves; those from `num_periods` on stand for all behind the layers."""
        if period >= self.layout.num_periods:
            return self.more
        if self.part.kind is PartKind.OUTSIDE:
            return self.more if period > self.layout.middle else 0
        return self.shift

    def name(self, name: str) -> str:
        """Return the new name of a module."""
        layout = self.layout
        head, dot, tail = name[len(layout.path) + 1 :].partition(".")
        if not name.startswith(layout.path + ".") or not head.isdecimal() or int(head) < layout.first_layer:
            return name
        periods = self.periods((int(head) - layout.first_layer) // layout.period)
        return f"{layout.path}.{int(head) + periods * layout.period}{dot}{tail}"

    def number(self, mark: Mark) -> int:
        """Return the new number of a mark's parameter, layer or module."""
        layout = self.layout
        if mark.kind in (MarkKind.GRADIENT, MarkKind.HOLD, MarkKind.LET_GO):
            first, a_period = layout.first_parameter, layout.parameters
        elif mark.kind >= MarkKind.LAYER:
            first, a_period = layout.first_layer, layout.period
        else:
            first, a_period = layout.first_module, layout.modules
        if mark.number < first:
            return mark.number
        return mark.number + self.periods((mark.number - first) // a_period) * a_period

    def origin(self, origin: Origin) -> Origin:
        """Return the corresponding origin."""
        if origin.kind is PartKind.OUTSIDE:
            return origin
        return origin._replace(number=origin.number + self.periods(origin.number))


def splice(stream: Timeline, marks: Marks, layout: LayerLayout, num_periods: int) -> tuple[Timeline, Marks]:
    """Return the stream and the marks of the same model with `num_periods` periods of layers, at least as many as
    traced.

    Raises:
        NotPeriodicError: its layers do not do the same.
    """
    parts, middle = Parts(stream, marks, layout), layout.middle
    for kind, other in ((PartKind.FORWARD, middle + 1), (PartKind.BACKWARD, middle - 1)):
        if parts.said(kind, middle) != parts.said(kind, other):
            raise NotPeriodicError("two layers in the middle do not do the same")
    more = num_periods - layout.num_periods
    longer = _Longer(parts)
    for part, number in _arranged(parts, more):
        longer.play(part, number, Move(layout, part, number - part.number, more))
    return longer.timeline.timeline(), tuple(map(tuple, longer.marks))


def _arranged(parts: Parts, more: int) -> Iterator[tuple[Part, int]]:
    """Yield the parts in their new order, the middle one repeated, each with its new number."""
    middle = parts.layout.middle
    before, between, after = parts.of_kind(PartKind.OUTSIDE)

    def periods(kind: PartKind) -> list[tuple[Part, int]]:
        own = parts.of_kind(kind)
        placed = [(part, part.number) for part in own[: middle + 1]]
        placed += [(own[middle], middle + 1 + i) for i in range(more)]
        return placed + [(part, part.number + more) for part in own[middle + 1 :]]

    yield before, before.number
    yield from periods(PartKind.FORWARD)
    yield between, between.number
    yield from reversed(periods(PartKind.BACKWARD))
    yield after, after.number


class _Longer:
    """The longer stream and its marks in progress."""

    def __init__(self, parts: Parts) -> None:
        self.timeline = TimelineBuilder()
        self.marks: list[list[Mark]] = []
        self._parts = parts
        self._storages: dict[Origin, int] = {}
        self._holds: dict[Origin, int] = {}

    def play(self, part: Part, number: int, move: Move) -> None:
        """Write `part` as part `number`."""
        births = self._parts.births
        num_births = 0
        for item in part.items:
            if isinstance(item, PhaseBegins):
                self.timeline.phase(item.name)
                self.marks.append([])
            elif isinstance(item, Mark):
                storage = self._storage(item, part, number, move)
                self.marks[-1].append(Mark(len(self.timeline.events), item.kind, move.number(item), storage))
            elif item.is_birth:
                self._storages[Origin(part.kind, number, num_births)] = self._birth(item.storage, move)
                num_births += 1
            else:
                self.timeline.events.append(_known(self._storages, move.origin(births[item.storage])))

    def _birth(self, template: int, move: Move) -> int:
        stream = self._parts.stream
        return self.timeline.born(
            stream.fixed[template],
            stream.categories[template],
            stream.names[stream.operators[template]],
            move.name(stream.names[stream.modules[template]]),
            stream.per_sample[template],
        )

    def _storage(self, mark: Mark, part: Part, number: int, move: Move) -> int:
        """Return the number that replaces a mark's storage."""
        if mark.kind is MarkKind.HOLD:
            ordinal = self._parts.holds[mark.storage].ordinal
            return self._holds.setdefault(Origin(part.kind, number, ordinal), len(self._holds))
        if mark.kind is MarkKind.LET_GO:
            return _known(self._holds, move.origin(self._parts.holds[mark.storage]))
        if mark.storage < 0:
            return mark.storage
        return _known(self._storages, move.origin(self._parts.births[mark.storage]))


def _known(numbers: dict[Origin, int], origin: Origin) -> int:
    if origin not in numbers:
        raise NotPeriodicError("a layer frees what was never made")
    return numbers[origin]
