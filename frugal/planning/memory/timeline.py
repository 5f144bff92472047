"""The memory of one training step as a stream of births and deaths, for every micro-batch at once.

A dry run records each storage with its size, category and operator, and the order in which storages begin and
end: a timeline whose sizes do not depend on the micro-batch. The size of every single storage is an affine function
of the micro-batch (measured: no exception in 24 models, with and without activation checkpointing), so two of them
give all micro-batches exactly. The peak is not affine: it is the upper envelope of the affine sums after each birth,
which is why a line through two peaks errs by up to 74 %.

Left out: micro-batch 1 has a slightly different stream, because reshapes of size-1 dimensions are views; its peak
was the same in every model tried.

A `ModelTrace` is one micro-step of a model alone, without DeepSpeed: what the simulations of ZeRO start from.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from frugal.planning.cost import Work

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "temporary")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, COMMUNICATION, TEMPORARY = range(len(CATEGORIES))

INITIALISATION, FORWARD, BACKWARD, OPTIMIZER_STEP = "initialisation", "forward", "backward", "optimizer step"
"""Phases of a training step."""

MICRO_BATCHES = (2, 3)
"""Samples; the two that a timeline for all is fitted through. One sample has a slightly different stream."""


class NotAffineError(Exception):
    """Two dry runs are not the same stream at different micro-batches, so they give no timeline.

    The caller then dry-runs each micro-batch by itself.
    """


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The fullest moment: bytes alive in total and by category, its phase, and the operator that allocated then."""

    total_bytes: int
    categories: dict[str, int]
    phase: str
    operator: str


@dataclass(frozen=True)
class Interval:
    """A part of a step: its phase, the peak of live bytes during it, and those live at its end."""

    phase: str
    peak_bytes: int
    live_bytes: int


def phase_peaks(intervals: Iterable[Interval]) -> dict[str, int]:
    """Return the peak of each phase, which may come more than once, bytes."""
    peaks: dict[str, int] = {}
    for interval in intervals:
        peaks[interval.phase] = max(peaks.get(interval.phase, 0), interval.peak_bytes)
    return peaks


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A stream of storages, `fixed[i] + per_sample[i] * micro_batch` bytes each.

    Attributes:
        fixed: of every storage in order of birth, bytes that do not depend on the micro-batch.
        per_sample: of every storage, bytes that each sample adds; never negative.
        categories: of every storage, an index into `CATEGORIES`.
        operators: of every storage, an index into `names`: what allocated it.
        modules: of every storage, an index into `names`: the module that was running.
        names: operators and modules.
        events: a storage's index at its birth, and again at its death if it dies.
        phases: name and first event of every phase, in order; a name may return.
        empties: numbers of the events before which the allocator's cache is emptied, in order.
    """

    fixed: tuple[int, ...]
    per_sample: tuple[int, ...]
    categories: tuple[int, ...]
    operators: tuple[int, ...]
    modules: tuple[int, ...]
    names: tuple[str, ...]
    events: tuple[int, ...]
    phases: tuple[tuple[str, int], ...]
    empties: tuple[int, ...] = ()

    @classmethod
    def fit(cls, first: "Timeline", second: "Timeline", micro_batches: tuple[int, int]) -> "Timeline":
        """Fit the timeline through two that were recorded at one micro-batch each.

        Raises:
            NotAffineError: their events differ in order or operator, or a size is not affine in whole bytes.
        """
        if micro_batches[0] == micro_batches[1]:
            raise NotAffineError(f"both recordings are of micro-batch {micro_batches[0]}")
        check_aligned(first, second, *(f"micro-batch {micro_batch}" for micro_batch in micro_batches))
        step = micro_batches[1] - micro_batches[0]
        fixed, per_sample = [], []
        for small, large in zip(first.fixed, second.fixed, strict=True):
            slope, rest = divmod(large - small, step)
            if rest or slope < 0:
                raise NotAffineError(f"a storage of {small} bytes grows to {large} with {step} more samples")
            fixed.append(small - slope * micro_batches[0])
            per_sample.append(slope)
        return replace(
            first,
            fixed=tuple(fixed),
            per_sample=tuple(per_sample),
            categories=tuple(map(_corrected, first.categories, second.categories, per_sample)),
        )

    def sizes(self, micro_batch: int) -> "array[int]":
        """Return the bytes of every storage, in order of birth."""
        return array("q", (self._arrays["fixed"] + self._arrays["per_sample"] * micro_batch).tobytes())

    def events_from(self, first: int) -> list[int]:
        """Return the events, where storages are counted from `first` on."""
        return (self._arrays["events"] + first).tolist()

    def peak_bytes(self, micro_batch: int) -> int:
        """Return the bytes alive at the fullest moment."""
        _, fixed, slope = self._fullest(micro_batch)
        return fixed + slope * micro_batch

    def peak(self, micro_batch: int) -> Peak:
        """Return the fullest moment."""
        event, fixed, slope = self._fullest(micro_batch)
        alive = self._alive_at(event)
        sizes = self._arrays["fixed"][alive] + self._arrays["per_sample"][alive] * micro_batch
        numbers = self._arrays["categories"][alive]
        categories = {name: int(sizes[numbers == number].sum()) for number, name in enumerate(CATEGORIES)}
        assert sum(categories.values()) == fixed + slope * micro_batch
        return Peak(
            total_bytes=fixed + slope * micro_batch,
            categories=categories,
            phase=self.phase_of(event),
            operator=self.names[self.operators[self.events[event]]],
        )

    @property
    def outline(self) -> "Timeline":
        """The moments that may be the fullest and nothing in between: a timeline a hundredth as long with the same
        `peak` at every micro-batch. In each moment a storage a category is born, and all of them die.
        """
        events = self._envelope[0]
        moments, begins = np.sort(events), np.zeros(len(self.events) + 1, dtype=np.int64)
        begins[moments + 1] = 1
        group = begins[:-1].cumsum() * len(CATEGORIES) + self._arrays["categories"][self._arrays["events"]]
        alive = []
        for name in ("fixed", "per_sample"):
            changes = np.zeros((len(moments) + 1) * len(CATEGORIES), dtype=np.int64)
            np.add.at(changes, group, self._signed(self._arrays[name]))
            alive.append(changes.reshape(-1, len(CATEGORIES)).cumsum(axis=0)[np.searchsorted(moments, events)].tolist())
        builder = TimelineBuilder(self.names)
        for moment, event in enumerate(events.tolist()):
            builder.phase(self.phase_of(event))
            operator, first = self.names[self.operators[self.events[event]]], len(builder.fixed)
            # The least fixed bytes first: where they are negative, no part of the moment exceeds the whole.
            parts = zip(*(each[moment] for each in alive), range(len(CATEGORIES)), strict=True)
            for fixed_bytes, per_sample, category in sorted(parts):
                if fixed_bytes or per_sample:
                    builder.born(fixed_bytes, category, operator, per_sample=per_sample)
            builder.events += range(first, len(builder.fixed))
        return builder.timeline()

    def phase_of(self, event: int) -> str:
        """Return the phase an event belongs to."""
        return self.phases[bisect_right([first for _, first in self.phases], event) - 1][0]

    @property
    def phase_ranges(self) -> list[tuple[str, range]]:
        """The phases in order, with the numbers of their events."""
        ends = [first for _, first in self.phases[1:]] + [len(self.events)]
        return [(phase, range(first, end)) for (phase, first), end in zip(self.phases, ends, strict=True)]

    def intervals(self, micro_batch: int) -> list[Interval]:
        """Return the phases in order: the peak, including what lives at the beginning, and what lives at the end."""
        live = self.changes(micro_batch).cumsum().tolist()
        intervals = []
        before = 0
        for phase, events in self.phase_ranges:
            during = [before, *live[events.start : events.stop]]
            before = during[-1]
            intervals.append(Interval(phase, max(during), before))
        return intervals

    def phase_peaks(self, micro_batch: int) -> dict[str, int]:
        """Return the bytes alive at the fullest moment of each phase."""
        return phase_peaks(self.intervals(micro_batch))

    @cached_property
    def is_birth(self) -> npt.NDArray[np.bool_]:
        """True at each event where a storage begins; otherwise one ends."""
        events = self._arrays["events"]
        first = np.empty(len(self.fixed), dtype=np.int64)
        first[events[::-1]] = np.arange(len(events) - 1, -1, -1)  # the last that is written of each stays
        births = np.zeros(len(events), dtype=np.bool_)
        births[first[events]] = True
        return births

    def changes(self, micro_batch: int) -> npt.NDArray[np.int64]:
        """Return by how many bytes each event changes what is alive."""
        return self._signed(self._arrays["fixed"] + self._arrays["per_sample"] * micro_batch)

    def _signed(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the size of each event's storage, negative where that ends."""
        of_events = sizes[self._arrays["events"]]
        of_events[~self.is_birth] *= -1
        return of_events

    def holders(self, micro_batch: int, category: str) -> list[tuple[str, int]]:
        """Return the modules that hold bytes of `category` at the peak, largest first.

        Storages made outside of modules go by the operator that made them, in brackets.
        """
        wanted = CATEGORIES.index(category)
        sizes = self.sizes(micro_batch)
        held: dict[str, int] = {}
        for storage in self._alive_at(self._fullest(micro_batch)[0]).tolist():
            if self.categories[storage] == wanted:
                name = self.names[self.modules[storage]] or f"({self.names[self.operators[storage]]})"
                held[name] = held.get(name, 0) + sizes[storage]
        return sorted(held.items(), key=lambda item: -item[1])

    def _alive_at(self, event: int) -> npt.NDArray[np.int64]:
        """Return the storages alive after an event: those with one event so far, not two."""
        return np.flatnonzero(np.bincount(self._arrays["events"][: event + 1], minlength=len(self.fixed)) == 1)

    def _fullest(self, micro_batch: int) -> tuple[int, int, int]:
        """Return event, fixed bytes and bytes per sample of the moment that is fullest at `micro_batch`."""
        _, fixed, slope = self._envelope
        event, fixed_bytes, per_sample = self._envelope[:, (fixed + slope * micro_batch).argmax()].tolist()
        return event, fixed_bytes, per_sample

    @cached_property
    def _arrays(self) -> dict[str, npt.NDArray[np.int64]]:
        """The long fields as arrays, which are ten times as fast as loops over a hundred thousand events."""
        columns = {name: getattr(self, name) for name in ("events", "fixed", "per_sample", "categories")}
        # A third faster than `asarray`.
        return {name: np.fromiter(values, dtype=np.int64, count=len(values)) for name, values in columns.items()}

    @cached_property
    def _envelope(self) -> npt.NDArray[np.int64]:
        """The moments that may be the fullest at some micro-batch >= 0: rows of events, fixed bytes, bytes per sample.

        Of the lines after every birth these are the ones that no other line of the same or a steeper slope exceeds.
        """
        births = np.flatnonzero(self.is_birth)
        fixed = self._signed(self._arrays["fixed"]).cumsum()[births]
        slope = self._signed(self._arrays["per_sample"]).cumsum()[births]
        order = np.lexsort((births, -fixed, slope))  # of each slope, the most fixed bytes first, the earliest of these
        slopes = slope[order]
        best = order[np.append(True, slopes[1:] != slopes[:-1])]
        highest = np.maximum.accumulate(fixed[best][::-1])[::-1]  # of this slope or a steeper one, at 0
        best = best[np.append(fixed[best][:-1] > highest[1:], True)]  # the others are never the highest
        return np.stack([births[best], fixed[best], slope[best]])


def check_aligned(first: Timeline, second: Timeline, small: str, large: str) -> None:
    """Check that two recordings differ in nothing but sizes. `small`, `large`: what they are of, in words.

    Raises:
        NotAffineError: they do.
    """
    if len(first.fixed) != len(second.fixed):
        raise NotAffineError(f"{len(first.fixed)} storages at {small}, {len(second.fixed)} at {large}")
    if first.names != second.names or first.operators != second.operators:
        raise NotAffineError(f"other operators run at {large} than at {small}")
    if (first.events, first.phases, first.empties) != (second.events, second.phases, second.empties):
        raise NotAffineError(f"storages live in another order at {large} than at {small}")


def _corrected(first: int, second: int, per_sample: int) -> int:
    """Return the category of a storage, given whether it grows with the micro-batch.

    Categories at birth go by shape, and an activation may happen to have a parameter's shape at one micro-batch.
    """
    if first != second:
        first = second if first == GRADIENTS else first
    return TEMPORARY if first == GRADIENTS and per_sample else first


class TimelineBuilder:
    """A timeline while it is written, with its fields as lists that may be appended to."""

    def __init__(self, names: Iterable[str] = ("",)) -> None:
        """Begin a timeline; `names`: operators and modules that have a number already."""
        self.fixed: list[int] = []
        self.per_sample: list[int] = []
        self.categories: list[int] = []
        self.operators: list[int] = []
        self.modules: list[int] = []
        self.names = {name: number for number, name in enumerate(names)}
        self.events: list[int] = []
        self.phases: list[tuple[str, int]] = []
        self.empties: list[int] = []

    def phase(self, name: str) -> None:
        """Begin a phase."""
        self.phases.append((name, len(self.events)))

    def empty_cache(self) -> None:
        """Have the allocator give back unused memory."""
        self.empties.append(len(self.events))

    def born(self, fixed: int, category: int, operator: str, module: str = "", per_sample: int = 0) -> int:
        """Begin a storage of `fixed` bytes, and `per_sample` more for each sample; return its index."""
        index = len(self.fixed)
        self.fixed.append(fixed)
        self.per_sample.append(per_sample)
        self.categories.append(category)
        names = self.names
        self.operators.append(names[operator] if operator in names else names.setdefault(operator, len(names)))
        self.modules.append(names[module] if module in names else names.setdefault(module, len(names)))
        self.events.append(index)
        return index

    def timeline(self) -> Timeline:
        """Return the timeline written so far."""
        return Timeline(**{name: tuple(values) for name, values in vars(self).items()})


ARRIVAL, BATCH_ENDS, LOSS_ENDS = "arrival", "batch ends", "loss ends"
"""Phases of a trace besides forward and backward: its batch comes to the device; it goes; the loss goes, with what the
graph behind it still holds."""


class MarkKind(IntEnum):
    """The kinds of marks."""

    GRADIENT = 0  # autograd has finished the gradient of a parameter
    DEATH = 1  # a storage that was a gradient dies
    FORWARD_BEGINS = 2  # ZeRO-3: of the whole model
    FETCH = 3  # ZeRO-3: a module is about to run, in forward or where backward repeats it
    RELEASE = 4  # ZeRO-3: it has run
    FETCH_IN_BACKWARD = 5  # ZeRO-3: a module's backward is about to run
    RELEASE_IN_BACKWARD = 6  # ZeRO-3: it has run
    HOLD = 7  # ZeRO-3: somebody keeps a parameter's memory beyond its module's run
    LET_GO = 8  # ZeRO-3: and does so no more
    READ = 9  # ZeRO-3: a parameter is looked at while its module does not run, such as for its type
    LAYER = 10  # a layer begins in forward; only splicing and mixing ask
    LAYER_AGAIN = 11  # its recomputation begins in backward; as above
    LAYER_AGAIN_ENDS = 12  # and ends; as above


class Mark(NamedTuple):
    """An event that a ZeRO optimizer acts on.

    Attributes:
        event: number of the event that it comes before.
        kind: what happens.
        number: of the parameter, the module or the layer.
        storage: the gradient's, -1 where it is not of this stream; of a hold the number of the hold.
    """

    event: int
    kind: MarkKind
    number: int
    storage: int


Marks = tuple[tuple[Mark, ...], ...]
"""The marks of each phase, in order."""


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """One micro-step for every micro-batch at once; gradients are dropped as soon as autograd has summed them.

    Attributes:
        stream: births and deaths, in the phases `ARRIVAL`, forward, backward, `BATCH_ENDS`
            and `LOSS_ENDS`. The model's parameters and buffers
            are not part of it.
        marks: what a ZeRO optimizer acts on.
        own_parameters: of each module, the parameters it owns without its submodules'.
        elements: of every parameter, in the model's order.
        trainable: for every parameter.
        element_bytes: of a trainable parameter's element; 0: they differ.
        buffer_bytes: of every buffer, and of the scales of quantised weights.
        building_bytes: the peak while the model is built.
        work: what the micro-step makes the device do.
        notes: what makes the simulation unsure: assumptions where memory depends on data, and under ZeRO-3 parameters
            that are used outside their modules.
        parameter_bytes: of every parameter, where their elements differ in size; empty: they do not.
        gathered_as_one: the modules whose parameters ZeRO-3 gathers with those of all modules within.
        parameters_within: of each module, the parameters of it and all modules within; empty: none is gathered as one.
    """

    stream: Timeline
    marks: Marks
    own_parameters: tuple[tuple[int, ...], ...]
    elements: tuple[int, ...]
    trainable: tuple[bool, ...]
    element_bytes: int
    buffer_bytes: tuple[int, ...]
    building_bytes: int
    work: Work
    notes: tuple[str, ...] = ()
    parameter_bytes: tuple[int, ...] = ()
    gathered_as_one: tuple[int, ...] = ()
    parameters_within: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def gathered(self) -> tuple[tuple[int, ...], ...]:
        """The parameters that ZeRO-3 gathers when each module begins."""
        within, as_one = self.parameters_within, set(self.gathered_as_one)
        return tuple(within[i] if i in as_one else own for i, own in enumerate(self.own_parameters))

    @cached_property
    def trainable_index(self) -> dict[int, int]:
        """The number of each trainable parameter among these, by its number among all."""
        trained = [parameter for parameter, trainable in enumerate(self.trainable) if trainable]
        return {parameter: number for number, parameter in enumerate(trained)}

    @cached_property
    def stops(self) -> dict[str, list[Mark]]:
        """The marks of each phase, and the deaths of what is marked as a gradient, in order.

        Parameters are counted among the trainable ones.
        """
        gradient, trainable = MarkKind.GRADIENT, self.trainable_index
        gradients = {mark.storage for marks in self.marks for mark in marks if mark.kind is gradient}
        storages, is_birth = self.stream.events, self.stream.is_birth.tolist()
        stops = {}
        for (phase, events), marks in zip(self.stream.phase_ranges, self.marks, strict=True):
            of_phase = [
                Mark(mark.event, gradient, trainable[mark.number], mark.storage) if mark.kind is gradient else mark
                for mark in marks
                if mark.kind < MarkKind.LAYER
            ]
            of_phase += [
                Mark(event, MarkKind.DEATH, -1, storages[event])
                for event in events
                if storages[event] in gradients and not is_birth[event]
            ]
            stops[phase] = sorted(of_phase, key=lambda mark: mark.event)  # stable: a mark is before what happens
        return stops

    @cached_property
    def fetches(self) -> list[int]:
        """The modules in the order in which ZeRO-3 gathers what they need, forward and backward."""
        kinds = MarkKind.FETCH, MarkKind.FETCH_IN_BACKWARD
        return [mark.number for marks in self.marks for mark in marks if mark.kind in kinds]

    @cached_property
    def has_all_gradients(self) -> bool:
        """True if backward reaches every trainable parameter exactly once."""
        reached = [mark.number for marks in self.marks for mark in marks if mark.kind is MarkKind.GRADIENT]
        return sorted(reached) == sorted(self.trainable_index)

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """The bytes of every parameter."""
        return self.parameter_bytes or tuple(n * self.element_bytes for n in self.elements)

    @property
    def trainable_elements(self) -> tuple[int, ...]:
        """The elements of the trainable parameters, in the model's order."""
        return tuple(n for n, trainable in zip(self.elements, self.trainable, strict=True) if trainable)
