"""One micro-step of a model alone, without DeepSpeed: what the ZeRO simulations start from."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from frugal.planning.cost import Work
from frugal.planning.memory.timeline import Timeline

ARRIVAL, BATCH_ENDS, LOSS_ENDS = "arrival", "batch ends", "loss ends"
"""Phases of a trace besides forward and backward: its batch comes to the device; it goes; the loss goes, with what the
graph behind it still holds."""


class MarkKind(IntEnum):
    """What happens at a mark."""

    GRADIENT = 0  # autograd has finished the gradient of a parameter
    DEATH = 1  # a storage that was a gradient dies
    FORWARD_BEGINS = 2  # ZeRO-3: of the whole model
    FETCH = 3  # ZeRO-3: a module is about to run, in forward or where backward repeats it
    RELEASE = 4  # ZeRO-3: it has run
    FETCH_IN_BACKWARD = 5  # ZeRO-3: a module's backward is about to run
    RELEASE_IN_BACKWARD = 6  # ZeRO-3: it has run
    HOLD = 7  # ZeRO-3: somebody keeps a parameter's memory beyond its module's run
    LET_GO = 8  # ZeRO-3: and does so no more
    LAYER = 9  # a repeated layer begins in forward; only splicing asks


class Mark(NamedTuple):
    """Something that a ZeRO optimizer acts on.

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
"""Those of each phase, in order."""


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
        element_bytes: of a parameter's element; 0: they differ.
        buffer_bytes: of every buffer.
        building_bytes: the peak while the model is built.
        work: what the micro-step makes the device do.
        notes: what makes the simulation unsure: assumptions where memory depends on data, and under ZeRO-3 parameters
            that are used outside their modules.
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

    @cached_property
    def trainable_index(self) -> dict[int, int]:
        """Parameter -> its number among the trainable ones."""
        trained = [parameter for parameter, trainable in enumerate(self.trainable) if trainable]
        return {parameter: number for number, parameter in enumerate(trained)}

    @cached_property
    def stops(self) -> dict[str, list[Mark]]:
        """Of each phase the marks, and the deaths of what is marked as a gradient, in order.

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
            ]
            of_phase += [
                Mark(event, MarkKind.DEATH, -1, storages[event])
                for event in events
                if storages[event] in gradients and not is_birth[event]
            ]
            stops[phase] = sorted(of_phase, key=lambda mark: mark.event)  # stable: a mark is before what happens
        return stops

    @cached_property
    def has_all_gradients(self) -> bool:
        """Whether backward reaches every trainable parameter, once."""
        reached = [mark.number for marks in self.marks for mark in marks if mark.kind is MarkKind.GRADIENT]
        return sorted(reached) == sorted(self.trainable_index)

    @property
    def trainable_elements(self) -> tuple[int, ...]:
        """Of the trainable parameters, in the model's order."""
        return tuple(n for n, trainable in zip(self.elements, self.trainable, strict=True) if trainable)
