"""One micro-step of a model alone, without DeepSpeed: what the ZeRO simulations start from."""

from dataclasses import dataclass
from functools import cached_property

from frugal.planning.cost import Work
from frugal.planning.memory.timeline import Timeline

ARRIVAL, BATCH_ENDS, LOSS_ENDS = "arrival", "batch ends", "loss ends"
"""Phases of a trace besides forward and backward: its batch comes to the device; it goes; the loss goes, with what the
graph behind it still holds."""

GRADIENT, DEATH, FORWARD_BEGINS, FETCH, RELEASE, FETCH_IN_BACKWARD, RELEASE_IN_BACKWARD, HOLD, LET_GO, LAYER = range(10)
"""What a mark says: a gradient is whole; a storage that was a gradient dies. Under ZeRO-3 also: the model's forward
begins; a module is about to run and has run, in forward (also where backward repeats it) and in backward; somebody
keeps a parameter's memory beyond its module's run, and does so no more. For splicing: a repeated layer begins."""

Mark = tuple[int, int, int, int]
"""`(event, what, number, storage)`: it happens before that event. The number is a parameter's or a module's; in place
of the storage, holds of parameters have a number of their own."""


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """One micro-step for every micro-batch at once; gradients are dropped as soon as autograd has summed them.

    Attributes:
        stream: births and deaths, in the phases `ARRIVAL`, forward, backward, `BATCH_ENDS`
            and `LOSS_ENDS`. The model's parameters and buffers
            are not part of it.
        marks: what a ZeRO optimizer acts on, of each phase, in order. A gradient's storage is -1 where it is not of
            this stream.
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
    marks: tuple[tuple[Mark, ...], ...]
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
        gradients = {mark[3] for marks in self.marks for mark in marks if mark[1] == GRADIENT}
        events, is_birth = self.stream.events, self.stream.is_birth.tolist()
        stops = {}
        for (phase, numbers), marks in zip(self.stream.phase_ranges, self.marks, strict=True):
            of_phase = [
                (event, what, self.trainable_index[number] if what == GRADIENT else number, storage)
                for event, what, number, storage in marks
            ]
            of_phase += [
                (event, DEATH, -1, events[event])
                for event in numbers
                if events[event] in gradients and not is_birth[event]
            ]
            stops[phase] = sorted(of_phase, key=lambda stop: stop[0])  # stable: a mark is before what happens
        return stops

    @cached_property
    def has_all_gradients(self) -> bool:
        """Whether backward reaches every trainable parameter, once."""
        reached = [number for marks in self.marks for _, what, number, _ in marks if what == GRADIENT]
        return sorted(reached) == sorted(self.trainable_index)

    @property
    def trainable_elements(self) -> tuple[int, ...]:
        """Of the trainable parameters, in the model's order."""
        return tuple(n for n, trainable in zip(self.elements, self.trainable, strict=True) if trainable)
