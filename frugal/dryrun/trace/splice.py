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
from typing import NamedTuple

from frugal.planning.memory.timeline import BACKWARD, FORWARD, Mark, MarkKind, Marks, Timeline, TimelineBuilder

OUTSIDE = "outside"
"""The kind of a part outside of the layers; the others are `FORWARD` and `BACKWARD` of one period."""

PHASE, BIRTH, DEATH = "phase", "birth", "death"
"""Kinds of items besides those of marks."""

_BEGINNINGS, _HOLDS = (BIRTH, MarkKind.HOLD), (MarkKind.HOLD, MarkKind.LET_GO)


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


class Item(NamedTuple):
    """An item of a trace.

    Attributes:
        kind: a mark's, or that a phase begins, or a storage.
        number: a mark's, or the phase's in the order of phases.
        storage: the storage or the hold that it is about; -1: none of this trace.
    """

    kind: MarkKind | str
    number: int = -1
    storage: int = -1

    @property
    def about(self) -> tuple[bool, int]:
        """Return the storage or the hold, whose numbers are apart."""
        return self.kind in _HOLDS, self.storage


class Part(NamedTuple):
    """A stretch of the trace. `number`: of its period, or 0, 1, 2 for what is before, between and after the layers."""

    kind: str
    number: int
    items: list[Item]


class Origin(NamedTuple):
    """The beginning of a storage, or of a hold: its part, and how many begin there before."""

    kind: str
    number: int
    ordinal: int


def _items(stream: Timeline, marks: Marks) -> Iterator[Item]:
    """Yield phases, events and marks in order."""
    births = stream.is_birth.tolist()
    events = [Item(BIRTH if births[i] else DEATH, storage=storage) for i, storage in enumerate(stream.events)]
    for number, ((_, numbers), of_phase) in enumerate(zip(stream.phase_ranges, marks, strict=True)):
        yield Item(PHASE, number)
        position = numbers.start
        for mark in of_phase:
            yield from events[position : mark.event]
            position = mark.event
            yield Item(*mark[1:])
        yield from events[position : numbers.stop]


def _cut(items: list[Item], layout: LayerLayout) -> list[Part]:
    """Return the parts, in order: a period's forward begins with its first layer, its backward ends with its last
    gradient.

    Raises:
        NotPeriodicError: the parts cannot be distinguished.
    """
    num_periods = layout.num_periods
    begins = [-1] * num_periods  # of each period in forward, a position in `items`
    gradients: dict[int, int] = {}  # parameter -> the position where its gradient is whole
    for position, item in enumerate(items):
        if item.kind is MarkKind.LAYER:
            period, rest = divmod(item.number - layout.first_layer, layout.period)
            if rest == 0 and period >= 0 and begins[period] < 0:
                begins[period] = position
        elif item.kind is MarkKind.GRADIENT:
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
        Part(OUTSIDE, 0, items[: begins[0]]),
        *(Part(FORWARD, i, items[begins[i] : begins[i + 1]]) for i in between),
        Part(OUTSIDE, 1, items[begins[-1] : ends[-1]]),
        *(Part(BACKWARD, i, items[ends[i + 1] : ends[i]]) for i in reversed(between)),
        Part(OUTSIDE, 2, items[ends[0] :]),
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
        if self.part.kind == OUTSIDE:
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

    def number(self, mark: Item) -> int:
        """Return the new number of a mark's parameter, layer or module."""
        layout = self.layout
        if not isinstance(mark.kind, MarkKind):
            return mark.number
        if mark.kind in (MarkKind.GRADIENT, MarkKind.HOLD, MarkKind.LET_GO, MarkKind.READ):
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
        if origin.kind == OUTSIDE:
            return origin
        return Origin(origin.kind, origin.number + self.periods(origin.number), origin.ordinal)


def splice(stream: Timeline, marks: Marks, layout: LayerLayout, num_periods: int) -> tuple[Timeline, Marks]:
    """Return the stream and the marks of the same model with `num_periods` periods of layers, at least as many as
    traced.

    Raises:
        NotPeriodicError: its layers do not do the same.
    """
    longer, middle, more = _Longer(stream, marks, layout), layout.middle, num_periods - layout.num_periods
    for kind, other in ((FORWARD, middle + 1), (BACKWARD, middle - 1)):
        if longer.said(kind, middle) != longer.said(kind, other):
            raise NotPeriodicError("two layers in the middle do not do the same")
    for part in longer.parts:  # in their new order, the middle one repeated, each with its new number
        stays = part.kind == OUTSIDE or part.number <= middle
        moves = part.kind != OUTSIDE and part.number >= middle
        numbers = range(part.number + (0 if stays else more), part.number + (more if moves else 0) + 1)
        for number in reversed(numbers) if part.kind == BACKWARD else numbers:
            longer.play(part, number, Move(layout, part, number - part.number, more))
    return longer.timeline.timeline(), tuple(map(tuple, longer.marks))


class _Longer:
    """A trace cut into parts, and the longer stream and its marks in progress.

    Attributes:
        parts: in order.
        timeline: the longer stream.
        marks: its marks.
    """

    def __init__(self, stream: Timeline, marks: Marks, layout: LayerLayout) -> None:
        self.parts = _cut(list(_items(stream, marks)), layout)
        self.timeline = TimelineBuilder()
        self.marks: list[list[Mark]] = []
        self._stream, self._layout = stream, layout
        self._origins: dict[tuple[bool, int], Origin] = {}  # of every storage and hold of the trace
        self._numbers: dict[Origin, int] = {}  # of those of the longer one
        self._num_holds = 0
        for part in self.parts:
            for ordinal, item in enumerate(item for item in part.items if item.kind in _BEGINNINGS):
                self._origins[item.about] = Origin(part.kind, part.number, ordinal)

    def said(self, kind: str, number: int) -> list[tuple[object, ...]]:
        """Describe a period's part in terms that are the same for all periods.

        Raises:
            NotPeriodicError: a phase begins in it.
        """
        part = next(part for part in self.parts if (part.kind, part.number) == (kind, number))
        stream, move = self._stream, Move(self._layout, part, shift=-number)
        words: list[tuple[object, ...]] = []
        for item in part.items:
            if item.kind == PHASE:
                raise NotPeriodicError("a phase begins in the middle of the layers")
            if item.kind == BIRTH:
                i = item.storage
                module = move.name(stream.names[stream.modules[i]])
                words.append((stream.fixed[i], stream.per_sample[i], stream.categories[i], stream.operators[i], module))
            else:
                origin = self._origins.get(item.about)
                words.append((item.kind, move.number(item), origin and move.origin(origin)))
        return words

    def play(self, part: Part, number: int, move: Move) -> None:
        """Write `part` as part `number`."""
        stream, ordinal = self._stream, 0
        for item in part.items:
            about = i = item.storage  # the number of the storage or the hold, in the longer stream
            if item.kind == PHASE:
                self.timeline.phase(stream.phases[item.number][0])
                self.marks.append([])
                continue
            if item.kind == BIRTH:
                operator, module = stream.names[stream.operators[i]], move.name(stream.names[stream.modules[i]])
                fixed, category = stream.fixed[i], stream.categories[i]
                about = self.timeline.born(fixed, category, operator, module, stream.per_sample[i])
            elif item.kind is MarkKind.HOLD:
                about = self._num_holds
                self._num_holds += 1
            elif i >= 0:
                origin = move.origin(self._origins[item.about])
                if origin not in self._numbers:
                    raise NotPeriodicError("a layer frees what was never made")
                about = self._numbers[origin]
            if item.kind in _BEGINNINGS:
                self._numbers[Origin(part.kind, number, ordinal)] = about
                ordinal += 1
            if isinstance(item.kind, MarkKind):
                self.marks[-1].append(Mark(len(self.timeline.events), item.kind, move.number(item), about))
            elif item.kind == DEATH:
                self.timeline.events.append(about)
