"""The mean loss on any number of samples, the same on any number of ranks."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from frugal.errors import RequestError
from frugal.training import rng
from frugal.training.data.micro_batches import pin, prefetch, share
from frugal.training.objectives import Batch, Sample
from frugal.training.oom_limits import OutOfMemory
from frugal.training.oom_retry import abandon
from frugal.training.train_step import Stepper

logger = logging.getLogger("frugal")


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over `targets` in `samples` samples."""

    loss: float
    targets: int
    samples: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf


def evaluate(engine: Stepper, samples: Sequence[Sample]) -> Evaluation:
    """The model's loss on `samples`, the same sequence on every rank. Collective; dropout is off meanwhile.

    The samples are cut into micro-batches like a global batch, under the same limits, or smaller ones where memory runs
    out on a rank: then all of it is run again. Every sample is in exactly one micro-batch; a rank whose own is empty
    runs the objective's dummy, because ZeRO-3 communicates in every forward. Sums and counts travel in fp64, so what
    differs from one process is the rounding of each micro-batch's own sum.

    Raises:
        RequestError: no sample, or no target in any of them.
        OutOfMemoryError: a single sample is too large.
    """
    if len(samples) == 0:
        raise RequestError(
            "there is no sample to evaluate on", hint="give validation data, or a larger part of the data"
        )
    before = rng.state(engine.device)
    while True:
        cut = share(samples, engine.adaptive_limits.evaluation, engine.rank)
        outcome = engine.guard.attempt(partial(_evaluated, engine, samples, cut.places))
        if not isinstance(outcome, OutOfMemory):
            break
        abandon(engine.zero)
        rng.restore(before, engine.device)
        message = engine.adaptive_limits.lower_evaluation(outcome, cut.largest)
        if engine.rank == 0:
            logger.warning(message)
    sums = torch.tensor(outcome, dtype=torch.float64)
    dist.all_reduce(sums, group=engine.votes)
    loss_sum, num_targets = sums.tolist()
    if num_targets == 0:
        raise RequestError(
            "the validation data has no target",
            because=f"every label of its {len(samples)} samples is ignored",
        )
    return Evaluation(loss=loss_sum / num_targets, targets=int(num_targets), samples=len(samples))


def _evaluated(engine: Stepper, samples: Sequence[Sample], shares: Sequence[Sequence[int]]) -> tuple[float, int]:
    """This rank's micro-batches: the summed loss and the number of targets. Collective."""
    loss = torch.zeros((), dtype=torch.float64, device=engine.device)
    targets = 0
    was_training = engine.module.training
    engine.module.eval()
    collated = prefetch(_collated(engine, samples, shares), engine.device)
    try:
        with torch.no_grad(), closing(collated):
            for batch in collated:
                targets += engine.objective.count(batch)
                on_device = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in batch.items()}
                loss += engine.objective.loss_sum(engine.deepspeed, on_device)
    finally:
        engine.module.train(was_training)
    return loss.item(), targets


def _collated(engine: Stepper, samples: Sequence[Sample], shares: Sequence[Sequence[int]]) -> Iterator[Batch]:
    for places in shares:
        own = [samples[place] for place in places]
        yield pin(engine.objective.collate(own or [engine.objective.dummy()]), engine.device)
