"""Out of memory on any rank, without a hang and without a wrong gradient.

CUDA's allocator reports out-of-memory on the host, before the kernel is launched. So before each of DeepSpeed's
collectives all ranks vote (see `ballot`); a rank that failed votes "failed" instead of entering, and no rank enters.
Then every rank abandons what it accumulated, and the same global batch is run again in smaller micro-batches.

The optimizer step takes one vote more, between all that it allocates and the first weight it writes: see `update`.
After it ZeRO-3 gathers each persistent parameter by itself, hundreds of them; these take one vote together.

Left out: a failure inside a collective that all ranks have entered.
`abandon` resets private state of DeepSpeed 0.19.8; the tests compare weights bit by bit with undisturbed runs.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar

import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as dist

from frugal.distributed.vote import Vote
from frugal.training.oom_limits import OutOfMemory, OutOfMemoryReport, is_out_of_memory, report_of

T = TypeVar("T")
_COLLECTIVES = (
    "all_reduce", "inference_all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_base", "all_gather_coalesced", "all_to_all",
    "all_to_all_single",
)  # fmt: skip


class _PeerFailedError(Exception):
    """Another rank is out of memory."""


def clean() -> None:
    """Give back what is held for nobody: cycles of tensors, and the blocks that CUDA's allocator keeps for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def again_after_cleaning(work: Callable[[], T], is_safe: Callable[[], bool] = lambda: True) -> T:
    """What `work` returns, at the second attempt where memory ran out in the first and it `is_safe` to try again."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or not is_safe():
            raise
    clean()
    return work()


class Guard:
    """Lets all ranks fail together. One a process: it wraps DeepSpeed's communication backend.

    `group` is a gloo group of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.ballot = Vote(group)
        self._group = group
        self.watching = False
        self._is_agreed = False  # that the collectives which follow will be entered by all ranks
        self._votes_once = False
        backend = deepspeed_comm.cdb
        for name in _COLLECTIVES:
            if hasattr(backend, name):
                original = getattr(backend, name)
                setattr(backend, name, self._guarded(getattr(original, "__wrapped__", original)))

    def attempt(self, work: Callable[[], T]) -> T | OutOfMemory:
        """What `work` returns; on every rank the shortage, if any rank ran out of memory in it."""
        self.watching, own, told = True, None, False
        try:
            result = work()
        except _PeerFailedError:
            told = True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            own = report_of(error, dist.get_rank())
        finally:
            self.watching = False
        if not told and not self.ballot.any(own is not None):
            return result
        reports: list[OutOfMemoryReport | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own, group=self._group)
        return OutOfMemory(tuple(each for each in reports if each is not None))

    def agree(self) -> None:
        """Return on every rank, or where one ran out of memory on none: `attempt` ends."""
        if self.ballot.any(False):
            raise _PeerFailedError

    def with_one_vote(self, work: Callable[..., T]) -> Callable[..., T]:
        """`work`, with a vote before the first of its collectives alone: it allocates nothing between them."""

        @functools.wraps(work)
        def voting_once(*args: Any, **kwargs: Any) -> T:
            self._votes_once = True
            try:
                return work(*args, **kwargs)
            finally:
                self._votes_once = self._is_agreed = False

        return voting_once

    def _guarded(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self.watching or self._is_agreed:
                return collective(*args, **kwargs)
            self.agree()
            self._is_agreed = True
            try:
                return collective(*args, **kwargs)
            finally:
                self._is_agreed = self._votes_once

        return guarded


def abandon(engine: Any) -> None:
    """Reset a DeepSpeed engine to the state before the first micro-step of a global batch. No communication."""
    engine._running_engine_backward = False
    engine._running_engine_backward_count = 0
    engine._running_engine_step = False
    for parameter in engine.module.parameters():
        parameter.grad = None
        if hasattr(parameter, "grad_accum"):
            parameter.grad_accum = None
    optimizer = engine.optimizer
    _forget_backward_hooks(optimizer)
    _forget_buckets(optimizer)
    if hasattr(optimizer, "_release_ipg_buffers"):
        _abandon_zero12(optimizer)
    elif hasattr(optimizer, "parameter_offload"):
        _abandon_zero3(engine, optimizer)
    else:
        optimizer.zero_grad(set_to_none=True)
    clean()


def _forget_backward_hooks(optimizer: Any) -> None:
    from deepspeed.runtime.base_optimizer import BackwardHookStateManager

    state = getattr(optimizer, "_backward_hook_state", None)
    if state is not None:
        optimizer._backward_hook_state = BackwardHookStateManager()
        optimizer._backward_hook_state._grad_acc_post_hooks = state._grad_acc_post_hooks


def _forget_buckets(optimizer: Any) -> None:
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        if hasattr(bucket, "grads"):  # stages 1 and 2
            bucket.clear()
        else:  # stage 3 keeps its buffer
            bucket.clear_params()
    reduced = getattr(optimizer, "params_already_reduced", [])
    for key in reduced if isinstance(reduced, dict) else range(len(reduced)):
        reduced[key] = False


def _abandon_zero12(optimizer: Any) -> None:
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = -1
    optimizer.extra_large_param_to_reduce.clear()
    for gradients in optimizer.previous_reduced_grads.values():
        gradients.clear()
    for gathered in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for key in gathered:
            gathered[key] = None
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()
    else:
        for part in optimizer.single_partition_of_fp32_groups:
            part.grad = None


def _abandon_zero3(engine: Any, optimizer: Any) -> None:
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    optimizer.zero_grad(set_to_none=True)  # also resets the micro-step and the backward epilogue
    if not optimizer.offload_optimizer:
        optimizer.averaged_gradients = {}
        for part in optimizer.fp32_partitioned_groups_flat:
            part.grad = None
    if hasattr(optimizer, "_offload_boundary_param_ids"):
        optimizer._offload_boundary_param_ids = set()
    if hasattr(optimizer, "extra_large_param_to_reduce"):
        optimizer.extra_large_param_to_reduce = None
    for module in engine.module.modules():
        if hasattr(module._parameters, "_in_forward"):
            module._parameters._in_forward = False
        if hasattr(module, "ds_recompute_parameters"):
            module.ds_recompute_parameters.clear()
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    coordinator._PartitionedParameterCoordinator__active_backward_submodules.clear()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()  # also waits for gathers in flight
    in_flight = coordinator._PartitionedParameterCoordinator__inflight_param_registry
    for parameter in engine.module.parameters():
        if parameter.ds_status == ZeroParamStatus.INFLIGHT and parameter not in in_flight:
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # marked so before the vote that stopped the gather
    coordinator.release_and_reset_all(engine.module)
    coordinator._PartitionedParameterCoordinator__n_available_params = 0
    if hasattr(parameter_offload, "FWD_MODULE_STACK"):
        parameter_offload.FWD_MODULE_STACK.clear()
