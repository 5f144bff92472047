"""Runs in which memory runs out before operators drawn from a seed, in every step; on ranks."""

import random
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from frugal.engine.engine import Engine
from tests.engine.engines import plan_here, running
from tests.engine.gradients import whole
from tests.engine.small_models import ragged_samples, tiny_gpt2
from tests.faults.disturbed import Result

TIMES = (1, 1, 2, 1, 0)
"""Times that memory runs out in each step, each in another attempt."""

FAULTS, NUM_MICRO_STEPS = sum(TIMES), 2


class RunsOut(TorchDispatchMode):
    """A mode in which one operator of a step finds no memory: one outside collectives that all ranks have entered, and
    before the first weight that the optimizer step writes.

    Attributes:
        at: the number of that operator; None: none.
        seen: the number of such operators so far.
        times: how often memory has run out.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.at: int | None = None
        self.seen = self.times = 0
        self._engine = engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        guard = self._engine.guard
        if guard.watching and not guard._is_agreed and not self._engine.update.is_begun:
            self.seen += 1
            if self.seen - 1 == self.at:
                self.times += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))

    def begin(self, at: int | None) -> Self:
        """Count from zero."""
        self.at, self.seen = at, 0
        return self


def run(zero_stage: int, options: dict[str, Any], counts: list[int] | None, seed: int) -> tuple[Result, list[int], int]:
    """Take some steps, in each of which memory runs out on one of the ranks as often as `TIMES` says; without `counts`,
    the number of operators of each undisturbed step, it never does.

    Return also these numbers, and how often memory ran out on this rank. A step is not begun again where it did while
    the optimizer's states were made, which is tried twice.
    """
    strategy, world_size, draw = dict(options), dist.get_world_size(), random.Random(seed)
    request = {name: strategy.pop(name) for name in ("precision", "lora") if name in strategy}
    samples = NUM_MICRO_STEPS * world_size
    plan = plan_here(zero_stage, samples, 1, request, **strategy)
    torch.manual_seed(7 + dist.get_rank())
    losses, seen = [], []
    with running(plan, tiny_gpt2(resid_pdrop=0.1)) as engine:
        out, attempt = RunsOut(engine), engine._try
        left: list[int | None] = []

        def attempt_counted(*args: Any) -> Any:
            with out.begin(left.pop() if left else None):
                return attempt(*args)

        engine._try = attempt_counted  # type: ignore[method-assign]
        engine._make_room = lambda *_: None  # type: ignore[assignment,method-assign]  # again in as large micro-batches
        for step, times in enumerate(TIMES):
            places = (
                []
                if counts is None
                else [(draw.randrange(world_size), draw.randrange(counts[step])) for _ in range(times)]
            )
            left += [place if rank == engine.rank else None for rank, place in places]
            losses.append(engine.train_step(ragged_samples(samples, seed=step)).loss)
            seen.append(out.seen)
        return Result(whole(engine), losses, []), seen, out.times
