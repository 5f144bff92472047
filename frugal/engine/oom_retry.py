"""Out of memory on any rank, without a hang and without a wrong gradient.

CUDA's allocator reports out-of-memory on the host, before the kernel is launched. So before each of DeepSpeed's
collectives all ranks vote (`frugal.distributed.vote`); a rank that failed votes "failed" instead of entering, and no
rank enters. Each says with its vote which collective it means, of which parameters: where these differ, no rank
enters either, and the step is given up on all of them; see `RanksDifferError`.
Then every rank abandons what it accumulated, and the same global batch is run again in smaller micro-batches.

The optimizer step takes one vote more, between all that it allocates and the first weight it writes: see `Update`.
After it ZeRO-3 gathers each persistent parameter separately, hundreds of them; these take one vote together.

Left out: a failure inside a collective that all ranks have entered.
The tests compare weights bit by bit with undisturbed runs.

`Update` is DeepSpeed's optimizer step, done on all ranks or on none. A step first takes norms, copies gradients and,
the first time, makes the optimizer's states: there memory may run out. Then it writes weights, and where that fails
half-way on one rank nothing can be undone. So all ranks vote between the two. Before the vote the step can be given up,
like a backward. Behind it torch's fused optimizers allocate nothing; where another one fails before it has written
anything, it runs again once the caches are emptied.

Numbers that are not finite leave everything as it was, at every stage and precision. DeepSpeed 0.19.8 sees to that for
ZeRO 1 to 3, by the norm of the gradient, which it computes anyway; at stage 0 it would write them into the weights.
"""

import functools
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from frugal.deepspeed_adapter import collectives, kernels
from frugal.deepspeed_adapter.stages import Zero
from frugal.distributed.exchange import gather
from frugal.distributed.vote import DifferentError, Vote
from frugal.engine.oom_limits import OutOfMemory, OutOfMemoryReport, report_of
from frugal.errors import RequestError
from frugal.torch_internals import is_out_of_memory

T = TypeVar("T")


class _PeerFailedError(Exception):
    """Another rank is out of memory."""


class _NotFiniteError(Exception):
    """The loss or the gradient is not finite, on all ranks."""


def _refuse_unless_finite(number: float) -> None:
    if not math.isfinite(number):
        raise _NotFiniteError


_MENDS = "use --zero-stage 2, 1 or 0, where each micro-batch may use its own parameters"
_LEAF = "have ZeRO-3 gather what is chosen from at once: deepspeed.utils.set_z3_leaf_modules(model, [ClassAroundIt])"


class RanksDifferError(RequestError):
    """Ranks would have gone on to collectives of different parameters; none did, and no weight was changed."""

    def __init__(self, about_to: list[tuple[str, list[str]]], remedy: str = f"{_MENDS}; or {_LEAF}") -> None:
        """Take what each rank was about to do, and the names of its parameters; those that all have are not named."""
        shared = set.intersection(*(set(names) for _, names in about_to))
        because = []
        for rank, (what, names) in enumerate(about_to):
            own = [name for name in names if name not in shared] or names
            more = f", ... ({len(own)})" if len(own) > _NAMED else ""
            because.append(f"rank {rank} {what} {', '.join(own[:_NAMED])}{more}".rstrip())
        what = "in the same micro-step ranks use different parameters, or the same in another order"
        super().__init__(what, because=because, hint=remedy)


_NAMED = 4
_END, _STEP = collectives.Entering("has ended its micro-batches"), collectives.Entering("is at the optimizer step")


def clean() -> None:
    """Give back what is held for nobody: cycles of tensors, and the blocks that CUDA's allocator keeps for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class CachedBlocks:
    """The blocks that CUDA's allocator keeps for later; nothing on other devices.

    A plan's promise is that of micro-batches of one shape. On a device without room to spare a micro-batch of another
    shape may find no block that fits: the allocator then gives back all it keeps, in the middle of the step, and what
    is allocated next lies elsewhere, where the planned micro-batches may not fit any more. After such a step the cache
    is given back as a whole, so that the next one finds the memory as the first did.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._refused = 0

    def after(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Note that these micro-batches are done; none: those of an evaluation, which are seldom as in training."""
        if self._device.type != "cuda":
            return
        refused = torch.cuda.memory_stats(self._device)["num_alloc_retries"]
        shapes = {tuple(tensor.shape for tensor in batch.values()) for batch in batches}
        if refused > self._refused and len(shapes) != 1:
            torch.cuda.empty_cache()
        self._refused = refused


def again_after_cleaning(work: Callable[[], T], is_safe: Callable[[], bool] = lambda: True) -> T:
    """Return `work()`, at a second attempt where memory ran out in the first and it `is_safe` to try again."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or not is_safe():
            raise
    clean()
    return work()


class Guard:
    """A vote of all ranks around collectives, so that they fail together. It wraps DeepSpeed's communication backend.

    `group` is a gloo group of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.vote = Vote(group)
        self._group = group
        self.watching = self._votes_once = False
        self._is_agreed = False  # that the collectives which follow will be entered by all ranks
        self._next = _END  # what the last vote was for
        self._remedy: str | None = None  # of somebody else's loop
        collectives.guard(self._guarded)

    def attempt(self, work: Callable[[], T]) -> T | OutOfMemory:
        """Return `work()`; on every rank the shortage, if any rank ran out of memory in it.

        Raises:
            RanksDifferError: ranks were about to enter different collectives; raised on all of them.
        """
        self.watching, own, told = True, None, False
        try:
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
            if not told and not self._vote(own is not None, _END, _END.signature()):
                return result
        except DifferentError:
            raise RanksDifferError(self._about_to()) from None
        reports = gather(own, OutOfMemoryReport | None, self._group)
        return OutOfMemory(tuple(each for each in reports if each is not None))

    def watch(self, remedy: str) -> None:
        """Have ranks vote before all collectives from here on, in a loop of somebody else's, which no attempt is in."""
        self.watching, self._remedy = True, remedy

    def _about_to(self) -> list[tuple[str, list[str]]]:
        """Return what each rank's last vote was for. Collective."""
        return gather((self._next.what, self._next.names), tuple[str, list[str]], self._group)

    def _vote(self, is_failed: bool, next_: collectives.Entering, signature: int) -> bool:
        self._next = next_
        return self.vote.any(is_failed, signature)

    def agree(self, next_: collectives.Entering = _STEP, signature: int = _STEP.signature()) -> None:
        """Return on every rank, or where one ran out of memory on none: `attempt` ends."""
        try:
            is_failed = self._vote(False, next_, signature)
        except DifferentError:
            if self._remedy is None:
                raise
            raise RanksDifferError(self._about_to(), self._remedy) from None
        if is_failed:
            raise _PeerFailedError

    def with_one_vote(self, work: Callable[..., T]) -> Callable[..., T]:
        """Wrap `work`, with a vote before the first of its collectives only: it allocates nothing between them."""

        @functools.wraps(work)
        def voting_once(*args: Any, **kwargs: Any) -> T:
            self._votes_once = True
            try:
                return work(*args, **kwargs)
            finally:
                self._votes_once = self._is_agreed = False

        return voting_once

    def _guarded(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self.watching or self._is_agreed:
                return collective(*args, **kwargs)
            self.agree(*collectives.entered(name, (*args, *kwargs.values())))
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


class Update:
    """One engine's optimizer step. Call it within `Guard.attempt`."""

    def __init__(self, zero: Zero, guard: Guard, before_step: Callable[[], None], *, scales_loss: bool) -> None:
        self.is_begun = False  # whether weights may have been written to, on any rank; equal on all
        self.grad_norm: float | None = None  # of the global gradient before clipping; None: it is not finite
        self._zero = zero
        self._engine = zero.engine
        self._guard, self._before_step, self._scales_loss = guard, before_step, scales_loss
        self._updates = zero.updates()
        for optimizer, _ in self._updates:
            optimizer.step = self._step_by(optimizer)
        zero.gathers_by(guard.with_one_vote)  # first the memory for all, then one by one

    def update(self, loss: Callable[[], float]) -> bool:
        """Do the step; False: loss or gradient is not finite, so only the count of steps has changed. Collective.

        `loss` reads the loss from the device. It is called once DeepSpeed has waited for the gradient's norm, so that
        the device has no pause before; in fp16 first of all, for the loss scale is to follow the gradient alone.
        """
        self._loss, engine, skipped_steps = loss, self._engine, self._engine.skipped_steps
        try:
            if self._scales_loss:
                _refuse_unless_finite(loss())
            with self._groups_kept():
                if self._zero.strategy.zero_stage == 0:
                    gradients = [each.grad for each in engine.module.parameters() if each.grad is not None]
                    self.grad_norm = float(torch.nn.utils.get_total_norm(gradients))
                    _refuse_unless_finite(self.grad_norm)
                engine.step()
        except _NotFiniteError:
            abandon(self._zero)
            return self.leave_out()
        if engine.skipped_steps == skipped_steps:
            return True
        self.grad_norm = None
        if not self._scales_loss:  # else the loss scale was too high for this batch, and is lower now
            self._zero.step_schedule()
        return self._scales_loss

    def leave_out(self) -> bool:
        """Count a step that changes nothing; False. The learning rate follows the number of the step."""
        self.grad_norm = None
        self._zero.count_skipped_step()
        return False

    def _step_by(self, optimizer: Any) -> Callable[..., Any]:
        """Return a guarded step of an inner optimizer; ZeRO-3 calls it once a sub-group."""
        step = optimizer.step

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._guard.watching and not self.is_begun:
                again_after_cleaning(self._make_states)
                self._guard.agree()
                _refuse_unless_finite(self._loss())
                self.grad_norm = self._zero.norm(self.grad_norm)  # after the update it would be waited for
                self.is_begun = True
            self._before_step()  # allocates nothing, and so is done once
            before = kernels.versions(optimizer)
            return again_after_cleaning(lambda: step(*args, **kwargs), lambda: kernels.is_untouched(optimizer, before))

        guarded.__dict__.update(getattr(step, "__dict__", {}))  # torch's schedulers leave marks there
        return guarded

    def _make_states(self) -> None:
        """Make Adam's moments, which torch makes when it first sees a gradient."""
        for optimizer, masters in self._updates:
            if isinstance(optimizer, torch.optim.Adam):
                kernels.make_states(optimizer, masters())

    @contextmanager
    def _groups_kept(self) -> Iterator[None]:
        """Restore the optimizer's groups after a step that is given up: ZeRO shows it one group at a time."""
        shown = [(optimizer, optimizer.param_groups) for optimizer, _ in self._updates]
        parameters = [[list(group["params"]) for group in groups] for _, groups in shown]
        try:
            yield
        except BaseException:
            for (optimizer, groups), kept in zip(shown, parameters, strict=True):
                optimizer.param_groups = groups
                for group, of_group in zip(groups, kept, strict=True):
                    group["params"] = of_group
            raise
