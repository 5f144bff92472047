"""Trained parameters to which no sample of a global batch leads, on any rank; their gradient is None in plain PyTorch.

Its optimizers leave such a parameter as it is, bit for bit. So does stage 0 here. Under ZeRO-1 to 3 an optimizer
updates flat tensors of many parameters, and takes a gradient of zero for these: weight decay and momentum continue, and
Adam counts the step. That is said once, with their names. SGD without either changes nothing, as in PyTorch.

Which there are costs one number more in the sum that a step takes over the ranks anyway: how many ranks have used all.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from frugal.config.request import Request
from frugal.deepspeed_adapter.stages import Zero
from frugal.errors import RequestError, logger
from frugal.units import plural

_NAMED = 4


class UnusedParameters:
    """The trained parameters of an engine, and which of them this rank has used since `begin`."""

    def __init__(self, zero: Zero, request: Request, votes: dist.ProcessGroup | None) -> None:
        self._all = [(name, each, each.requires_grad) for name, each in zero.engine.module.named_parameters()]
        self._trained = [(name, each) for name, each, is_trained in self._all if is_trained]
        self._stage, self._votes = zero.strategy.zero_stage, votes
        is_plain = request.optimizer.name == "sgd" and not request.optimizer.momentum
        self._goes_on = [f"weight decay of {request.weight_decay:g}"] if request.weight_decay else []
        self._goes_on += [] if is_plain else ["momentum of earlier gradients"]
        self._inner, defaults = zero.inner, getattr(zero.inner, "defaults", {})
        # torch's fused SGD dies where some of what it updates has no momentum yet
        self._takes_all_momenta = bool(defaults.get("fused") and defaults.get("momentum"))
        self._used: set[int] = set()
        self._has_targets, self._is_said = True, False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))
            for number, (_, parameter) in enumerate(self._trained)
        ]

    def _note(self, number: int, _: Tensor) -> None:
        if self._has_targets:
            self._used.add(number)

    def expect(self, num_targets: int) -> None:
        """Expect a micro-batch of `num_targets` targets; 0 is a dummy, whose gradients of zero do not count."""
        self._has_targets = num_targets > 0

    def close(self) -> None:
        """Look at the parameters no longer."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Begin a global batch, for the first time or again."""
        self._used.clear()

    def refuse_frozen(self) -> None:
        """Refuse to train on if parameters were frozen or unfrozen since the engine was made.

        Raises:
            RequestError: with their names.
        """
        if changed := [name for name, each, was in self._all if each.requires_grad is not was]:
            raise RequestError(
                "requires_grad was changed after the engine was made, which has no effect on what it updates",
                because=f"{plural(len(changed), 'parameter')}: {_few(changed)}",
                hint="change it before frugal.initialize; to change it later, keep the weights and make a new engine",
            )

    @property
    def uses_all(self) -> bool:
        """Return whether this rank has used every trained parameter."""
        return len(self._used) == len(self._trained)

    def leave_alone(self) -> None:
        """Keep parameters that no rank has used from the update, where some rank has not used all. Collective."""
        used = torch.zeros(len(self._trained), dtype=torch.uint8)
        used[list(self._used)] = 1
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._votes)
        unused = [self._trained[number] for number in (used == 0).nonzero().flatten().tolist()]
        if self._stage == 0:
            for _, parameter in unused:
                parameter.grad = None  # DeepSpeed has made one of zeros
                if self._takes_all_momenta:
                    self._inner.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        elif unused and self._goes_on and not self._is_said:
            self._is_said = True
            if dist.get_rank() == 0:
                logger.warning(
                    "%s got no gradient on any rank in this step (%s): PyTorch leaves them as they are, but "
                    "under ZeRO-%d %s %s on. Freeze them if they are never used, or use --zero-stage 0",
                    plural(len(unused), "trained parameter"), _few([name for name, _ in unused]), self._stage,
                    " and ".join(self._goes_on), "go" if len(self._goes_on) > 1 else "goes",
                )  # fmt: skip


def _few(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
