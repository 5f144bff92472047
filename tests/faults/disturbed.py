"""Runs in which one rank is out of memory once, somewhere; on ranks."""

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from frugal.engine.engine import Engine
from frugal.engine.train_step import evaluate
from tests.engine.engines import losses_of, plan_here, running
from tests.engine.gradients import whole
from tests.engine.small_models import ragged_samples, tiny_gpt2

MICRO_BATCH, STEPS, DISTURBED_STEP = 4, 3, 1
FAULTS = ("forward", "later forward", "backward", "later backward", "states", "clipping", "writing", "evaluation")
"""In the first or second micro-step; while Adam's states are made; before and after the vote of the optimizer step."""

HALVING = FAULTS[:4]


@dataclass
class Result:
    """The result of a run: weights, and the losses of its steps and of its evaluations."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    evaluations: list[float]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Result)
        return (self.losses, self.evaluations) == (other.losses, other.evaluations) and all(
            torch.equal(self.weights[name], other.weights[name]) for name in self.weights
        )


class Fault:
    """Raises out-of-memory once on this rank, where it was told to."""

    def __init__(self, engine: Engine, where: str) -> None:
        self.is_armed = False
        self.restore: list[tuple[Any, str, Any]] = []
        self._states = 0
        self.engine, self.where, self.micro_steps_before = engine, where, int(where.startswith("later"))
        layers = next(module for module in engine.module.modules() if isinstance(module, nn.ModuleList))
        layers[1].register_forward_hook(self._on_forward)
        inner, zero = engine.zero.updates()[0][0], engine.deepspeed.optimizer
        self._before(torch, "zeros_like", lambda: where == "states" and self._is_second_state())
        clips = (engine.deepspeed, "clip_fp32_gradients") if zero is inner else (zero, "unscale_and_clip_grads")
        self._before(*clips, lambda: where == "clipping")
        self._before(inner, "_init_group", lambda: where == "writing" and engine.update.is_begun)

    @property
    def step(self) -> int:
        """Before which step, from 0, it is to be armed; the states are made in the first."""
        return 0 if self.where == "states" else DISTURBED_STEP

    def _on_forward(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if not self.is_armed:
            return
        if self.where == "evaluation":
            if not self.engine.module.training:
                self._fail()
        elif self.engine.module.training and self.where.endswith(("forward", "backward")):
            if self.micro_steps_before > 0:
                self.micro_steps_before -= 1
            elif self.where.endswith("forward"):
                self._fail()
            else:
                hidden = output if isinstance(output, torch.Tensor) else output[0]
                hidden.register_hook(lambda _gradient: self._fail() if self.is_armed else None)

    def _is_second_state(self) -> bool:
        """Return whether the optimizer is about to make its second moment; others make zeros, too."""
        self._states += sys._getframe(3).f_code.co_name == "_init_group"
        return self._states == 2

    def _before(self, owner: Any, name: str, is_due: Any) -> None:
        usual = getattr(owner, name)

        def disturbed(*args: Any, **kwargs: Any) -> Any:
            if self.is_armed and is_due():
                self._fail()
            return usual(*args, **kwargs)

        setattr(owner, name, disturbed)
        self.restore.append((owner, name, usual))

    def _fail(self) -> None:
        self.is_armed = False
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def remove(self) -> None:
        """Leave the functions of others as they were."""
        for owner, name, usual in self.restore:
            setattr(owner, name, usual)


def run(zero_stage: int, options: dict[str, Any], where: str | None, rank: int = 1, *, halved: str = "") -> Result:
    """Three steps, each evaluated; disturbed on `rank`, or with `halved` micro-batches in training or in evaluation."""
    strategy, world_size = dict(options), dist.get_world_size()
    request = {name: strategy.pop(name) for name in ("precision", "lora") if name in strategy}
    plan = plan_here(zero_stage, 6 * world_size, MICRO_BATCH, request, **strategy)
    torch.manual_seed(7 + dist.get_rank())
    losses, evaluations = [], []
    with running(plan, tiny_gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)) as engine:
        fault = Fault(engine, where) if where is not None and dist.get_rank() == rank else None
        smaller = replace(engine.limits, max_samples=(1,) * world_size)  # 6 a rank: 2 of 3; halved: 3 // 2
        for step in range(STEPS):
            if fault is not None and step == fault.step:
                fault.is_armed = True
            if step == DISTURBED_STEP and halved == "training":
                engine.adaptive_limits.limits = smaller
            losses += losses_of(engine, step, step + 1)
            if step >= DISTURBED_STEP and halved == "evaluation":
                engine.adaptive_limits._now = replace(engine.adaptive_limits._now, evaluation=smaller)
            evaluations.append(evaluate(engine, ragged_samples(6 * world_size, seed=100)).loss)
        if fault is not None:
            assert not fault.is_armed, "the fault never happened"
            fault.remove()
        if where in HALVING:
            assert engine.limits.max_samples == smaller.max_samples
        return Result(whole(engine), losses, evaluations)
