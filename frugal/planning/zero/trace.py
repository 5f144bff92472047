"""One micro-step of a model alone, without DeepSpeed: what the ZeRO simulations start from."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from frugal.planning.timeline import NotAffineError, Recording, Timeline

ARRIVAL, END = "arrival", "end"
"""Phases of a trace besides forward and backward: its batch comes to the device; what is left of it goes."""

GRADIENT, DEATH = range(2)
"""Kinds of stops: a gradient is whole; a storage that was a gradient dies."""


@dataclass(frozen=True, kw_only=True)
class RawTrace:
    """A trace at one micro-batch, as recorded. Fields as in `ModelTrace`."""

    recording: Recording
    gradients: tuple[tuple[int, int, int], ...]
    modules: tuple[tuple[int, int, int], ...]
    forward_flops: int
    backward_flops: int
    recompute_flops: int
    num_operators: int


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """One micro-step for every micro-batch at once; gradients are dropped as soon as autograd has summed them.

    Attributes:
        stream: births and deaths, in the phases `ARRIVAL`, forward and backward. The model's parameters and buffers
            are not part of it.
        gradients: `(event, parameter, storage)`: before that event autograd has finished the gradient of a parameter,
            which is in that storage, or in one that is not of this stream (-1).
        modules: `(event, what, module)` for modules with parameters of their own, see `MODULE_MARKS`.
        own_parameters: of each such module, the parameters it owns.
        elements: of every parameter, in the model's order.
        trainable: for every parameter.
        element_bytes: of a parameter's element; all have the same type.
        buffer_bytes: of every buffer.
        flops_per_sample: FLOPs of forward and backward, without recomputation.
        recompute_flops_per_sample: FLOPs of the forward that activation checkpointing repeats.
        num_operators: operators of the micro-step.
    """

    stream: Timeline
    gradients: tuple[tuple[int, int, int], ...]
    modules: tuple[tuple[int, int, int], ...]
    own_parameters: tuple[tuple[int, ...], ...]
    elements: tuple[int, ...]
    trainable: tuple[bool, ...]
    element_bytes: int
    buffer_bytes: tuple[int, ...]
    flops_per_sample: float
    recompute_flops_per_sample: float
    num_operators: int

    @cached_property
    def trainable_index(self) -> dict[int, int]:
        """Parameter -> its number among the trainable ones."""
        trained = [parameter for parameter, trainable in enumerate(self.trainable) if trainable]
        return {parameter: number for number, parameter in enumerate(trained)}

    @cached_property
    def stops(self) -> tuple[tuple[int, int, int, int], ...]:
        """`(event, kind, trainable parameter, storage)`: where a ZeRO optimizer may act, in order."""
        stops = [
            (event, GRADIENT, self.trainable_index[parameter], storage) for event, parameter, storage in self.gradients
        ]
        gradients = {storage for _, _, storage in self.gradients}
        alive: set[int] = set()
        for event, storage in enumerate(self.stream.events):
            if storage in gradients:
                if storage in alive:
                    stops.append((event, DEATH, -1, storage))
                alive.add(storage)
        return tuple(sorted(stops))

    @property
    def trainable_elements(self) -> tuple[int, ...]:
        """Of the trainable parameters, in the model's order."""
        return tuple(n for n, trainable in zip(self.elements, self.trainable, strict=True) if trainable)


def fitted(first: RawTrace, second: RawTrace, **model: Sequence[object] | int) -> ModelTrace:
    """The trace through two of different micro-batches.

    Raises:
        NotAffineError: they are not the same stream.
    """
    stream = Timeline.fit(first.recording, second.recording)
    if (first.gradients, first.modules) != (second.gradients, second.modules):
        raise NotAffineError("gradients are finished in another order at another micro-batch")
    samples = second.recording.micro_batch - first.recording.micro_batch
    flops = second.forward_flops + second.backward_flops - first.forward_flops - first.backward_flops
    return ModelTrace(
        stream=stream,
        gradients=first.gradients,
        modules=first.modules,
        flops_per_sample=flops / samples,
        recompute_flops_per_sample=(second.recompute_flops - first.recompute_flops) / samples,
        num_operators=first.num_operators,
        **model,  # type: ignore[arg-type]  # what does not depend on the micro-batch
    )
