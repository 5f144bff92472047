"""The model's step alone on meta tensors: no DeepSpeed, no optimizer, gradients dropped as soon as they are whole.

What DeepSpeed does with the gradients is added by arithmetic (`frugal.planning.zero`), for any stage and world size.
`import deepspeed` alone takes as long as all traces of a model.
"""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from frugal.dryrun import zero3
from frugal.dryrun.attention import kernels_of
from frugal.dryrun.tracker import Tracker
from frugal.planning.zero.trace import ARRIVAL, END, GRADIENT, Mark, ModelTrace, RawTrace, fitted
from frugal.training import activation_checkpointing, padding_masks, tiled_loss
from frugal.training.loss import Objective
from frugal.training.measure import BACKWARD, FORWARD

MICRO_BATCHES = (2, 3)
"""Samples; one sample has a slightly different stream."""


class Recorder(Tracker):
    """A tracker that also marks when gradients are whole."""

    def __init__(self, kind: Literal["cuda", "cpu"]) -> None:
        super().__init__(kind)
        self.phase = ARRIVAL
        self._phases = [(ARRIVAL, 0)]
        self._building = False
        self.marks: list[list[Mark]] = [[]]

    def mark(self, phase: str) -> None:
        """From now on it is `phase`."""
        super().mark(phase)
        self.marks.append([])

    def take_gradients(self, model: nn.Module) -> None:
        """Mark and drop the gradient of every parameter of `model` when it is whole."""
        for index, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, index=index: self._finished(parameter, index)
                )

    def _finished(self, parameter: Tensor, index: int) -> None:
        assert parameter.grad is not None
        storage = self._storage.get(parameter.grad.untyped_storage()._cdata, -1)
        self.marks[-1].append((len(self._events), GRADIENT, index, storage))
        parameter.grad = None

    def module(self, what: int, number: int, hold: int) -> None:
        """Mark what `frugal.dryrun.zero3` tells."""
        self.marks[-1].append((len(self._events), what, number, hold))


def built(build: Callable[[], nn.Module]) -> tuple[nn.Module, int]:
    """A model on meta, and the peak of its storages while it was built, bytes."""
    with Tracker("cuda") as tracker:
        model = build()
    return model, tracker.host_peak_bytes


def trace(
    model: nn.Module,
    objective: Objective,
    *,
    seq_len: int,
    kind: Literal["cuda", "cpu"],
    activation_checkpointing_mode: Literal["off", "full"],
    loss: Literal["plain", "tiled"],
    zero_stage: int,
    building_bytes: int | None = None,
) -> ModelTrace:
    """One micro-step of `model`, which is on meta and is not changed.

    `building_bytes`: the peak while it was built, see `built`; None: no more than it has in the end.

    Raises:
        NotAffineError: its memory is no affine function of the micro-batch.
        RequestError: the model cannot be trained like that.
    """
    padding_masks.always_use()
    raw = []
    is_zero3 = zero_stage == 3
    with kernels_of(kind), zero3.linear_of_zero3() if is_zero3 else nullcontext(), _no_collection():
        for micro_batch in MICRO_BATCHES:
            own = copy.deepcopy(model)
            activation_checkpointing.apply(own, activation_checkpointing_mode)
            if loss == "tiled":
                tiled_loss.apply(own)
            raw.append(_record(own, objective, micro_batch, seq_len, kind, is_zero3))
            del own
            gc.collect()
    parameters = list(model.parameters())
    buffers = list(model.buffers())
    return fitted(
        *raw,
        own_parameters=_own_parameters(model),
        elements=tuple(parameter.numel() for parameter in parameters),
        trainable=tuple(parameter.requires_grad for parameter in parameters),
        element_bytes=parameters[0].element_size(),
        buffer_bytes=tuple(buffer.untyped_storage().nbytes() for buffer in buffers),
        building_bytes=building_bytes or sum(tensor.untyped_storage().nbytes() for tensor in (*parameters, *buffers)),
    )


def _own_parameters(model: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Of each module the numbers of the parameters it owns itself, in order."""
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    return tuple(
        tuple(sorted({numbers[id(parameter)] for parameter in module.parameters(recurse=False)}))
        for module in model.modules()
    )


def _record(
    model: nn.Module,
    objective: Objective,
    micro_batch: int,
    seq_len: int,
    kind: Literal["cuda", "cpu"],
    is_zero3: bool,
) -> RawTrace:
    recorder = Recorder(kind)
    example = objective.example(micro_batch, seq_len)
    recorder.watch(model)
    recorder.expect(example)
    recorder.take_gradients(model)
    if is_zero3:
        zero3.install(model, recorder.module)
    with recorder:
        _micro_step(recorder, model, objective, example)
    gc.collect()
    return RawTrace(
        recording=recorder.recording(micro_batch),
        marks=tuple(map(tuple, recorder.marks)),
        num_operators=recorder.num_operators,
        **{f"{name}_flops": flops for name, flops in recorder.flops.items()},
    )


def _micro_step(recorder: Recorder, model: nn.Module, objective: Objective, example: dict[str, Tensor]) -> None:
    """As `Engine.accumulate` and DeepSpeed's `backward` do it, down to the scalars."""
    total = torch.zeros((), dtype=torch.float64, device="meta")
    batch = {name: tensor.to("meta") for name, tensor in example.items()}
    recorder.mark(FORWARD)
    loss = objective.loss_sum(model, batch)
    total += loss.detach()
    loss = loss * 1.0
    recorder.mark(BACKWARD)
    scaled = loss * 1.0
    scaled.backward()
    recorder.mark(END)


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
