"""Gradients from backward to the optimizer step, where DeepSpeed 0.19.8 takes for granted that each parameter has one.

What a parameter without a gradient is updated with:

- ZeRO-3 keeps reduced gradients in buffers that the first micro-step overwrites and later ones add to, and hands all of
  them to the optimizer. A parameter that the first micro-step does not use keeps an earlier step's.
- An optimizer in host memory gets a gradient only in the last micro-step, and only of parameters used in it. Others
  keep an earlier step's there, and lose what earlier micro-steps found. At ZeRO 1 and 2 their sum goes on, too.

`mend` makes them the sum over the micro-steps of this global batch, and zero where there is none, whoever calls the
engine: our own step, a recovery, transformers' Trainer. It takes no memory and writes nothing where all are used.
"""

from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from frugal.required import put


def mend(optimizer: Any) -> None:
    """Have what `optimizer`, DeepSpeed's, updates parameters with be this global batch's gradients alone."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _mend_stage_3(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.cpu_offload:
        _mend_host_optimizer(optimizer)


def _mend_stage_3(optimizer: Any) -> None:
    parts = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    end_backward, begin_step = optimizer.independent_gradient_partition_epilogue, optimizer._pre_step

    def zero_unused_after_backward() -> None:
        end_backward()
        if optimizer.micro_step_id == 0:  # has overwritten what it used
            for number in parts.keys() - optimizer._offload_boundary_param_ids:  # kept without offloading, too
                parts[number].zero_()

    def send_rest_and_begin_step() -> None:
        if optimizer.offload_optimizer:
            for parameter in (each for group in optimizer.fp16_groups for each in group):
                if optimizer.get_param_id(parameter) not in optimizer.norm_for_param_grads:
                    _send_to_host(optimizer, parameter, parts[parameter.ds_id])
        begin_step()

    put(optimizer, "independent_gradient_partition_epilogue", zero_unused_after_backward)
    put(optimizer, "_pre_step", send_rest_and_begin_step)


def _send_to_host(optimizer: Any, parameter: Any, part: Tensor) -> None:
    """Give the host's or the disk's optimizer a gradient that the last micro-step did not send; one at a time."""
    gradients: dict[int, list[Tensor]] = {}
    offsets: dict[int, list[int]] = {}
    on_device = part.to(get_accelerator().current_device_name())
    optimizer._offload_grad_partition_at_boundary(parameter, on_device, gradients, offsets)
    optimizer._swap_out_offload_fp32_gradients(gradients, offsets)


def _mend_host_optimizer(optimizer: Any) -> None:
    add, step = optimizer.async_accumulate_grad_in_cpu_via_gpu, optimizer.step

    def add_to_this_batch(parameter: Any) -> None:
        number = optimizer.get_param_id(parameter)
        summed = optimizer.accumulated_grads_in_cpu
        is_first = number not in optimizer._offload_accumulated_param_ids
        if optimizer.micro_step_id > 0 and is_first and number in summed:
            summed[number].zero_()
        add(parameter)

    def send_rest_and_step(*args: Any, **kwargs: Any) -> Any:
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

    put(optimizer, "async_accumulate_grad_in_cpu_via_gpu", add_to_this_batch)
    put(optimizer, "step", send_rest_and_step)
