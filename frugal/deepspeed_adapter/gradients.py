"""Gradients between backward and the optimizer step, where DeepSpeed 0.19.8 assumes that each parameter has one.

A parameter without a gradient is updated with the wrong one:

- ZeRO-3 keeps reduced gradients in buffers that the first micro-step overwrites and later ones add to, and hands all of
  them to the optimizer. A parameter that the first micro-step does not use keeps an earlier step's.
- An optimizer in host memory gets a gradient only in the last micro-step, and only of parameters used in it. Others
  keep an earlier step's there, and lose the gradients of earlier micro-steps. At ZeRO 1 and 2 their sum continues.

And gradients of different parameters meet: ZeRO-2 reduces a bucket when it is full, in the order in which gradients
arrive, so where micro-batches use other parameters, or in another order, ranks add up gradients of different ones.
`announce` makes each collective name the parameters it takes, so that ranks can compare before they enter it;
`reduce_in_order` makes them reduce all gradients in one order, at the end of backward.

`mend` makes them the sum over the micro-steps of this global batch, and zero where there is none, for every caller of
the engine: our own step, a recovery, transformers' Trainer. It takes no memory and writes nothing where all are used.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from frugal.deepspeed_adapter.collectives import entering
from frugal.required import in_place_of, put

_END_BACKWARD, _REDUCE = "independent_gradient_partition_epilogue", "reduce_ready_partitions_and_remove_grads"
_REDUCES = "reduces gradients of"

Call = Callable[..., None]


def mend(optimizer: Any) -> None:
    """Make DeepSpeed's `optimizer` update parameters with this global batch's gradients alone."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _mend_stage_3(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        if optimizer.cpu_offload:
            _mend_host_optimizer(optimizer)
        if optimizer.overlap_comm and not optimizer.partition_gradients:
            _mend_overlapped_stage_1(optimizer)


def _mend_stage_3(optimizer: Any) -> None:
    parts = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition

    @in_place_of(optimizer, _END_BACKWARD)
    def zero_unused_after_backward(end_backward: Call) -> None:
        end_backward()
        if optimizer.micro_step_id == 0:  # has overwritten what it used
            for number in parts.keys() - optimizer._offload_boundary_param_ids:  # kept without offloading, too
                parts[number].zero_()

    @in_place_of(optimizer, "_pre_step")
    def send_rest_and_begin_step(begin_step: Call) -> None:
        """Give the host's or the disk's optimizer what the last micro-step did not send; one at a time."""
        unsent = [each for group in optimizer.fp16_groups for each in group] if optimizer.offload_optimizer else []
        for parameter in unsent:
            if optimizer.get_param_id(parameter) not in optimizer.norm_for_param_grads:
                gradients: dict[int, list[Tensor]] = {}
                offsets: dict[int, list[int]] = {}
                on_device = parts[parameter.ds_id].to(get_accelerator().current_device_name())
                optimizer._offload_grad_partition_at_boundary(parameter, on_device, gradients, offsets)
                optimizer._swap_out_offload_fp32_gradients(gradients, offsets)
        begin_step()


def _mend_host_optimizer(optimizer: Any) -> None:
    @in_place_of(optimizer, "async_accumulate_grad_in_cpu_via_gpu")
    def add_to_this_batch(add: Call, parameter: Any) -> None:
        number = optimizer.get_param_id(parameter)
        summed = optimizer.accumulated_grads_in_cpu
        is_first = number not in optimizer._offload_accumulated_param_ids
        if optimizer.micro_step_id > 0 and is_first and number in summed:
            summed[number].zero_()
        add(parameter)

    @in_place_of(optimizer, "step")
    def send_rest_and_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        used, unsent = optimizer._offload_accumulated_param_ids, set()
        for flat, parameters in zip(
            optimizer.single_partition_of_fp32_groups, optimizer.params_in_partition, strict=True
        ):
            for number in map(optimizer.get_param_id, parameters):
                if number in optimizer.norm_for_param_grads:
                    continue
                if number in used:
                    unsent.add(number)
                else:
                    _, _, first, length = optimizer.grad_position[number]
                    flat.grad.view(-1).narrow(0, first, length).zero_()
        if unsent:
            put(optimizer, "_offload_accumulated_param_ids", unsent)
            optimizer._finalize_cpu_offload_gradient_accumulation()
        return step(*args, **kwargs)


def _mend_overlapped_stage_1(optimizer: Any) -> None:
    @in_place_of(optimizer, _END_BACKWARD)
    def reduce_rest_and_end(end_backward: Call) -> None:
        """Reduce also gradients that only earlier micro-steps produced: the last one's hooks reduce."""
        waiting = {number for bucket in optimizer.ipg_buckets.values() for *_, number in bucket.params}
        for i, parameter in _trained(optimizer):
            number = optimizer.get_param_id(parameter)
            is_reduced = number in waiting or optimizer.params_already_reduced[number]
            if not is_reduced and optimizer.get_gradient_for_reduction(parameter) is not None:
                optimizer.reduce_ready_partitions_and_remove_grads(parameter, i)
        end_backward()


def reduce_in_order(optimizer: Any) -> int | None:
    """Make gradients of ZeRO-1 and 2 wait for the end of backward and be reduced in the model's order from now on.

    Where this rank has none of a parameter, it is zero. Returns the bytes that gradients take at most meanwhile; None
    where they are reduced so already, or it would not help.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or _REDUCE in vars(optimizer):
        return None
    reduce = getattr(optimizer, _REDUCE)
    put(optimizer, _REDUCE, lambda parameter, i: None)

    @in_place_of(optimizer, _END_BACKWARD)
    def reduce_and_end(end_backward: Call) -> None:
        for i, parameter in _trained(optimizer):
            if optimizer.get_gradient_for_reduction(parameter) is None:
                if optimizer.use_grad_accum_attribute:
                    parameter.grad_accum = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype)
                else:
                    parameter.grad = torch.zeros_like(parameter)
            reduce(parameter, i)
        end_backward()

    return sum(parameter.numel() * parameter.element_size() for _, parameter in _trained(optimizer))


def _trained(optimizer: Any) -> list[tuple[int, Any]]:
    """Return ZeRO-1's or 2's parameters with the number of their group."""
    return [(i, parameter) for i, group in enumerate(optimizer.bit16_groups) for parameter in group]


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
