"""The model's step alone on meta tensors: no DeepSpeed, no optimizer, gradients dropped as soon as they are complete.

DeepSpeed's work on the gradients is added by arithmetic (`frugal.deepspeed_adapter.simulate`), for any stage and
world size. `import deepspeed` alone takes as long as all traces of a model.

A model of many layers that are alike is traced with fewer of them, and the trace is spliced to its length.
"""

import copy
import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import Tensor, nn

from frugal import torch_internals
from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, Capability, DeviceKind
from frugal.deepspeed_adapter import zero3_graph
from frugal.dryrun.messages import AskTrace
from frugal.dryrun.trace.cuda_kernels import kernels_of
from frugal.dryrun.trace.recorder import Tracker, not_collected
from frugal.dryrun.trace.splice import LayerLayout, splice
from frugal.errors import FrugalError
from frugal.models import activation_checkpointing, sequence_parallel, tiled_loss, transformers_internals
from frugal.models.fused import liger_internals, replacement
from frugal.models.loading import quantised
from frugal.models.objectives import Objective
from frugal.models.tiling import tiled_mlp
from frugal.planning.cost import Counts, between
from frugal.planning.memory.timeline import (
    ARRIVAL,
    BACKWARD,
    BATCH_ENDS,
    FORWARD,
    LOSS_ENDS,
    MICRO_BATCHES,
    Mark,
    MarkKind,
    Marks,
    ModelTrace,
    NotAffineError,
    Timeline,
)
from frugal.planning.strategy import LayerMode

FEW_PERIODS = 5
"""Periods of layers that stand for many."""

_ALIKE_WHEN_LONGER: WeakSet[nn.Module] = WeakSet()
"""Models of which a longer trace was compared with a spliced one."""


class Recorder(Tracker):
    """A tracker that also marks when gradients are complete."""

    def __init__(self, kind: DeviceKind, capability: Capability = ASSUMED_CAPABILITY) -> None:
        super().__init__(kind, capability=capability, alone=True, first_phase=ARRIVAL)
        self._is_for_any_size = True
        self.counts_at: dict[tuple[MarkKind, int], Counts] = {}
        self.gathered_as_one: tuple[int, ...] = ()  # ZeRO-3: modules whose parameters are gathered at once

    def take_gradients(self, model: nn.Module) -> None:
        """Mark and drop the gradient of every parameter of `model` when it is complete."""
        for index, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._finished, index))

    def exchange(self, _received: Tensor, sent: Tensor) -> None:
        """Count the bytes that a rank sends to those that share its samples."""
        self._counted["exchanged"] += int(sent.nbytes)
        self._counted["num_exchanges"] += 1

    def mark_layers(self, layers: Iterable[nn.Module]) -> None:
        """Mark the beginning of each layer in forward."""
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._begins, number))

    def _begins(self, number: int, *_: Any) -> None:
        if self.phase == FORWARD:
            self.add_mark(MarkKind.LAYER, number, -1)
            self.counts_at.setdefault((MarkKind.LAYER, number), self.counts)

    def run_layer(self, number: int, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer; mark its beginning and end where backward runs it again."""
        if self.phase != BACKWARD:
            return layer(*args, **kwargs)
        self.add_mark(MarkKind.LAYER_AGAIN, number, -1)
        try:
            return layer(*args, **kwargs)
        finally:
            self.add_mark(MarkKind.LAYER_AGAIN_ENDS, number, -1)

    def _finished(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.add_mark(MarkKind.GRADIENT, index, self._storage.get(torch_internals.address(parameter.grad), -1))
        self.counts_at[MarkKind.GRADIENT, index] = self.counts
        parameter.grad = None

    def add_mark(self, kind: MarkKind, number: int, storage: int) -> None:
        """Add a mark at the present event, see `Mark`."""
        self.marks[-1].append(Mark(len(self._timeline.events), kind, number, storage))


def built(build: Callable[[], nn.Module]) -> tuple[nn.Module, int]:
    """Build a model on meta, and return it with the peak of its storages meanwhile, in bytes."""
    with Tracker("cuda") as tracker:
        model = build()
    return model, tracker.host.most_waiting_bytes


def trace(
    model: nn.Module,
    objective: Objective,
    asked: AskTrace,
    *,
    building_bytes: int | None = None,
    layer_modes: Sequence[tuple[LayerMode, int]] = (),
) -> ModelTrace:
    """Trace one micro-step of `model`, which is on meta and is not changed.

    `asked`: the way to run it; of ranks that share each sample one is traced.
    `building_bytes`: the peak while it was built, see `built`; None: no more than it has in the end.

    Raises:
        NotAffineError: its memory is no affine function of the micro-batch, or it does not run alone.
        RequestError: the model cannot be trained like that.
    """
    transformers_internals.always_use()
    is_zero3 = asked.zero_stage == 3
    record = partial(_record, asked, sequence_parallel.parts_of(objective, asked.sequence_parallel, 0), layer_modes)
    with (
        kernels_of(asked.kind, asked.capability),
        zero3_graph.linear_of_zero3() if is_zero3 else nullcontext(),
        not_collected(),
    ):
        try:
            recorded = (None if layer_modes else _spliced(model, record)) or _whole(model, record)
        except (FrugalError, NotAffineError, NotImplementedError):
            raise
        except Exception as error:  # a dry run tries more ways, or reports what is wrong
            raise NotAffineError(f"the model's step alone cannot be traced: {error}") from error
    recorder, stream, marks, counts, as_one = recorded
    parameters = list(model.parameters())
    buffers = [*model.buffers(), *quantised.scales(model)]
    sizes = {parameter.element_size() for parameter in parameters}
    trained = {parameter.element_size() for parameter in parameters if parameter.requires_grad}
    return ModelTrace(
        stream=stream,
        marks=marks,
        work=between(*counts, MICRO_BATCHES),
        notes=recorder.notes,
        gathered_as_one=as_one,
        own_parameters=zero3_graph.parameters_of_modules(model, within=False) if is_zero3 else (),
        parameters_within=zero3_graph.parameters_of_modules(model, within=True) if as_one else (),
        elements=tuple(parameter.numel() for parameter in parameters),
        trainable=tuple(parameter.requires_grad for parameter in parameters),
        element_bytes=trained.pop() if len(trained) == 1 else 0,
        parameter_bytes=tuple(parameter.nbytes for parameter in parameters) if len(sizes) > 1 else (),
        buffer_bytes=tuple(buffer.untyped_storage().nbytes() for buffer in buffers),
        building_bytes=building_bytes or sum(tensor.untyped_storage().nbytes() for tensor in (*parameters, *buffers)),
    )


Record = Callable[[nn.Module, int], Recorder]
"""Records a micro-step of a model, which is used up, at a micro-batch."""

Recorded = tuple[Recorder, Timeline, Marks, tuple[Counts, Counts], tuple[int, ...]]
"""A recording, stream and marks for every micro-batch, the counts at each of `MICRO_BATCHES`, and the modules that are
gathered as one."""


def _fitted(first: Recorder, second: Recorder) -> tuple[Timeline, Marks]:
    """Return stream and marks for every micro-batch, fitted to those at `MICRO_BATCHES`.

    Raises:
        NotAffineError: they are not the same stream.
    """
    stream = Timeline.fit(first.timeline(), second.timeline(), MICRO_BATCHES)
    if first.marks != second.marks:
        raise NotAffineError("gradients are finished in another order at another micro-batch")
    return stream, tuple(map(tuple, first.marks))


def _whole(model: nn.Module, record: Record) -> Recorded:
    """Record the whole model."""
    first, second = (record(copy.deepcopy(model), micro_batch) for micro_batch in MICRO_BATCHES)
    return first, *_fitted(first, second), (first.counts, second.counts), first.gathered_as_one


def _spliced(model: nn.Module, record: Record) -> Recorded | None:
    """Record few layers and splice them; None where they cannot stand for many.

    Two traces are of the same few periods of layers, as for a whole model. A third has a period more, and must equal
    the spliced others: so a storage whose size depends on the number of layers is noticed. Such a storage is the
    model's own, in whatever way its layers are run: one third trace is enough for all of them.
    """
    repeated = repetition(model)
    if repeated is None or repeated.num_periods <= FEW_PERIODS + 1:
        return None
    layers = replace(repeated, num_periods=FEW_PERIODS)

    try:
        first, second = (record(shortened(model, layers), micro_batch) for micro_batch in MICRO_BATCHES)
        stream, marks = _fitted(first, second)
        if model not in _ALIKE_WHEN_LONGER:
            longer = record(shortened(model, replace(repeated, num_periods=FEW_PERIODS + 1)), MICRO_BATCHES[0])
            real, (one_more, more_marks) = longer.timeline(), splice(stream, marks, layers, FEW_PERIODS + 1)
            is_alike = (one_more.events, one_more.phases) == (real.events, real.phases)
            is_alike = is_alike and more_marks == tuple(map(tuple, longer.marks))
            if not is_alike or tuple(one_more.sizes(MICRO_BATCHES[0])) != real.fixed:
                return None
            _ALIKE_WHEN_LONGER.add(model)
        stream, marks = splice(stream, marks, layers, repeated.num_periods)
    except Exception:  # a model may count its layers itself; tracing the whole one reports what is wrong
        return None
    more = repeated.num_periods - FEW_PERIODS
    small, large = (each.counts + _of_periods(each, layers, more) for each in (first, second))
    as_one = layers.module_numbers(first.gathered_as_one, repeated.num_periods)
    return first, stream, marks, (small, large), as_one


def _of_periods(raw: Recorder, layers: LayerLayout, number: int) -> Counts:
    """Return `number` times the counts of a period in the middle: its forward, and from its last gradient to the one
    before.

    Only called where splicing has found the periods alike.
    """
    middle = layers.num_periods // 2
    begins = [raw.counts_at[MarkKind.LAYER, layers.first_layer + i * layers.period] for i in (middle, middle + 1)]
    own = range(
        layers.first_parameter + middle * layers.parameters, layers.first_parameter + layers.parameters * (middle + 1)
    )
    parameter = next(number for number in own if (MarkKind.GRADIENT, number) in raw.counts_at)
    ends = [raw.counts_at[MarkKind.GRADIENT, number] for number in (parameter + layers.parameters, parameter)]
    of_one = (begins[1] - begins[0]) + (ends[1] - ends[0])
    return Counts({name: number * count for name, count in of_one.items()})


def _record(
    asked: AskTrace,
    objective: Objective,
    layer_modes: Sequence[tuple[LayerMode, int]],
    model: nn.Module,
    micro_batch: int,
) -> Recorder:
    """Record one micro-step of `model`, which is used up, and mark the layers that can be recomputed."""
    recorder = Recorder(asked.kind, asked.capability)
    if asked.kernels == "liger":
        replacement.apply(model)
    layers = activation_checkpointing.layers(model)
    activation_checkpointing.apply(model, asked.activation_checkpointing, layer_modes, watch=recorder.run_layer)
    if asked.sequence_parallel > 1:
        sequence_parallel.apply(model, sequence_parallel.Split(asked.sequence_parallel, recorder.exchange))
    if asked.loss == "tiled":
        tiled_loss.apply(model, asked.kernels)
    if asked.mlp == "tiled":
        tiled_mlp.apply(model)
    example = objective.example(micro_batch, asked.request.seq_len)
    recorder.expect(example)
    recorder.watch(model)
    recorder.take_gradients(model)
    recorder.mark_layers(layers)
    if asked.zero_stage == 3:
        zero3_graph.install(model, recorder.add_mark)
        recorder.gathered_as_one = zero3_graph.gathered_as_one(model)
    gc.freeze()  # the model: collections of a micro-step look for its own cycles
    with recorder, liger_internals.noted(asked.kernels, asked.multiprocessors, recorder.launched):
        _micro_step(recorder, model, objective, example)
    return recorder


def _micro_step(recorder: Recorder, model: nn.Module, objective: Objective, example: dict[str, Tensor]) -> None:
    """Run a micro-step as `Engine.accumulate` and DeepSpeed's `backward` do, down to scalars and collections of
    cycles."""
    total = torch.zeros((), dtype=torch.float64, device="meta")
    batch = {name: tensor.to("meta") for name, tensor in example.items()}
    recorder.mark(FORWARD)
    loss = objective.loss_sum(model, batch)
    total += loss.detach()
    gc.collect()
    recorder.mark(BACKWARD)
    scaled = loss * 1.0
    scaled.backward()
    del scaled
    recorder.mark(BATCH_ENDS)
    del batch, total
    gc.collect()
    recorder.mark(LOSS_ENDS)
    del loss
    gc.collect()


_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number"}  # attributes by which a layer knows its place


@functools.lru_cache(maxsize=1)  # a worker traces one model in several ways
def repetition(model: nn.Module) -> LayerLayout | None:
    """Return the repeated layers of `model`: a list that ends in whole periods of layers of the same kinds.

    None unless one list has all layers that can be recomputed, and nothing else.
    """
    layers = activation_checkpointing.layers(model)
    lists = {path: each for path, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    path = next((path for path, each in lists.items() if list(each) == layers), None)
    if path is None or len(layers) < 3:
        return None
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    own = [[numbers[id(parameter)] for parameter in layer.parameters()] for layer in layers]
    in_order = [number for of_layer in own for number in of_layer]
    if not in_order or in_order != list(range(in_order[0], in_order[0] + len(in_order))):
        return None  # the layers share parameters, or others stand between
    kinds = [_kind(layer) + _settings(model, i, len(layers)) for i, layer in enumerate(layers)]
    for period in range(1, len(kinds) // 2 + 1):
        first = len(kinds)
        while first > 0 and (first + period > len(kinds) or kinds[first - 1] == kinds[first - 1 + period]):
            first -= 1
        first += (len(kinds) - first) % period
        if (len(kinds) - first) // period >= 2 and first <= len(kinds) // 2:
            break
    else:
        return None
    of_period = layers[first : first + period]
    return LayerLayout(
        path=path,
        first_layer=first,
        period=period,
        num_periods=(len(kinds) - first) // period,
        first_parameter=min(number for of_layer in own[first : first + period] for number in of_layer),
        parameters=sum(map(len, own[first : first + period])),
        first_module=next(number for number, module in enumerate(model.modules()) if module is of_period[0]),
        modules=sum(1 for layer in of_period for _ in layer.modules()),
    )


def shortened(model: nn.Module, layers: LayerLayout) -> nn.Module:
    """Return a copy of `model` with only the first periods of its layers, as many as `layers` has."""
    path, _, name = layers.path.rpartition(".")
    keep = layers.first_layer + layers.num_periods * layers.period
    few = nn.ModuleList(list(model.get_submodule(layers.path).children())[:keep])
    config = getattr(model, "config", None)
    with patch.dict(model.get_submodule(path)._modules, {name: few}):
        return copy.deepcopy(model, {} if config is None else {id(config): config})


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return a value that is equal for layers of the same modules, parameters and settings."""
    return tuple(
        (
            name,
            type(module),
            tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters(recurse=False)),
            tuple((n, b.shape, b.dtype) for n, b in module.named_buffers(recurse=False)),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if key not in _NUMBERS and isinstance(value, str | int | float | bool | None)
            ),
        )
        for name, module in layer.named_modules()
    )


def _settings(model: nn.Module, number: int, num_layers: int) -> tuple[Any, ...]:
    """Return one layer's items of the configuration's lists that have an item for each layer."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return ()
    values = sorted(vars(config.get_text_config()).items())
    lists = [(key, value) for key, value in values if isinstance(value, Sequence) and not isinstance(value, str)]
    return tuple((key, str(value[number])) for key, value in lists if len(value) == num_layers)
