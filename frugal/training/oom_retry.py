"""Out of memory on any rank, without a hang and without a wrong gradient.

CUDA's allocator reports out-of-memory on the host, before the kernel is launched. So before each of DeepSpeed's
collectives all ranks vote (`frugal.distributed.vote`); a rank that failed votes "failed" instead of entering, and no
rank enters.
Then every rank abandons what it accumulated, and the same global batch is run again in smaller micro-batches.

The optimizer step takes one vote more, between all that it allocates and the first weight it writes: see `update`.
After it ZeRO-3 gathers each persistent parameter by itself, hundreds of them; these take one vote together.

Left out: a failure inside a collective that all ranks have entered.
The tests compare weights bit by bit with undisturbed runs.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from frugal.deepspeed_adapter import collectives
from frugal.deepspeed_adapter.stages import Zero
from frugal.distributed.vote import Vote
from frugal.training.oom_limits import OutOfMemory, OutOfMemoryReport, is_out_of_memory, report_of

T = TypeVar("T")


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
        self.vote = Vote(group)
        self._group = group
        self.watching = False
        self._is_agreed = False  # that the collectives which follow will be entered by all ranks
        self._votes_once = False
        collectives.guard(self._guarded)

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
        if not told and not self.vote.any(own is not None):
            return result
        reports: list[OutOfMemoryReport | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own, group=self._group)
        return OutOfMemory(tuple(each for each in reports if each is not None))

    def agree(self) -> None:
        """Return on every rank, or where one ran out of memory on none: `attempt` ends."""
        if self.vote.any(False):
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


def abandon(zero: Zero) -> None:
    """Go back to before the first micro-step of a global batch, with as much memory as there was. No communication."""
    zero.reset()
    clean()
