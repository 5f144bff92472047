"""A plan in DeepSpeed's spelling, which only this module knows.

Keys and defaults are those of DeepSpeed 0.19.8. Every size is explicit: DeepSpeed's own default for
`reduce_bucket_size` reserves 1 to 2 GB on every rank.

A plan on disk: `plan.json`, which is everything, and `ds_config.json`, its print-out for DeepSpeed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frugal import file_errors, files
from frugal.config.request import Request
from frugal.planning.batch import BatchPlan
from frugal.planning.plan import Plan
from frugal.planning.strategy import Strategy, optimizer_implementation

MICRO_BATCH = "train_micro_batch_size_per_gpu"

NVME_OPTIMIZER_BUFFERS = 4
"""Each holds the largest sub-group in fp32: master weight, gradient and both moments are on the host at once."""

NVME_PARAMETER_BUFFERS = 5
"""DeepSpeed's own number: the parameters of a module, and those of the next ones."""

_AIO = {
    "block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True,
}  # fmt: skip
"""DeepSpeed's own numbers."""


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a plan."""
    return batch_config(plan.batch) | strategy_config(plan.request, plan.strategy)


def batch_config(batch: BatchPlan) -> dict[str, Any]:
    """Return the batch's keys.

    Where the global batch does not divide, the three keys state the capacity of the micro-batches, because DeepSpeed
    insists on `micro x accumulation x world = batch`; frugal's engine runs the planned sizes themselves. DeepSpeed does
    not know of ranks that share samples: its averages over all ranks make their sums exact.
    """
    return {
        "train_batch_size": batch.capacity * batch.sequence_parallel,
        MICRO_BATCH: batch.largest_micro_batch,
        "gradient_accumulation_steps": batch.accumulation_steps,
    }


def strategy_config(request: Request, strategy: Strategy) -> dict[str, Any]:
    """Return all keys but the batch's."""
    optimizer = _optimizer(request, strategy)
    config: dict[str, Any] = {
        **({} if optimizer is None else {"optimizer": optimizer}),
        "gradient_clipping": request.gradient_clipping,
        "zero_optimization": _zero(strategy),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"aio": _AIO} if "nvme" in (strategy.offload_optimizer, strategy.offload_parameters) else {}),
        "steps_per_print": 1_000_000_000,  # frugal writes the log
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it waits for the device twice a step
    }
    if request.precision != "fp32":
        in_bf16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        config[request.precision] = {"enabled": True, **(in_bf16 if request.optimizer.states == "bf16" else {})}
        config["data_types"] = {"grad_accum_dtype": strategy.gradient_accumulation_dtype}
    return config


def _optimizer(request: Request, strategy: Strategy) -> dict[str, Any] | None:
    """Return the optimizer's block; None if DeepSpeed does not know it by name, and training passes it ready made.

    `torch_adam` keeps DeepSpeed from putting its own kernels in place of torch's. Without it the same type is its
    FusedAdam, and DeepSpeedCPUAdam where the optimizer is offloaded.
    """
    kernels = optimizer_implementation(request, strategy)
    how = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}.get(str(kernels), {})
    common = {"lr": request.scaled_learning_rate, "weight_decay": request.weight_decay}
    if request.optimizer.name == "adamw":
        torchs = {} if kernels == "deepspeed" else {"torch_adam": True, **how}
        return {
            "type": "AdamW",
            "params": {
                "lr": request.scaled_learning_rate,
                "betas": list(request.optimizer.betas),
                "eps": request.optimizer.epsilon,
                "weight_decay": request.weight_decay,
                **torchs,
            },
        }
    if request.optimizer.name == "sgd":
        momentum = {"momentum": request.optimizer.momentum} if request.optimizer.momentum else {}
        return {"type": "SGD", "params": {**common, **momentum, **how}}
    return None


def _zero(strategy: Strategy) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": strategy.zero_stage}
    if strategy.zero_stage == 0:
        return zero
    zero |= {
        "overlap_comm": strategy.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": strategy.reduce_bucket_elements,
        "allgather_bucket_size": strategy.reduce_bucket_elements + strategy.reduce_bucket_elements % 2,  # else refused
    }
    if strategy.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": strategy.prefetch_bucket_elements,
            "stage3_max_live_parameters": strategy.max_live_elements,
            "stage3_max_reuse_distance": strategy.max_live_elements,
            "stage3_param_persistence_threshold": strategy.persistence_threshold_elements,
            "sub_group_size": strategy.sub_group_elements,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    on_disk = {"device": "nvme", "nvme_path": strategy.nvme_path, "pin_memory": True}
    optimizer_buffers = {"buffer_count": NVME_OPTIMIZER_BUFFERS}
    parameter_buffers = {
        "buffer_count": NVME_PARAMETER_BUFFERS, "buffer_size": strategy.nvme_buffer_elements, "max_in_cpu": 0,
    }  # fmt: skip
    for name, place, buffers in (
        ("offload_optimizer", strategy.offload_optimizer, optimizer_buffers),
        ("offload_param", strategy.offload_parameters, parameter_buffers),
    ):
        if place != "none":
            zero[name] = on_disk | buffers if place == "nvme" else {"device": "cpu", "pin_memory": True}
    if strategy.offload_ratio < 1:
        zero["offload_optimizer"]["ratio"] = strategy.offload_ratio
    return zero


def write_plan(plan: Plan, folder: Path) -> tuple[Path, Path]:
    """Write both files, each of them atomically, and return their paths. Makes the folder.

    Raises:
        RequestError: they cannot be written: no space left, no permission.
    """
    plan_path, config_path = write_files(folder, plan_files(plan))
    return plan_path, config_path


def plan_files(plan: Plan) -> dict[str, bytes]:
    """Return the texts of both files, by name."""
    config = json.dumps(deepspeed_config(plan), indent=2).encode() + b"\n"
    return {"plan.json": plan.to_json(), "ds_config.json": config}


def write_files(folder: Path, texts: Mapping[str, bytes]) -> tuple[Path, ...]:
    """Write files by name, each of them atomically, and return their paths. Makes the folder.

    Raises:
        RequestError: as `write_plan`.
    """
    written = tuple(folder / name for name in texts)
    with file_errors.failure(f"cannot write {folder}", folder, "{}, or choose another folder with -o"):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(written, texts.values(), strict=True):
            files.write_file(path, text)
    return written
