"""The DeepSpeed engine of a strategy, made and taken down."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init
from torch import Tensor, nn

from frugal.config.request import Request
from frugal.deepspeed_adapter import gradients, kernels, placement, refusals, stages
from frugal.deepspeed_adapter.json_config import batch_config, strategy_config
from frugal.imports import uncompiled
from frugal.planning.batch import BatchPlan
from frugal.planning.strategy import Strategy
from frugal.required import in_place_of


def initialize(
    model: nn.Module,
    request: Request,
    strategy: Strategy,
    batch: BatchPlan,
    *,
    learning_rate_schedule: Callable[[int], float] | None = None,
    votes: dist.ProcessGroup | None = None,
    make_optimizer: kernels.MakeOptimizer | None = None,
    groups: list[dict[str, Any]] | None = None,
) -> stages.Zero:
    """Return DeepSpeed's engine around `model`, which then has rank 0's weights on all ranks. Collective.

    `learning_rate_schedule`: a factor on the learning rate by the number of optimizer steps done. `votes`: a gloo group
    of all ranks; None: the usual one. `make_optimizer`: in place of the request's. `groups`: the trained parameters
    with settings of each group; None: all in one, with those of the request.

    Raises:
        RequestError: the device cannot do the precision, or its optimizer's library, a compiler or the disk is missing.
    """
    kernels.check_precision(request.precision)
    refusals.refuse(model, strategy.zero_stage)
    if kernels.uses_nvme(strategy):
        strategy = replace(strategy, nvme_path=str(kernels.own_nvme_folder(strategy, votes)))
    config = batch_config(batch) | strategy_config(request, strategy)
    optimizer = make_optimizer or kernels.ready_made(request, strategy)
    if make_optimizer is not None:
        config.pop("optimizer", None)
    dtype = kernels.DTYPES[request.precision]
    for parameter in model.parameters():
        if not placement.is_split(parameter):
            takes_dtype = parameter.is_floating_point() and (parameter.requires_grad or strategy.zero_stage == 3)
            parameter.data = (parameter.data.to(dtype) if takes_dtype else parameter.data).contiguous()
    if strategy.zero_stage == 3:
        _partition(model, config, dtype)
    scheduler: Any = (
        None
        if learning_rate_schedule is None
        else partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=learning_rate_schedule)
    )
    trainable: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _scalars_sent(), uncompiled():  # DeepSpeed's Muon, imported whatever the optimizer is, asks for compiling
        engine, _, _, schedule = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=groups or trainable, lr_scheduler=scheduler,
            config=config,
        )  # fmt: skip
    if strategy.offload_ratio < 1:
        kernels.mend_partial_offload(engine.optimizer)
    gradients.mend(engine.optimizer, model)
    gradients.check_once(engine.optimizer)
    gradients.sum_in_few_kernels(engine.optimizer)
    if strategy.zero_stage == 0:

        @in_place_of(engine, "clip_fp32_gradients")
        def clip_all(clip: Callable[[], None]) -> None:
            """Clip gradients without dimensions, too: DeepSpeed multiplies each by a vector of one element."""
            with placement.as_vectors([each.grad for each in model.parameters() if each.grad is not None]):
                clip()

    zero = stages.of(engine, strategy, schedule)
    refusals.refuse_while_running(zero)
    return zero


def destroy(zero: stages.Zero) -> None:
    """Free the engine's hooks and buffers and its files, so that another can follow in this process."""
    zero.destroy()
    if kernels.uses_nvme(zero.strategy):  # other ranks of the node may do the same
        shutil.rmtree(str(zero.strategy.nvme_path), ignore_errors=True)


def _scalars_sent() -> AbstractContextManager[Any]:
    """Make engines that are made in the `with` block also send parameters without dimensions to all ranks."""
    send = deepspeed.DeepSpeedEngine._broadcast_model

    def send_all(engine: deepspeed.DeepSpeedEngine) -> None:
        with placement.as_vectors(engine.module.parameters()):
            send(engine)

    return patch.object(deepspeed.DeepSpeedEngine, "_broadcast_model", send_all)


def _partition(model: nn.Module, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Split the parameters over the ranks one by one, so that no device ever holds the whole model.

    `deepspeed.initialize` alone would move all of it to every device first.
    """
    with placement.as_vectors(model.parameters()):
        placement.splitting(model, config, dtype)
    for module in model.modules():  # DeepSpeed leaves the buffers of a partitioned model where they are
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(get_accelerator().current_device_name())
    split: list[Any] = list(model.parameters())
    numbers = sorted(parameter.ds_id for parameter in split)
    for number, parameter in zip(numbers, split, strict=True):  # not in the order in which they were read
        parameter.ds_id = number


def told_of_arrivals(arrive: Callable[[Tensor], None]) -> AbstractContextManager[Any]:
    """Call `arrive` with each parameter that stage 3 brings to the device, before it splits it.

    For a pretended device, where the arrival of a tensor leaves no trace.
    """
    split = Init._zero_init_param

    def arrive_and_split(init: Init, parameter: nn.Parameter) -> None:
        arrive(parameter.data)
        split(init, parameter)

    return patch.object(Init, "_zero_init_param", arrive_and_split)
