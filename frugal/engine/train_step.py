"""One global batch in, one optimizer step out, the same on any split; and the mean loss on any number of samples.

For a global batch with T targets on W ranks, every micro-batch's loss is a sum scaled by W / T. DeepSpeed averages
gradients over ranks, so the W cancels and what remains is the exact mean over T, however the batch was cut.

What the random number generators would have drawn next is put back after an evaluation.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from frugal.checkpoint.random_state import generator_states, restore_generators
from frugal.config.hardware import local_host
from frugal.config.request import Request
from frugal.data.batches import MicroBatchLimits, pin, prefetch, share
from frugal.data.given_batch import Given, as_samples
from frugal.deepspeed_adapter import engine, gradients
from frugal.deepspeed_adapter.stages import Zero
from frugal.deepspeed_adapter.zero3_graph import SplitReads
from frugal.distributed import stop
from frugal.engine.evaluation import Evaluation
from frugal.engine.extensions.callbacks import Callbacks
from frugal.engine.extensions.metric import Metric
from frugal.engine.extensions.optimizer import OwnOptimizer
from frugal.engine.oom_limits import UPDATE, AdaptiveLimits, OutOfMemory, recovery
from frugal.engine.oom_retry import CachedBlocks, Guard, RanksDifferError, Update, abandon
from frugal.errors import PlanMismatchError, RequestError, logger, refuse
from frugal.models import (
    activation_checkpointing,
    expert_modules,
    sequence_parallel,
    tiled_loss,
    transformers_internals,
    weight_decay,
)
from frugal.models.fused import replacement
from frugal.models.loading import quantised
from frugal.models.losses import predictions
from frugal.models.objectives import Batch, Objective, Sample, tokens_and_positions
from frugal.models.tiling import tiled_mlp
from frugal.models.unused_parameters import UnusedParameters
from frugal.planning.batch import BatchPlan
from frugal.planning.plan import Plan
from frugal.planning.strategy import Strategy
from frugal.units import format_bytes


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: mean loss over `targets`, norm of the global gradient before clipping, learning rate used.

    `is_finite`: whether loss and gradient are numbers; otherwise neither weights nor optimizer states were touched.
    `tokens` of the samples took `positions` positions on all ranks; None where samples are not of tokens.
    """

    loss: float
    targets: int
    samples: int
    grad_norm: float | None
    learning_rate: float
    is_finite: bool = True
    tokens: int | None = None
    positions: int | None = None


@dataclass(frozen=True)
class Prepared:
    """A global batch, and what this rank takes of it under `limits`: micro-batches, and targets.

    `tokens` of its samples are in `positions` positions of its micro-batches (of pairs on both sides); the rest is
    padding, and dummies. Both are 0 where samples are not of tokens.
    """

    samples: Sequence[Sample]
    limits: MicroBatchLimits
    batches: list[Batch]
    targets: int
    tokens: int = 0
    positions: int = 0

    @property
    def largest(self) -> tuple[int, int] | None:
        """Return samples and tokens (of pairs on the longer side) of the largest micro-batch; None: not of tokens."""
        sizes = []
        for batch in self.batches:
            tokens, labels = batch.get("input_ids"), batch.get("labels")
            if tokens is None or tokens.dim() != 2 or labels is None:
                continue
            longest = tokens.shape[1]
            if labels.dim() > 1:
                longest = max(longest, labels.shape[1])
            sizes.append((len(tokens), longest))
        return max(sizes, key=math.prod, default=None)


class Stepper:
    """A model under a plan, on this rank, and its optimizer steps; `frugal.engine.engine.Engine` has the rest."""

    def __init__(
        self, zero: Zero, plan: Plan, objective: Objective, votes: dist.ProcessGroup | None, *,
        own_optimizer: OwnOptimizer | None, callbacks: Callbacks,
    ) -> None:  # fmt: skip
        self.zero = zero
        self.deepspeed = zero.engine
        self.plan = plan
        self.objective = objective
        self.votes = votes  # a gloo group: small sums between hosts, without touching the device
        self.guard = Guard(votes)
        gradients.announce(zero.engine.optimizer, zero.engine.module)
        self.unused = UnusedParameters(zero, plan.request, votes)
        decay = weight_decay.PartialDecay(zero, plan.request).apply
        self.update = Update(zero, self.guard, decay, scales_loss=plan.request.precision == "fp16")
        self.adaptive_limits = AdaptiveLimits(plan, zero.engine.module)
        self.num_recoveries = 0  # times that a step was begun again because memory ran out
        self.callbacks = callbacks
        self.wants_to_stop = False  # for a reason of this rank's own
        self.is_to_stop = False  # whether any rank wants or was told to; equal on all ranks, after each step
        self.rank = dist.get_rank()
        self.group = plan.batch.group_of(self.rank)
        self.world_size = dist.get_world_size()
        self._is_first = True  # what a model does in its first step is looked at more closely
        self.device = torch.device(zero.engine.device)
        self.cache = CachedBlocks(self.device)
        self.own_optimizer = own_optimizer
        # settings of its parameter groups, without what a schedule does to them
        self.group_settings = [] if own_optimizer is None else own_optimizer.settings(zero)
        zero.remember()

    @property
    def module(self) -> nn.Module:
        """Return the model itself."""
        return self.deepspeed.module

    @property
    def limits(self) -> MicroBatchLimits:
        """Return what a micro-batch may take: as planned, lowered where memory ran out all the same."""
        return self.adaptive_limits.limits

    def prepare(self, samples: Sequence[Sample]) -> Prepared:
        """Do all that `train_step` needs on the host; another thread may call it while a step runs.

        A micro-batch of this rank without samples becomes a dummy without targets.
        """
        limits = self.limits
        batches, tokens, positions = [], 0, 0
        for places in share(samples, limits, self.group, self.plan.batch).places:
            own = [samples[place] for place in places]
            batch = self.objective.collate(own or [self.objective.dummy()])
            held, taken = tokens_and_positions(self.objective, own, batch)
            tokens, positions = tokens + held, positions + taken
            batches.append(pin(batch, self.device))
        return Prepared(samples, limits, batches, sum(map(self.objective.count, batches)), tokens, positions)

    def train_step(self, batch: Given | Prepared) -> StepResult:
        """Take one optimizer step on the samples of a global batch, the same on every rank, or prepared.

        It is a list of samples, or what a `DataLoader` yields: see `frugal.data.given_batch`. Only this rank's
        micro-batches are read, so they may be loaded on access. Where `batch.lengths` has the tokens of each, samples
        of like length share a micro-batch; see `frugal.data.batches`. If memory runs out on any rank, all run
        the same samples again in smaller micro-batches, and keep these for a while; see `frugal.engine.oom_limits`.
        Where loss or gradient are not finite, nothing is updated, and the result says so. Collective.

        Raises:
            RequestError: no sample, or no target in any of them; or parameters were frozen since the engine was made.
            RanksDifferError: ranks use different parameters, which ZeRO-3 cannot do; all is as it was.
            OutOfMemoryError: a single sample is too large, or the optimizer step. All is as it was after the last
                step then, unless `update.is_begun`.
        """
        self.unused.refuse_frozen()
        samples = batch.samples if isinstance(batch, Prepared) else as_samples(batch, self.objective)
        if len(samples) == 0:
            raise RequestError("the global batch is empty", hint="pass at least one sample")
        if not isinstance(batch, Prepared) or batch.limits != self.limits:
            batch = self.prepare(samples)  # anew where memory ran out since then
        (targets,) = self._sum(batch.targets)
        if targets == 0:
            raise RequestError(
                "the global batch has no target to learn from",
                because=f"every label of its {len(samples)} samples is ignored",
            )
        before = generator_states(self.device)
        attempts = 0
        while not isinstance(result := self._try(batch, int(targets)), StepResult):
            abandon(self.zero)
            restore_generators(before, self.device)
            if isinstance(result, RanksDifferError):
                self._reduce_in_order(result)
                continue
            attempts += 1
            self.num_recoveries += 1
            self._say(self._make_room(result, samples, attempts), result)
            batch = self.prepare(samples)
        self.cache.after(batch.batches)
        if result.is_finite:
            self._say(self.adaptive_limits.after_step())
        return result

    def agree_to_stop(self) -> bool:
        """Return whether any rank wants to stop, or was asked to; also set `is_to_stop`. Collective."""
        self.is_to_stop = self._sum(self._is_asked_to_stop) > [0]
        return self.is_to_stop

    @property
    def _is_asked_to_stop(self) -> bool:
        return self.wants_to_stop or stop.requested() is not None

    def _try(self, batch: Prepared, targets: int) -> StepResult | OutOfMemory | RanksDifferError:
        """Try a whole step on a global batch of so many targets. Collective."""
        self.update.is_begun = False
        self.unused.begin()
        self.zero.remember()
        learning_rate = self.zero.inner.param_groups[0]["lr"]
        try:
            local_loss = self.guard.attempt(partial(self.accumulate, batch.batches, targets))
        except RanksDifferError as difference:
            return difference
        if isinstance(local_loss, OutOfMemory):
            return local_loss
        num_told, use_all, tokens, positions = self._sum(
            self._is_asked_to_stop, self.unused.uses_all, batch.tokens, batch.positions
        )
        self.is_to_stop = num_told > 0
        if not use_all:
            self.unused.leave_alone()
        loss_sum = cache(lambda: self._sum(local_loss.item())[0])  # waits for the device
        is_finite = self.guard.attempt(lambda: self.update.update(loss_sum))
        if isinstance(is_finite, OutOfMemory):
            return is_finite
        self.update.is_begun = False
        return StepResult(
            loss=loss_sum() / targets,
            targets=targets,
            samples=len(batch.samples),
            grad_norm=self.update.grad_norm,
            learning_rate=learning_rate,
            is_finite=is_finite,
            tokens=int(tokens) if tokens else None,
            positions=int(positions) if tokens else None,
        )

    def _reduce_in_order(self, difference: RanksDifferError) -> None:
        """Reduce gradients in one order from here on, after ranks differed in it, and say so.

        Raises:
            RanksDifferError: that cannot help.
        """
        kept_bytes = gradients.reduce_in_order(self.deepspeed.optimizer)
        if kept_bytes is None:
            raise difference
        if self.rank == 0:
            logger.warning(
                "%s (%s): from here on gradients wait for the end of backward and are reduced in one order, for up to "
                "%s more than planned; the global batch is run again",
                difference.what, "; ".join(difference.because), format_bytes(kept_bytes),
            )  # fmt: skip

    def _make_room(self, shortage: OutOfMemory, samples: Sequence[Sample], attempts: int) -> str:
        """Change what may help after running out of memory for the `attempts`-th time; return what to say."""
        if any(report.phase == UPDATE for report in shortage.reports):
            return self.adaptive_limits.retry_update(shortage, attempts, is_begun=self.update.is_begun)
        if shortage.is_fragmentation and attempts == 1:
            return "out of memory, though enough is free in pieces: these are given back, and the batch is run again"
        return self.adaptive_limits.lower(shortage, share(samples, self.limits, self.group, self.plan.batch).largest)

    def _say(self, message: str | None, shortage: OutOfMemory | None = None) -> None:
        if message is not None and self.rank == 0:
            logger.warning(message, extra=recovery(shortage))

    def accumulate(self, batches: Sequence[Batch], targets: int) -> Tensor:
        """Run forward and backward over this rank's micro-batches; see `accumulate`."""
        is_checked, self._is_first = self._is_first and self.zero.strategy.zero_stage == 3, False
        with SplitReads(self.module) if is_checked else nullcontext():
            return accumulate(
                self.deepspeed, self.objective, batches, targets,
                before_each=lambda batch: self.unused.expect(self.objective.count(batch)),
            )  # fmt: skip

    def _sum(self, *values: float) -> list[float]:
        """Sum each value over the ranks, in fp64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.votes)
        return tensor.tolist()


def evaluate(engine: Stepper, samples: Sequence[Sample], metric: Metric | None = None) -> Evaluation:
    """Return the model's loss on `samples`, the same sequence on every rank. Collective; dropout is off meanwhile.

    The samples are cut into micro-batches like a global batch, under the same limits, so that a forward takes no more
    than one of training, which also keeps what backward needs. Where memory runs out on a rank all the same, all of it
    is run again in smaller ones. Every sample is in exactly one micro-batch; a rank whose own is empty
    runs the objective's dummy, because ZeRO-3 communicates in every forward. Sums and counts travel in fp64, so what
    differs from one process is the rounding of each micro-batch's own sum.

    Raises:
        RequestError: no sample, or no target in any of them; or the metric failed.
        OutOfMemoryError: a single sample is too large.
    """
    refuse(
        (
            len(samples) == 0,
            "there is no sample to evaluate on",
            "",
            "give validation data, or a larger part of the data",
        )
    )
    before = generator_states(engine.device)
    while True:
        engine.zero.remember()
        cut = share(samples, engine.adaptive_limits.evaluation, engine.group)
        outcome = engine.guard.attempt(partial(_evaluated, engine, samples, cut.places, metric))
        if not isinstance(outcome, OutOfMemory):
            break
        abandon(engine.zero)
        restore_generators(before, engine.device)
        engine._say(engine.adaptive_limits.lower_evaluation(outcome, cut.largest), outcome)
    engine.cache.after([])
    own_loss, own_targets, kept = outcome
    loss_sum, num_targets = engine._sum(own_loss, own_targets)
    refuse(
        (
            num_targets == 0,
            "the validation data has no target",
            f"every label of its {len(samples)} samples is ignored",
            None,
        )
    )
    metrics = {} if metric is None else metric.compute(kept, engine.votes)
    return Evaluation(loss=loss_sum / num_targets, targets=int(num_targets), samples=len(samples), metrics=metrics)


def _evaluated(
    engine: Stepper, samples: Sequence[Sample], shares: Sequence[Sequence[int]], metric: Metric | None
) -> tuple[float, int, dict[int, predictions.Kept]]:
    """Run this rank's micro-batches; return the summed loss, the targets, and what the metric needs. Collective."""
    loss = torch.zeros((), dtype=torch.float64, device=engine.device)
    targets = 0
    kept: dict[int, predictions.Kept] = {}
    was_training = engine.module.training
    engine.module.eval()
    owns = ([samples[place] for place in places] or [engine.objective.dummy()] for places in shares)
    collated = prefetch((pin(engine.objective.collate(own), engine.device) for own in owns), engine.device)
    try:
        keeping = predictions.kept(None if metric is None else metric.of_logits)
        without_caches = transformers_internals.without_caches(engine.module)
        with torch.no_grad(), without_caches, closing(collated), keeping as keeper:
            for places, batch in zip(shares, collated, strict=True):
                targets += engine.objective.count(batch)
                on_device = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in batch.items()}
                loss += engine.objective.loss_sum(engine.deepspeed, on_device)
                if metric is not None and keeper is not None:
                    kept |= zip(places, metric.taken(keeper, len(places)), strict=True)
    finally:
        engine.module.train(was_training)
    return loss.item(), targets, kept


def wrap(model: nn.Module, request: Request, strategy: Strategy, batch: BatchPlan, **how: Any) -> Zero:
    """Wrap `model`, changed as the strategy says, in DeepSpeed's engine. Collective. `how` and errors as there."""
    change(model, strategy)
    if strategy.offload_optimizer != "none":
        local_host.give_back_large_blocks()
    zero = engine.initialize(model, request, strategy, batch, **how)
    quantised.settle(model, zero.engine.device)
    return zero


def change(model: nn.Module, strategy: Strategy) -> None:
    """Make `model` compute as the strategy says, in place: kernels, activation checkpointing, loss and MLP. Collective.

    Raises:
        RequestError: the model cannot do it.
    """
    transformers_internals.always_use()
    expert_modules.always_run(model)
    if strategy.kernels == "liger":
        replacement.apply(model)
    activation_checkpointing.apply(model, strategy.activation_checkpointing, strategy.layer_modes)
    sequence_parallel.split_over_ranks(model, strategy.sequence_parallel)
    if strategy.loss == "tiled":
        tiled_loss.apply(model, strategy.kernels)
    if strategy.mlp == "tiled":
        tiled_mlp.apply(model)


def refuse_other_model(plan: Plan, model: nn.Module) -> None:
    """Refuse a model of another size than the plan's, or with other trained parameters.

    Raises:
        PlanMismatchError: the plan was made for another one.
    """
    sizes = [(quantised.elements(parameter), parameter.requires_grad) for parameter in model.parameters()]
    has = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    planned = plan.model.parameters, plan.model.trainable_parameters
    if planned[0] and planned != has:
        of_plan, of_model = (f"{number:,} parameters, {trained:,} trained" for number, trained in (planned, has))
        raise PlanMismatchError(
            f"the plan is for another model than {plan.request.model} is now",
            because=f"it was made for {of_plan}; the model has {of_model}",
            hint="plan again",
        )


def accumulate(
    deepspeed: Any,
    objective: Objective,
    batches: Sequence[Batch],
    targets: int,
    before_each: Callable[[Batch], None] = lambda _: None,
) -> Tensor:
    """Run forward and backward over this rank's micro-batches; return the summed loss, fp64, shape `()`.

    `targets` counts those of the global batch. `before_each` is called with each micro-batch. The
    gradients are reduced after the last micro-batch. Collective.
    """
    device, world_size = torch.device(deepspeed.device), dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for i, batch in enumerate(batches):
        before_each(batch)
        deepspeed.set_gradient_accumulation_boundary(i == len(batches) - 1)
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        loss = objective.loss_sum(deepspeed, on_device)
        total += loss.detach()
        deepspeed.backward(loss * (world_size / targets), scale_wrt_gas=False)
    return total
