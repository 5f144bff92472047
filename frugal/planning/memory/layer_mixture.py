"""The trace of a model whose layers have different modes of activation checkpointing, from the traces of single modes.

Autograd runs the same nodes in the same order in every mode: what a mode recomputes comes as one block where backward
first asks for a saved tensor of the layer. So the traces of two modes differ in these blocks and in when storages end.
Every trace is cut where a layer begins in forward and where backward comes to it, and the pieces of a mixture are taken
from the traces of its layers' modes. Storages created in mode `off` exist in every mode; their lifetime is taken from
the mixed pieces. Storages that only another mode creates, such as a layer's recomputed results, live and die inside
their piece.

Left out: a storage that two neighbours keep, each for itself, in modes that are mixed. It is counted to the end of the
later one's backward. The dry run of a plan is of the mixture itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from frugal.planning.cost import Work
from frugal.planning.memory.timeline import (
    ARRIVAL,
    BACKWARD,
    BATCH_ENDS,
    FORWARD,
    LOSS_ENDS,
    Mark,
    MarkKind,
    ModelTrace,
    Timeline,
)
from frugal.planning.strategy import LayerMode

Numbers = npt.NDArray[np.int64]

LAYER, AGAIN, AGAIN_ENDS = MarkKind.LAYER, MarkKind.LAYER_AGAIN, MarkKind.LAYER_AGAIN_ENDS
OF_HOLDS = (MarkKind.HOLD, MarkKind.LET_GO)
PHASES = (ARRIVAL, FORWARD, BACKWARD, BATCH_ENDS, LOSS_ENDS)


class NotMixableError(Exception):
    """The traces of two modes differ in more than what layers recompute, or say nothing of layers."""


class _Item(NamedTuple):
    """An item of a trace: a storage begins or ends, or there is a mark.

    `key`: what it has in common with the same item in another mode; None: it exists in its own mode only.
    """

    storage: int
    is_birth: bool
    mark: Mark | None
    key: tuple[object, ...] | None


@dataclass(frozen=True)
class _Piece:
    """The events between two cuts: storages by number, `-1 - number` where one ends; marks count events from its
    beginning.
    """

    events: Numbers
    marks: tuple[Mark, ...]


def _items(trace: ModelTrace, phase: str) -> list[_Item]:
    """List a phase of a trace as one row of items."""
    stream = trace.stream
    index = next(i for i, (name, _) in enumerate(stream.phases) if name == phase)
    events = stream.phase_ranges[index][1]
    operators, modules = ([stream.names[i] for i in column] for column in (stream.operators, stream.modules))
    keys = list(zip(operators, modules, stream.fixed, stream.per_sample, strict=True))
    storages, is_birth = stream.events, stream.is_birth.tolist()

    def between(first: int, end: int, *, is_again: bool) -> Iterator[_Item]:
        for storage, begins in zip(storages[first:end], is_birth[first:end], strict=True):
            yield _Item(storage, begins, None, keys[storage] if begins and not is_again else None)

    items: list[_Item] = []
    position, is_again = events.start, False
    for mark in trace.marks[index]:
        items += between(position, mark.event, is_again=is_again)
        position = mark.event
        has_key = mark.kind < LAYER and mark.kind not in OF_HOLDS and not is_again
        items.append(_Item(-1, False, mark, (mark.kind, mark.number) if has_key else None))
        is_again = mark.kind is AGAIN or (is_again and mark.kind is not AGAIN_ENDS)
    items += between(position, events.stop, is_again=is_again)
    return items


def _positions(items: Sequence[_Item], kind: MarkKind) -> dict[int, int]:
    """Return the index of each layer's mark of this kind.

    Raises:
        NotMixableError: it has several.
    """
    marked = [(item.mark.number, i) for i, item in enumerate(items) if item.mark is not None and item.mark.kind is kind]
    if len(dict(marked)) != len(marked):
        raise NotMixableError("a layer runs more than once")
    return dict(marked)


def _matches(reference: Sequence[_Item], items: Sequence[_Item]) -> dict[int, int]:
    """Match positions in `items` with those in `reference`, all of which must be there, in order.

    Raises:
        NotMixableError: something is missing.
    """
    wanted = [(i, item.key) for i, item in enumerate(reference) if item.key is not None]
    matches: dict[int, int] = {}
    for i, item in enumerate(items):
        if len(matches) < len(wanted) and item.key is not None and item.key == wanted[len(matches)][1]:
            matches[i] = wanted[len(matches)][0]
    if len(matches) < len(wanted):
        raise NotMixableError(f"{_words(wanted[len(matches)][1])} in one mode and not in another")
    return matches


def _words(key: tuple[object, ...]) -> str:
    """Describe an `_Item.key`."""
    if len(key) == 2:
        kind, number = key
        return f"{str(getattr(kind, 'name', kind)).lower().replace('_', ' ')} {number} happens"
    operator, module = key[:2]
    return f"{module or 'the model'} runs {operator}"


class LayerMixtures:
    """Mixtures of the modes of one model, under one loss, kind of ZeRO and device; one mode is added after the other.

    Attributes:
        num_layers: layers, each of which has a mode.
    """

    def __init__(self, off: ModelTrace) -> None:
        """Begin with the trace without activation checkpointing.

        Raises:
            NotMixableError: it says nothing of several layers.
        """
        self._traces: dict[LayerMode, ModelTrace] = {"off": off}
        self._reference = {phase: _items(off, phase) for phase in PHASES}
        begins = _positions(self._reference[FORWARD], LAYER)
        self.num_layers = len(begins)
        if self.num_layers < 2 or list(begins) != list(range(self.num_layers)):
            raise NotMixableError("there are not several layers, one after the other")
        self._names: dict[str, int] = {}
        self._storages: Numbers = np.zeros((5, 0), dtype=np.int64)
        self._number(off.stream, {})
        self._num_holds = 0
        self._backward_cuts: list[int] | None = None  # positions in the backward of `off`, the last layer first
        self._pieces: dict[str, list[_Piece]] = {}
        self._deaths: dict[str, dict[int, int]] = {}  # of each mode: storage -> the piece in which it ends
        self._weights: dict[str, list[int]] = {}  # of each mode: by layer, about how much is recomputed

    def add(self, mode: LayerMode, trace: ModelTrace) -> None:
        """Allow layers in this mode.

        Raises:
            NotMixableError: the pieces of its trace do not go together with those of the others.
        """
        if mode not in self._pieces and mode != "off":
            self._add(mode, trace)
            self._traces[mode] = trace
            if "off" not in self._pieces:
                self._add("off", self._traces["off"])

    def trace(self, layer_modes: Sequence[tuple[LayerMode, int]]) -> ModelTrace:
        """Return the trace of a mixture, see `Strategy.layer_modes`.

        Raises:
            NotMixableError: something that one layer keeps, another one gives back.
        """
        modes = [mode for mode, count in layer_modes for _ in range(count)]
        if len(modes) != self.num_layers:
            raise NotMixableError(f"modes for {len(modes)} layers, of which there are {self.num_layers}")
        backward = list(reversed(modes))
        played = [modes[0], modes[0], *modes, modes[-1], *backward, modes[0], modes[0]]
        stream, marks = self._joined([self._pieces[mode][number] for number, mode in enumerate(played)], played)
        notes = tuple(dict.fromkeys(note for mode in modes for note in self._traces[mode].notes))
        return replace(self._traces["off"], stream=stream, marks=marks, work=self._work(modes), notes=notes)

    def _add(self, mode: str, trace: ModelTrace) -> None:
        """Cut the trace of a mode into its pieces."""
        rows = self._reference if mode == "off" else {phase: _items(trace, phase) for phase in PHASES}
        matches = {phase: _matches(self._reference[phase], rows[phase]) for phase in PHASES}
        begins = _positions(rows[FORWARD], LAYER)
        if list(begins) != list(range(self.num_layers)):
            raise NotMixableError("the layers of another mode are others")
        same = {
            rows[phase][i].storage: self._reference[phase][j].storage
            for phase in PHASES
            for i, j in matches[phase].items()
            if rows[phase][i].is_birth
        }
        number_of = self._number(trace.stream, same)
        cuts = [*begins.values()]
        backward_cuts = self._cuts_in_backward(rows[BACKWARD], matches[BACKWARD], is_off=mode == "off")
        forward, backward = rows[FORWARD], rows[BACKWARD]
        ordered = [rows[ARRIVAL], forward[: cuts[0]]]
        ordered += [forward[a:b] for a, b in pairwise([*cuts, len(forward)])]
        ordered += [backward[: backward_cuts[0]]]
        ordered += [backward[a:b] for a, b in pairwise([*backward_cuts, len(backward)])]
        ordered += [rows[BATCH_ENDS], rows[LOSS_ENDS]]
        self._pieces[mode] = [self._piece(items, number_of, self._num_holds) for items in ordered]
        self._num_holds += 1 + max(
            (i.mark.storage for row in rows.values() for i in row if i.mark is not None), default=0
        )
        self._deaths[mode] = {
            number_of[item.storage]: piece
            for piece, items in enumerate(ordered)
            for item in items
            if item.mark is None and not item.is_birth
        }
        self._weights[mode] = _recomputed_bytes(rows[BACKWARD], trace.stream, self.num_layers)

    def _number(self, stream: Timeline, same: Mapping[int, int]) -> list[int]:
        """Number the storages of a trace behind those of all before; `same`: those that `off` has, too."""
        own = [storage for storage in range(len(stream.fixed)) if storage not in same]
        numbers = dict(same) | {storage: number for number, storage in enumerate(own, self._storages.shape[1])}
        names = np.array([self._names.setdefault(name, len(self._names)) for name in stream.names])
        operators, modules = names[list(stream.operators)], names[list(stream.modules)]
        columns = np.array([stream.fixed, stream.per_sample, stream.categories, operators, modules])
        self._storages = np.concatenate([self._storages, columns[:, own]], axis=1)
        return [numbers[storage] for storage in range(len(stream.fixed))]

    def _cuts_in_backward(self, items: Sequence[_Item], matches: Mapping[int, int], *, is_off: bool) -> list[int]:
        """Return where backward comes to each layer, the last layer first, as positions in `items`.

        That is before whatever follows the last thing of the layer behind, and all that ends with it.

        Raises:
            NotMixableError: layers are not recomputed one after the other, or elsewhere than in another mode.
        """
        if is_off:
            assert self._backward_cuts is not None
            return [_end_of(items, i) for i in self._backward_cuts]
        again = _positions(items, AGAIN)
        if list(again) != list(reversed(range(self.num_layers))):
            raise NotMixableError("layers are not recomputed one after the other")
        before = [max((i for i in matches if i < position), default=-1) for position in again.values()]
        of_off = [matches.get(i, -1) for i in before]
        if self._backward_cuts is not None and of_off != self._backward_cuts:
            raise NotMixableError("layers are recomputed elsewhere than in another mode")
        self._backward_cuts = of_off
        return [_end_of(items, i) for i in before]

    def _piece(self, items: Sequence[_Item], number_of: Sequence[int], first_hold: int) -> _Piece:
        events: list[int] = []
        marks = []
        for item in items:
            if item.mark is None:
                number = number_of[item.storage]
                events.append(number if item.is_birth else -1 - number)
            elif item.mark.kind < LAYER:
                kind, storage = item.mark.kind, item.mark.storage
                if kind in OF_HOLDS:
                    storage += first_hold
                elif storage >= 0:
                    storage = number_of[storage]
                marks.append(Mark(len(events), kind, item.mark.number, storage))
        return _Piece(np.asarray(events, dtype=np.int64), tuple(marks))

    def _joined(self, pieces: Sequence[_Piece], played: Sequence[str]) -> tuple[Timeline, tuple[tuple[Mark, ...], ...]]:
        """Join pieces into one stream and its marks."""
        parts = [piece.events for piece in pieces]
        for piece, numbers in self._kept_too_long(parts, played).items():
            parts[piece] = np.concatenate([parts[piece], -1 - np.asarray(numbers, dtype=np.int64)])
        raw = np.concatenate(parts)
        num_storages = self._storages.shape[1]
        kept = _last_ends(raw, num_storages)
        position = np.concatenate([[0], kept.cumsum()])
        raw_starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        events = raw[kept]
        births = events[events >= 0]
        renumbered = np.full(num_storages, -1, dtype=np.int64)
        renumbered[births] = np.arange(len(births))
        numbers = renumbered[np.where(events >= 0, events, -1 - events)]
        first_of_phase = [0, 1, self.num_layers + 2, 2 * self.num_layers + 3, 2 * self.num_layers + 4, len(parts)]
        marks = tuple(
            tuple(
                Mark(
                    int(position[raw_starts[number] + mark.event]),
                    mark.kind,
                    mark.number,
                    mark.storage if mark.kind in OF_HOLDS or mark.storage < 0 else int(renumbered[mark.storage]),
                )
                for number in range(first, end)
                for mark in pieces[number].marks
            )
            for first, end in pairwise(first_of_phase)
        )
        _check_holds(marks)
        phases = [(name, int(position[raw_starts[first]])) for name, first in zip(PHASES, first_of_phase, strict=False)]
        fixed, per_sample, categories, operators, modules = map(tuple, self._storages[:, births].tolist())
        stream = Timeline(
            fixed=fixed,
            per_sample=per_sample,
            categories=categories,
            operators=operators,
            modules=modules,
            names=tuple(self._names),
            events=tuple(numbers.tolist()),
            phases=tuple(phases),
        )
        return stream, marks

    def _kept_too_long(self, parts: Sequence[Numbers], played: Sequence[str]) -> dict[int, list[int]]:
        """Return storages that begin in one piece and end in none, by the piece in which they end in their mode."""
        raw = np.concatenate(parts)
        is_ended = np.zeros(self._storages.shape[1], dtype=np.bool_)
        is_ended[-1 - raw[raw < 0]] = True
        late: dict[int, list[int]] = {}
        for piece, part in enumerate(parts):
            for number in part[(part >= 0) & ~is_ended[np.maximum(part, 0)]].tolist():
                end = self._deaths[played[piece]].get(number)
                if end is not None:
                    late.setdefault(end, []).append(number)
        return late

    def _work(self, modes: Sequence[LayerMode]) -> Work:
        """Return the work of the micro-step: of each mode's additional work the share of its layers."""
        mixed = off = self._traces["off"].work
        for mode in dict.fromkeys(modes):
            weights = self._weights[mode]
            share = sum(weight for each, weight in zip(modes, weights, strict=True) if each == mode) / sum(weights)
            mixed = mixed.moved(off, self._traces[mode].work, share)
        return mixed


def _end_of(items: Sequence[_Item], last: int) -> int:
    """Return the position after `last` and everything that ends with it."""
    position = last + 1
    while position < len(items):
        item = items[position]
        if item.is_birth or (item.mark is not None and item.mark.kind not in OF_HOLDS):
            break
        position += 1
    return position


def _last_ends(raw: Numbers, num_storages: int) -> Any:
    """Return which of `raw` stay: all births, and the last end of each storage that was born."""
    kept = raw >= 0
    born = np.zeros(num_storages, dtype=np.bool_)
    born[raw[kept]] = True
    ends = np.flatnonzero(~kept)
    last = np.full(num_storages, -1, dtype=np.int64)
    last[-1 - raw[ends]] = ends  # the last that is written of each stays
    kept[last[born & (last >= 0)]] = True
    return kept


def _check_holds(marks: Sequence[Sequence[Mark]]) -> None:
    """Check that every hold is let go, and nothing else.

    Raises:
        NotMixableError: a layer holds what another mode's piece would have let go.
    """
    held: set[int] = set()
    for mark in (mark for phase in marks for mark in phase if mark.kind in OF_HOLDS):
        if (mark.kind is MarkKind.HOLD) == (mark.storage in held):
            raise NotMixableError("a parameter is let go elsewhere than in another mode")
        held ^= {mark.storage}
    if held:
        raise NotMixableError("a parameter is held beyond its layer")


def _recomputed_bytes(items: Sequence[_Item], stream: Timeline, num_layers: int) -> list[int]:
    """Return the bytes per sample that each layer recomputes; equal for all where nothing is recomputed."""
    begins, ends = _positions(items, AGAIN), _positions(items, AGAIN_ENDS)
    made = [
        sum(stream.per_sample[item.storage] for item in items[begins[i] : ends[i]] if item.is_birth)
        for i in range(num_layers)
        if i in begins
    ]
    return made if sum(made) else [1] * num_layers
