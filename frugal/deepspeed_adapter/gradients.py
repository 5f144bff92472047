"""Gradients between backward and the optimizer step, where DeepSpeed 0.19.8 assumes that each parameter has one.

A parameter without a gradient is updated with the wrong one:

- ZeRO-3 keeps reduced gradients in buffers that the first micro-step overwrites and later ones add to, and hands all of
  them to the optimizer. A parameter that the first micro-step does not use keeps an earlier step's.
- An optimizer in host memory gets a gradient only in the last micro-step, and only of parameters used in it. Others
  keep an earlier step's there, and lose the gradients of earlier micro-steps. At ZeRO 1 and 2 their sum continues.

`mend` gives a parameter that a micro-step did not use a gradient of zeros, which goes the way of all others: so
gradients are the sum over the micro-steps of this global batch for every caller of the engine (our own step, a
recovery, transformers' Trainer). Where all are used it takes no memory and writes nothing.

And gradients of different parameters meet: ZeRO-2 reduces a bucket when it is full, in the order in which gradients
arrive, so where micro-batches use other parameters, or in another order, ranks add up gradients of different ones.
`announce` makes each collective name the parameters it takes, so that ranks can compare before they enter it;
`reduce_in_order` makes them reduce all gradients in one order, at the end of backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, stage_1_and_2
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from frugal.deepspeed_adapter.collectives import entering
from frugal.deepspeed_adapter.simulate.stream import pieces_of_a_norm
from frugal.errors import refuse
from frugal.required import in_place_of, put

_END_BACKWARD, _REDUCE = "independent_gradient_partition_epilogue", "reduce_ready_partitions_and_remove_grads"
_REDUCES = "reduces gradients of"

Call = Callable[..., None]


def mend(optimizer: Any, module: nn.Module) -> None:
    """Make DeepSpeed's `optimizer` update the parameters of `module` with this global batch's gradients alone."""
    is_split = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    is_whole = isinstance(optimizer, DeepSpeedZeroOptimizer) and (optimizer.cpu_offload or optimizer.overlap_comm)
    if not is_split and not is_whole:
        return
    reduced: set[int] = set()  # ids of parameters, in this micro-step
    forwards: list[nn.Module] = []  # of the whole model, in this micro-step

    @module.register_forward_pre_hook
    def begin(module: nn.Module, _inputs: Any) -> None:
        reduced.clear()  # of a backward that failed
        forwards.append(module)

    @in_place_of(optimizer, _REDUCE)
    def note_and_reduce(reduce: Call, parameter: Any, *group: int) -> None:
        reduced.add(id(parameter))
        reduce(parameter, *group)

    @in_place_of(optimizer, _END_BACKWARD)
    def reduce_zeros_and_end(end_backward: Call) -> None:
        refuse((
            is_split and not forwards,
            "ZeRO-3 trains only what the model's forward computes",
            "the loss calls a method or a part of the model alone, where DeepSpeed begins and ends no forward",
            "have forward do it, and call model(...); or use --zero-stage 2 or lower",
        ))  # fmt: skip
        for i, parameter in _trained(optimizer):
            if id(parameter) not in reduced:
                _give_gradient(optimizer, parameter)
                getattr(optimizer, _REDUCE)(parameter, *(() if is_split else (i,)))
        end_backward()
        reduced.clear()
        forwards.clear()


def check_once(optimizer: Any) -> None:
    """Have a step whose gradients are not finite change nothing, and search them once.

    DeepSpeed 0.19.8 leaves out a step without a finite norm, which it computes anyway, in fp64: so its search of each
    gradient at ZeRO-1 and 2, a dozen kernels a parameter, is left out, unless gradients are in host memory, where it is
    part of copying them. Before 0.19.8 only that search decides, and is not made in fp32, nor by ZeRO-3 in bf16.
    """
    norm_decides = hasattr(stage3, "is_invalid_grad_norm")
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        if not norm_decides:
            put(optimizer, "check_grad_overflow", True)
        elif not optimizer.cpu_offload:
            put(optimizer, "check_overflow", lambda partition_gradients: None)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) and not norm_decides:
        search_first = in_place_of(optimizer, "_overflow_check_and_loss_scale_update")
        search_first(lambda update: optimizer.check_overflow() or update())


def sum_in_few_kernels(optimizer: Any) -> None:
    """Have sums of gradients in fp32 take one kernel a parameter, where ZeRO-1 and 2 take five.

    DeepSpeed 0.19.8 makes a copy of a reduced gradient in fp32 and adds it, writes the gradient back into its bucket,
    where nothing reads it again, and takes the norm of each sum from a copy in fp64. Here a gradient is added as it is,
    which is the same sum, and the norm is that of pieces of all sums. Sums are one tensor from 0.19.8 on.

    After each step DeepSpeed also points every weight at its place in a flat tensor, where it is already: milliseconds
    in which the device waits.
    """
    is_of_stage = isinstance(optimizer, DeepSpeedZeroOptimizer) and hasattr(stage_1_and_2, "GradPartitionBufferGroup")
    if not is_of_stage or optimizer.dtype == torch.float32 or optimizer.gradient_accumulation_dtype != torch.float32:
        return
    places: dict[int, list[int]] = {}  # of the weights of a group, after the last step

    @in_place_of(optimizer, "get_grad_norm_direct")
    def take_norm(norm: Callable[..., Tensor], gradients: Any, parameters: list[Any]) -> Tensor:
        pieces = gradients.flat_partition.split(pieces_of_a_norm(gradients.flat_partition.numel()))
        return norm(pieces, parameters[:1] * len(pieces))  # of no parameters: 0

    @in_place_of(optimizer, "_update_model_bit16_weights")
    def point_if_moved(point: Call, group: int) -> None:
        weights = [optimizer.bit16_groups_flat[group], *optimizer.bit16_groups[group]]
        if places.get(group) != [each.data_ptr() for each in weights]:
            point(group)
            places[group] = [each.data_ptr() for each in weights]

    if not optimizer.overlap_comm:

        @in_place_of(optimizer, "allreduce_and_copy_with_multiple_ranks")
        def reduce_and_add(
            _theirs: Call,
            bucket: list[Tensor],
            dtype: torch.dtype,
            *,
            output_bucket: Any,
            bucket_ranks: Any,
            **how: Any,
        ) -> None:
            reduced = optimizer.unflatten(optimizer.allreduce_bucket(bucket, dtype, **how), bucket)
            for own, gradient in zip(output_bucket, reduced, strict=True):
                if own is not None:
                    own.add_(gradient)


def _trained(optimizer: Any) -> list[tuple[int, Any]]:
    """Return ZeRO's trained parameters with the number of their group."""
    groups = optimizer.fp16_groups if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) else optimizer.bit16_groups
    return [(i, parameter) for i, group in enumerate(groups) for parameter in group if parameter.requires_grad]


def _give_gradient(optimizer: Any, parameter: Any) -> None:
    """Make a gradient of zeros, unless there is one."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        at_rest = parameter.data  # torch compares the shapes of a gradient and its parameter when it is set
        parameter.data = torch.zeros(parameter.ds_shape, dtype=at_rest.dtype, device=at_rest.device)
        parameter.grad = parameter.data
        parameter.data = at_rest
    elif optimizer.get_gradient_for_reduction(parameter) is None:
        if optimizer.use_grad_accum_attribute:
            parameter.grad_accum = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype)
        else:
            parameter.grad = torch.zeros_like(parameter)


def reduce_in_order(optimizer: Any) -> int | None:
    """Make gradients of ZeRO-1 and 2 wait for the end of backward and be reduced in the model's order from now on.

    Where this rank has none of a parameter, it is zero. Returns the bytes that gradients take at most meanwhile; None
    where they are reduced so already, or it would not help.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or vars(optimizer).get(_REDUCE) is _leave_for_the_end:
        return None
    reduce = getattr(optimizer, _REDUCE)
    put(optimizer, _REDUCE, _leave_for_the_end)

    @in_place_of(optimizer, _END_BACKWARD)
    def reduce_and_end(end_backward: Call) -> None:
        for i, parameter in _trained(optimizer):
            _give_gradient(optimizer, parameter)
            reduce(parameter, i)
        end_backward()

    return sum(parameter.numel() * parameter.element_size() for _, parameter in _trained(optimizer))


def _leave_for_the_end(_parameter: Any, _group: int) -> None:
    """Reduce no gradient when it arrives."""


def announce(optimizer: Any, module: nn.Module) -> None:
    """Make collectives of DeepSpeed's `optimizer` name the parameters that they take; see `collectives.entering`."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _announce_stage_3(optimizer, module)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        own = {id(each): name for name, each in module.named_parameters()}  # also those without elements
        names = {optimizer.get_param_id(each): own[id(each)] for _, each in _trained(optimizer)}

        @in_place_of(optimizer, "average_tensor")
        def average_announced(average: Call, tensor: Tensor, communication_data_type: torch.dtype) -> None:
            numbers = [number for *_, number in optimizer.ipg_buckets[communication_data_type].params]
            with entering(_REDUCES, numbers, names.__getitem__):
                average(tensor, communication_data_type)


def _announce_stage_3(optimizer: Any, module: nn.Module) -> None:
    """Announce sets of parameters, not orders: DeepSpeed sorts the parameters of one collective."""
    names = {each.ds_id: name for name, each in module.named_parameters()}  # type: ignore[attr-defined]  # DeepSpeed's
    numbered = {name: each for name, each in module.named_modules() if hasattr(each, "ds_id")}  # not within one as one
    modules = {each.ds_id: name or type(each).__name__ for name, each in numbered.items()}

    @in_place_of(optimizer, "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads")
    def reduce_announced(reduce: Call, communication_data_type: torch.dtype) -> None:
        numbers = sorted(each.ds_id for each in optimizer.ipg_buckets[communication_data_type].params)
        with entering(_REDUCES, numbers, names.__getitem__):
            reduce(communication_data_type)

    coordinator = optimizer.parameter_offload.get_param_coordinator()

    @in_place_of(coordinator, "_PartitionedParameterCoordinator__all_gather_params")
    def gather_announced(gather: Call, parameters: set[Any], forward: bool) -> None:
        numbers = sorted(each.ds_id for each in parameters if each.ds_status == ZeroParamStatus.NOT_AVAILABLE)
        with entering("gathers", numbers, names.__getitem__):
            gather(parameters, forward)

    def compare_announced(ints: list[int]) -> None:
        with entering("has run modules in the order", ints, lambda number: modules.get(number, str(number))):
            _COMPARE(ints)

    put(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", compare_announced)


_COMPARE = partitioned_param_coordinator.assert_ints_same_as_other_ranks
