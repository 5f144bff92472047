"""A trace of a few layers made into one of many: the events of a middle layer are repeated.

Repeated layers do the same, so their births and deaths are the same but for whose storages they are. Two parts in the
middle (see `frugal.planning.zero.layer_parts`) must say the same, each about itself and its neighbours: then any number
of layers can stand between.

Not seen by that: storages outside the layers whose size depends on how many there are. Who splices compares traces
of different numbers of layers for that.
"""

from collections.abc import Iterator, Sequence

from frugal.planning.timeline import Timeline
from frugal.planning.zero.layer_parts import (
    BACKWARD_PART,
    EVENT,
    FORWARD_PART,
    OUTSIDE,
    PHASE,
    Layout,
    Marks,
    NotPeriodicError,
    Owner,
    Part,
    Parts,
)
from frugal.planning.zero.trace import HOLD, LET_GO, Mark


def splice(stream: Timeline, marks: Marks, layout: Layout, num_periods: int) -> tuple[Timeline, Marks]:
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
        found = known.get((kind, number, ordinal))
        if found is None:
            raise NotPeriodicError("a layer frees what was never made")
        return found

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
