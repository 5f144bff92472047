"""The names of DeepSpeed that frugal needs, in a table that is checked before training and before dry runs.

`python -m frugal.deepspeed_adapter.contract` prints the differences of the installed DeepSpeed: names, and sources of
functions that ours repeat (`frugal.deepspeed_adapter.simulate.mirrored`): where an upgrade begins, see
`make contract`.
"""

import functools
import sys
from importlib.metadata import version
from pathlib import Path

from frugal import required
from frugal.deepspeed_adapter.simulate import mirrored
from frugal.required import needed

_RUNTIME = "deepspeed.runtime"
_ENGINE = f"{_RUNTIME}.engine:DeepSpeedEngine"
_ZERO12 = f"{_RUNTIME}.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ZERO3 = f"{_RUNTIME}.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_COORDINATOR = f"{_RUNTIME}.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
_OFFLOAD = f"{_RUNTIME}.zero.parameter_offload"
_SPLITTING = f"{_RUNTIME}.zero.partition_parameters"
_RESET = "reset after out of memory"
_OWN = "no gradient of another step, or of another parameter"
_LAYOUT = "where states lie, for checkpoints"
_SPLIT = "a parameter that is split"
_DEVICE = "a pretended device"
_AT_ONCE = "no loops over ranks in dry runs"

NAMES = (
    # An engine, from its beginning to its end
    *needed(_ENGINE, "one global batch", "destroy(self)"),
    *needed(_ZERO12, "the norm is read before the update", "_global_grad_norm"),
    *needed(_ZERO3, "the norm is read before the update", "_global_grad_norm"),
    *needed(_ENGINE, "in checkpoints, and counted on by steps that are left out", "global_steps", "skipped_steps"),
    *needed(
        _ENGINE,
        "parameters without dimensions are sent to all ranks, too",
        "_broadcast_model(self)",
        "clip_fp32_gradients(self)",
    ),
    *needed(
        _ENGINE, "a gradient of the model's output is refused", "_backward_prologue(self)", "_running_engine_backward"
    ),
    *needed("deepspeed.utils.torch", "transforms of torch.func are refused", "is_functorch_transforming()"),
    *needed(
        f"{_OFFLOAD}:DeepSpeedZeRoOffload",
        "uses of a module that ZeRO-3 cannot differentiate are refused",
        "pre_sub_module_forward_function(self, sub_module)",
        "pre_sub_module_backward_function(self, sub_module)",
    ),
    *needed(_OFFLOAD, "finds tensors in objects that modules return", "apply_to_tensors_only(function, value)"),
    *needed(
        f"{_RUNTIME}.fp16.unfused_optimizer:FP16_UnfusedOptimizer",
        "stage 0 in half precision, in dry runs",
        "optimizer",
    ),
    # Collectives: ranks vote before each
    *needed("deepspeed.comm.comm", "the object that all collectives go through", "cdb"),
    *needed("deepspeed.comm.torch", "a kernel that would be compiled", "build_shm_op()"),
    *needed(
        "deepspeed.comm.torch:TorchBackend",
        "ranks vote before what takes it",
        "all_reduce:async_op",
    ),
    *needed(
        "deepspeed.comm.torch:TorchBackend",
        "waited for where memory is measured",
        "all_gather_function",
        "reduce_scatter_function",
    ),
    # Back to the state before a global batch that ran out of memory
    *needed(_OFFLOAD, _RESET, "FWD_MODULE_STACK"),
    *needed(_SPLITTING, _RESET, "_init_external_params:_external_params"),
    *needed(_COORDINATOR, _RESET, "reset_step(self)"),
    *needed(
        "deepspeed.utils",
        "modules within gather nothing themselves",
        "z3_leaf_module(model)",
        "set_z3_leaf_module(model, flag)",
    ),
    *needed(f"{_RUNTIME}.zero.stage3", "gradients in a tiled MLP are reduced when they are whole", "z3_leaf_parameter"),
    *needed(
        f"{_RUNTIME}.zero.parameter_offload:DeepSpeedZeRoOffload",
        "gradients in a tiled MLP are reduced when they are whole",
        "_register_deepspeed_module:ds_z3_leaf_module",
    ),
    # Gradients: the sum over this global batch, and none of an earlier one
    *needed(
        _ZERO3,
        _OWN,
        "ipg_buckets",
        "parameter_offload",
        "independent_gradient_partition_epilogue(self)",
        "reduce_ready_partitions_and_remove_grads(self, param)",
        "__reduce_and_partition_ipg_grads(self, communication_data_type)",
    ),
    *needed(_COORDINATOR, _OWN, "__all_gather_params(self, params, forward)"),
    *needed(f"{_OFFLOAD}:DeepSpeedZeRoOffload", _OWN, "get_param_coordinator(self)"),
    *needed(f"{_RUNTIME}.zero.stage3:IPGBucketZ3", _OWN, "params"),
    *needed(f"{_RUNTIME}.zero.stage_1_and_2:IPGBucket", _OWN, "params"),
    *needed(
        _ZERO12,
        _OWN,
        "ipg_buckets",
        "average_tensor(self, tensor, communication_data_type)",
        "independent_gradient_partition_epilogue(self)",
        "reduce_ready_partitions_and_remove_grads(self, param, i)",
        "get_gradient_for_reduction(self, param)",
        "use_grad_accum_attribute",
        "gradient_accumulation_dtype",
        "overlap_comm",
        "cpu_offload",
        "get_param_id(self, param)",
    ),
    *needed(f"{_SPLITTING}:ZeroParamStatus", _SPLIT, "NOT_AVAILABLE", "AVAILABLE"),
    # The optimizer step: ranks vote before it writes weights
    *needed(
        _ZERO3,
        "one vote before small parameters are gathered",
        "_post_step(self, timer_names)",
        "optimizer",
    ),
    *needed(_ZERO12, "torch's own is inside", "optimizer"),
    *needed(
        _ZERO12,
        "gradients are checked once, by their norm",
        "check_overflow(self, partition_gradients)",
        "check_grad_overflow",
    ),
    *needed(
        _ZERO12,
        "gradients are summed by few kernels",
        "dtype",
        "get_grad_norm_direct(self, gradients, params)",
        "allreduce_and_copy_with_multiple_ranks(self, small_bucket, communication_data_type)",
        "allreduce_bucket(self, bucket, communication_data_type)",
        "unflatten",
    ),
    *needed(
        _ZERO12,
        "less Python after a step",
        "_update_model_bit16_weights(self, group_index)",
        "bit16_groups_flat",
    ),
    *needed(_ZERO3, "the same before 0.19.8", "check_overflow(self)", "_overflow_check_and_loss_scale_update(self)"),
    *needed(_ZERO12, "half precision is averaged right under ZeRO-2, see deepspeed#8224", "gradient_average"),
    *needed(
        _ZERO3,
        "torch's AdamW for a part of the sub-groups, beside the host's",
        "backup_optimizer",
    ),
    # Checkpoints: places of states, and files
    *needed(_ZERO12, _LAYOUT, "bit16_groups", "_hp_optimizer_states_linked", "single_partition_of_fp32_groups"),
    *needed(_ZERO3, _LAYOUT, "fp16_groups", "fp32_partitioned_groups_flat"),
    *needed(
        f"{_SPLITTING}:Init",
        _SPLIT,
        "_convert_to_deepspeed_param:ds_numel",
        "_convert_to_deepspeed_param:ds_status",
        "_convert_to_deepspeed_param:partition",
    ),
    *needed(
        "deepspeed.checkpoint.constants",
        "keys in a file of states",
        "OPTIMIZER_STATE_DICT = 'optimizer_state_dict'",
        "BASE_OPTIMIZER_STATE = 'base_optimizer_state'",
        "FP32_FLAT_GROUPS = 'fp32_flat_groups'",
        "FROZEN_PARAM_FRAGMENTS = 'frozen_param_fragments'",
        "SINGLE_PARTITION_OF_FP32_GROUPS = 'single_partition_of_fp32_groups'",
        "LOSS_SCALER = 'loss_scaler'",
    ),
    *needed(f"{_RUNTIME}.fp16.loss_scaler", "in every file of states", "DynamicLossScaler", "LossScaler"),
    *needed(f"{_RUNTIME}.zero.config", "in every file of states", "ZeroStageEnum"),
    *needed("deepspeed.utils.tensor_fragment", "in files of states", "fragment_address"),
    *needed(
        _ENGINE,
        "reads and writes files of states",
        "checkpoint_engine",
        "_copy_recovery_script(self, save_path)",
    ),
    # Dry runs: the pretended device
    *needed("deepspeed.accelerator.cpu_accelerator:CPU_Accelerator", _DEVICE, "_name"),
    *needed("deepspeed.utils.groups", "process groups are put back", "_WORLD_GROUP"),
    *needed(_COORDINATOR.partition(":")[0], "there are no other ranks", "assert_ints_same_as_other_ranks(ints)"),
    *needed("deepspeed.utils.nvtx", "asks torch.compile at every call", "enable_nvtx"),
    *needed("deepspeed.ops.adam.fused_adam", "stands for a kernel", "FusedAdamBuilder"),
    *needed("deepspeed.ops.adam.cpu_adam", "stands for a kernel", "CPUAdamBuilder"),
    *needed(f"{_RUNTIME}.swap_tensor.partitioned_optimizer_swapper", "stands for disks", "AsyncIOBuilder"),
    *needed(f"{_RUNTIME}.swap_tensor.partitioned_param_swapper", "stands for disks", "AsyncIOBuilder"),
    # Loading: parameters are split as they are read
    *needed(
        f"{_SPLITTING}:Init",
        "parameters are split as they are read",
        "_convert_to_deepspeed_param(self, param)",
        "_convert_to_deepspeed_param:ds_id",
        "_zero_init_param(self, param)",
    ),
    *needed(f"{_RUNTIME}.zero.utils", "traces for ZeRO-3 have its graph", "apply_to_tensors_only(function, value)"),
    *needed(f"{_RUNTIME}.zero.linear", "traces for ZeRO-3 have its graph", "zero3_linear_wrap(input, weight, bias)"),
    *needed(
        f"{_SPLITTING}:AllGatherCoalescedHandle",
        _AT_ONCE,
        "wait(self, handle_dependency)",
        "complete",
        "params",
        "partitions",
    ),
    *needed(f"{_RUNTIME}.zero.stage3", _AT_ONCE, "reduce_scatter_coalesced(tensors, group)"),
    *needed(f"{_RUNTIME}.engine", "simulated", "MEMORY_OPT_ALLREDUCE_SIZE = 500000000"),
)
"""Every name of DeepSpeed that may go with any release and that this package uses, and why."""

PUBLIC = (
    *needed("deepspeed", "makes the engine and its process group", "initialize", "init_distributed"),
    *needed("deepspeed", "an engine of a user's own loop", "DeepSpeedEngine"),
    *needed("deepspeed", "parameters are split one by one, and gathered again", "zero.Init", "zero.GatheredParameters"),
    *needed(
        _ENGINE,
        "one global batch, and checkpoints",
        "backward(self, loss, retain_graph, scale_wrt_gas)",
        "step(self, lr_kwargs)",
        "set_gradient_accumulation_boundary(self, is_boundary)",
        "empty_partition_cache(self)",
        "_set_client_model:module",
        "device",
        "global_samples",
        "optimizer",
        "save_checkpoint(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)",
        "load_checkpoint",
    ),
    *needed(f"{_RUNTIME}.zero.utils", "which parameters are split", "is_zero_param(parameter)"),
    *needed(
        f"{_SPLITTING}:Init", _SPLIT, "_convert_to_deepspeed_param:ds_shape", "_convert_to_deepspeed_param:ds_tensor"
    ),
    *needed("deepspeed.ops.adam", "they count steps in an int", "FusedAdam", "DeepSpeedCPUAdam"),
    *needed("deepspeed.comm", "collectives of torch.distributed", "all_to_all_single", "get_rank", "get_world_size"),
    *needed("deepspeed.accelerator", "the device", "get_accelerator()"),
    *needed("deepspeed.accelerator.real_accelerator", _DEVICE, "get_accelerator()", "set_accelerator(accel_obj)"),
    *needed(
        "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator",
        "the device's abilities",
        "create_op_builder(self, class_name)",
        "device_name(self, device_index)",
        "is_bf16_supported(self)",
        "is_fp16_supported(self)",
        "synchronize(self, device_index)",
    ),
    *needed(
        "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator",
        _DEVICE,
        "device_name(self, device_index)",
        "communication_backend_name(self)",
        "current_device(self)",
        "current_device_name(self)",
        "device_count(self)",
        "available_memory(self, device_index)",
        "total_memory(self, device_index)",
        "is_fp16_supported(self)",
        "is_pinned(self, tensor)",
        "pin_memory(self, tensor)",
        "stream(self, stream)",
        "on_accelerator(self, tensor)",
    ),
    *needed(
        f"{_RUNTIME}.checkpoint_engine.checkpoint_engine:CheckpointEngine",
        "ours remembers failures, for a vote",
        "create(self, info)",
        "save(self, state_dict, path)",
        "makedirs(self, path, exist_ok)",
        "load(self, path, map_location)",
        "commit(self, info)",
    ),
)
"""Names that DeepSpeed documents, or leaves to others to implement: expected to stay, and checked all the same.

https://deepspeed.readthedocs.io and https://www.deepspeed.ai/tutorials: accelerator-abstraction-interface; monitor
(`global_samples`), cifar-10 (`device`), inference-tutorial (`module`).
"""


@functools.cache  # some 60 ms, once a process
def verify() -> None:
    """Refuse a DeepSpeed that lacks a name in the tables.

    Raises:
        RequestError: it lists the missing names.
    """
    required.verify("deepspeed", (*NAMES, *PUBLIC), title="DeepSpeed")


def main(arguments: list[str]) -> int:
    """Print the differences, and return 1 if names are missing; of changed sources none is simulated.

    `arguments`: the folder of the DeepSpeed that was tested, to show how sources differ from it; or nothing.
    """
    gaps = required.missing((*NAMES, *PUBLIC))
    changes = list(mirrored.changes(mirrored.package_folder(), *map(Path, arguments)))
    lines = [
        f"DeepSpeed {version('deepspeed')}; tested: {', '.join(required.TESTED['deepspeed'])}",
        f"{len(gaps)} names are missing",
        *gaps,
    ]
    lines += [f"{len(changes)} sources changed", *changes]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(gaps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
