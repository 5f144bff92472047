"""The mean loss on any number of samples, the same on any number of ranks, and a metric of the user's own.

What the random number generators would have drawn next is put back after it.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from frugal.checkpoint.random_state import generator_states, restore_generators
from frugal.data.batches import pin, prefetch, share
from frugal.engine.extensions.metric import Metric
from frugal.engine.oom_limits import OutOfMemory, recovery
from frugal.engine.oom_retry import abandon
from frugal.engine.train_step import Stepper
from frugal.errors import RequestError
from frugal.models import transformers_internals
from frugal.models.losses import predictions
from frugal.models.losses.predictions import Kept
from frugal.models.objectives import Sample

logger = logging.getLogger("frugal")


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over `targets` in `samples` samples, and what a metric of the user's own says of them, by name."""

    loss: float
    targets: int
    samples: int
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf


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
    if len(samples) == 0:
        raise RequestError(
            "there is no sample to evaluate on", hint="give validation data, or a larger part of the data"
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
        message = engine.adaptive_limits.lower_evaluation(outcome, cut.largest)
        if engine.rank == 0:
            logger.warning(message, extra=recovery(outcome))
    engine.cache.after([])
    *sums_here, kept = outcome
    sums = torch.tensor(sums_here, dtype=torch.float64)
    dist.all_reduce(sums, group=engine.votes)
    loss_sum, num_targets = sums.tolist()
    if num_targets == 0:
        raise RequestError(
            "the validation data has no target",
            because=f"every label of its {len(samples)} samples is ignored",
        )
    metrics = {} if metric is None else metric.compute(kept, engine.votes)
    return Evaluation(loss=loss_sum / num_targets, targets=int(num_targets), samples=len(samples), metrics=metrics)


def _evaluated(
    engine: Stepper, samples: Sequence[Sample], shares: Sequence[Sequence[int]], metric: Metric | None
) -> tuple[float, int, dict[int, Kept]]:
    """Run this rank's micro-batches; return the summed loss, the targets, and what the metric needs. Collective."""
    loss = torch.zeros((), dtype=torch.float64, device=engine.device)
    targets = 0
    kept: dict[int, Kept] = {}
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
