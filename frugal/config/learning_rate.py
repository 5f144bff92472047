"""How the learning rate follows the global batch, where the user names the batch that the rate was found for.

With kappa = batch / reference batch:

    linear   rate x kappa         SGD. Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv 1706.02677): one step
                                  over kappa batches goes as far as kappa steps while gradients hardly change between
    sqrt     rate x sqrt(kappa)   Adam and its kin. Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive
                                  Gradient Algorithms" (arXiv 2205.10287): an adaptive step is as long whatever the
                                  gradient's size, so only its noise counts, which falls with sqrt(kappa)

Left out: that Malladi's rule also takes 1 - beta to kappa (1 - beta) and epsilon to epsilon / sqrt(kappa); that both
need a warm-up, and hold up to a batch that depends on the task. The number of GPUs does not occur here.

Learning rates as pure functions of the number of optimizer steps done, so that a resumed run needs no state.
"""

import math
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from frugal.errors import RequestError

Rule = Literal["linear", "sqrt"]

_SOURCES = {"linear": "Goyal et al. 2017", "sqrt": "Malladi et al. 2022"}


def fitting(optimizer: str) -> Rule:
    """The rule whose assumptions the optimizer meets: all but SGD adapt their steps."""
    return "linear" if optimizer == "sgd" else "sqrt"


def check_rule(reference_batch: int | None, rule: Rule | None, optimizer: str) -> None:
    """A reference and a rule belong together.

    Raises:
        RequestError: one was given without the other.
    """
    if reference_batch is not None and rule is None:
        raise RequestError(
            f"--reference-batch {reference_batch} was given without --lr-rule",
            because="how the learning rate is to follow the batch is not known",
            hint=f"add --lr-rule {fitting(optimizer)}, which fits {optimizer}",
        )
    if rule is not None and reference_batch is None:
        raise RequestError(
            f"--lr-rule {rule} was given without --reference-batch",
            because="the batch that the learning rate was found for is not known",
            hint="add --reference-batch N, or leave --lr-rule out to train with the rate as it is",
        )


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A `rate` found for `reference_batch`, carried over to `batch`; both in `unit`."""

    rate: float
    rule: Rule
    batch: int
    reference_batch: int
    unit: Literal["samples", "tokens"]

    @property
    def scaled(self) -> float:
        """The rate for `batch`."""
        return self._by(self.rule)

    def note(self, optimizer: str) -> str | None:
        """That the rule was not made for `optimizer`, and what the other one comes to; None where all is well."""
        right = fitting(optimizer)
        if self.rule == right or self.batch == self.reference_batch:
            return None
        return (
            f"the {self.rule} rule is not made for {optimizer}: with --lr-rule {right} ({_SOURCES[right]}) the "
            f"learning rate would be {self._by(right):g}"
        )

    def __str__(self) -> str:
        ratio = f"{self.batch}/{self.reference_batch}"
        ratio = f"sqrt({ratio})" if self.rule == "sqrt" else ratio
        basis = f"{self.rule} rule, from {self.reference_batch} {self.unit}"
        return f"{self.scaled:g} = {self.rate:g} x {ratio} ({basis})"

    def _by(self, rule: Rule) -> float:
        factor = self.batch / self.reference_batch
        return self.rate * (factor if rule == "linear" else sqrt(factor))


Schedule = Literal["cosine", "linear", "constant"]


def schedule_factor(step: int, *, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """The factor on the peak learning rate in the step after `step` steps, of `total_steps`.

    Warmup rises linearly to 1 in `warmup_steps` steps; its first step is 1 / warmup_steps, never 0. Then, with p
    running from 0 to 1 over what is left: cosine (1 + cos(pi p)) / 2, linear 1 - p, or constant 1. The last step
    is not quite at 0, because a step with learning rate 0 would be wasted.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    if schedule == "linear":
        return 1.0 - progress
    return (1.0 + math.cos(math.pi * progress)) / 2.0
