"""DeepSpeed's ranks and its engine: the launcher's command line, the collectives, an engine made and taken down.

DeepSpeed is imported by who calls, not by who imports this: a parent that starts ranks need not wait for it.
"""

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import Init
from torch import Tensor, nn

from frugal.config.request import Request
from frugal.deepspeed_adapter import kernels, stages
from frugal.deepspeed_adapter.json_config import batch_config, strategy_config
from frugal.deepspeed_adapter.stages import Zero
from frugal.planning.batch import BatchPlan
from frugal.planning.strategy import Strategy
from frugal.required import put

RANK_FLAG = "--local_rank"
"""In the command line of each rank that the launcher starts, with `=` and the rank's number on its node behind it."""

ON_CPU = {"DS_ACCELERATOR": "cpu"}
"""In the environment of ranks whose device is the host."""

COLLECTIVES = (
    "all_reduce", "inference_all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_base", "all_gather_coalesced", "all_to_all",
    "all_to_all_single",
)  # fmt: skip
"""The backend's methods that training calls on all ranks at once; a test holds that there are no more."""

DIRECT = ("all_gather_function", "reduce_scatter_function")
"""What the backend calls of torch.distributed by names of its own."""

Collective = Callable[..., Any]


def launcher(
    world: Mapping[str, Sequence[int | str]], *flags: str, master_port: int, module: str, arguments: Sequence[str]
) -> list[str]:
    """The command that starts the ranks of one node: `module` with `arguments`, once for each of its devices.

    `world`: the devices of each node, by the node's name. `flags`: of the launcher, for more nodes than one.

    It is what `deepspeed` itself would start, without the seconds it takes to import DeepSpeed once more.
    """
    return [
        sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--log_level=critical",
        f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}", *flags,
        f"--master_port={master_port}", "--module", module, *arguments,
    ]  # fmt: skip


def init_distributed() -> None:
    """Make the process group that the environment describes, or stay in the one there is. Collective.

    Without DeepSpeed's shared-memory kernel for CPU ranks, which costs more than it saves: it is compiled when first
    used, a process killed while loading it leaves a lock that later runs wait on for ever, and its buffers (66 MiB a
    rank) stay in /dev/shm after the run. gloo does the same sums.
    """
    import deepspeed

    # Not `deepspeed.comm.torch.build_shm_op`: that attribute is torch itself.
    put(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)
    deepspeed.init_distributed(auto_mpi_discovery=False)


def timeout_seconds() -> float:
    """How long a rank waits for the others before it gives up."""
    from deepspeed.constants import default_pg_timeout

    return float(default_pg_timeout.total_seconds())


def backend() -> Any:
    """What DeepSpeed's collectives are methods of, one a process."""
    import deepspeed.comm.comm as deepspeed_comm

    assert deepspeed_comm.cdb is not None, "there is no process group yet"
    return deepspeed_comm.cdb


def guard(guarded: Callable[[Collective], Collective]) -> None:
    """Have the process's collectives go through what `guarded` makes of each, instead of an earlier guard."""
    for name in COLLECTIVES:
        vars(backend()).pop(name, None)  # an earlier one's, in front of the class's method
        put(backend(), name, guarded(getattr(backend(), name)))


def initialize(
    model: nn.Module,
    request: Request,
    strategy: Strategy,
    batch: BatchPlan,
    *,
    learning_rate_schedule: Callable[[int], float] | None = None,
    votes: dist.ProcessGroup | None = None,
) -> Zero:
    """DeepSpeed's engine around `model`, which has rank 0's weights on all ranks then. Collective.

    `learning_rate_schedule`: a factor on the learning rate by the number of optimizer steps done. `votes`: a gloo group
    of all ranks; None: the usual one.

    Raises:
        RequestError: the device cannot do the precision, or its optimizer's library, a compiler or the disk is missing.
    """
    kernels.check_precision(request.precision)
    if kernels.uses_nvme(strategy):
        strategy = replace(strategy, nvme_path=str(kernels.own_nvme_folder(strategy, votes)))
    config = batch_config(batch) | strategy_config(request, strategy)
    kernels.leave_muon_uncompiled()
    optimizer = kernels.ready_made(request, strategy)
    if strategy.zero_stage == 3:
        _partition(model, config, kernels.DTYPES[request.precision])
    scheduler = None
    if learning_rate_schedule is not None:

        def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_schedule)

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=trainable, lr_scheduler=scheduler, config=config
    )
    return stages.of(engine, strategy)


def destroy(zero: Zero) -> None:
    """Free the engine's hooks and buffers and its files, so that another can follow in this process."""
    zero.destroy()
    if kernels.uses_nvme(zero.strategy):
        kernels.remove_nvme_folder(zero.strategy)


def _partition(model: nn.Module, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Split the parameters over the ranks one by one, so that no device ever holds the whole model.

    `deepspeed.initialize` alone would move all of it to every device first.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    zero = Init(module=model, config_dict_or_path=config, dtype=dtype)
    for module in model.modules():  # DeepSpeed leaves the buffers of a partitioned model where they are
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(zero.local_device)


@contextmanager
def told_of_arrivals(arrive: Callable[[Tensor], None]) -> Iterator[None]:
    """`arrive` is called with each parameter that stage 3 brings to the device, before it splits it.

    For a device that is pretended, where nothing shows that a tensor came.
    """
    split = Init._zero_init_param

    def arrive_and_split(init: Init, parameter: nn.Parameter) -> None:
        arrive(parameter.data)
        split(init, parameter)

    with patch.object(Init, "_zero_init_param", arrive_and_split):
        yield
