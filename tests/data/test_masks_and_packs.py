"""Tokens that are not trained on add nothing, and documents that share a sample train as if each had one of its own.

Loss and gradient are those of transformers' own loss with labels, of all documents in one padded batch.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.data.store.packing import Packer
from frugal.models.objectives import CausalLM
from frugal.units import IGNORED
from tests.data.test_micro_batches import Known, one_step
from tests.engine.gradients import SGD, Gradient, relative_error, with_bound
from tests.engine.small_models import tiny

LENGTHS = (60, 40, 33, 20, 12, 9, 8, 5)


def rows(masked: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens, and which are trained on: all, or of the longest none, so that a micro-batch has no target."""
    random = np.random.default_rng(0)
    made = []
    for number, length in enumerate(LENGTHS):
        trained = random.random(length) < 0.4
        trained[-1] = True
        made.append((random.integers(5, 256, length).astype(np.int32), (trained & (number > 0)) | (not masked)))
    return made


def samples(masked: bool) -> Known:
    return Known({"input_ids": ids, "labels": np.where(trained, ids, IGNORED)} for ids, trained in rows(masked))


def packs(masked: bool) -> list[dict[str, Any]]:
    packer = Packer(64)
    made = [pack for each in rows(masked) for pack in packer.add(*each)] + list(packer.flush())
    return [pack | {"labels": np.where(pack["trained"], pack["input_ids"], IGNORED)} for pack in made]


def of_transformers(family: str, masked: bool, dtype: torch.dtype) -> tuple[Gradient, float]:
    model = tiny("causal-lm", family).to(dtype)
    batch = CausalLM().collate(samples(masked))
    real = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    loss = model(input_ids=batch["input_ids"], attention_mask=real, labels=batch["labels"]).loss
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, float(loss)


def step(
    family: str, loss: str, zero_stage: int, micro_batch: int, masked: bool, packed: bool
) -> tuple[Gradient, float, float, int]:
    """Gradient and loss of a step, loss of an evaluation, and micro-batches of this rank without a target."""
    batch = packs(masked) if packed else samples(masked)
    plan = plan_by_hand(
        world_size=dist.get_world_size(), global_batch=len(batch), micro_batch=micro_batch, zero_stage=zero_stage,
        strategy={"loss": loss}, request=SGD,
    )  # fmt: skip
    objective = CausalLM(packed=packed)
    *made, batches = one_step(partial(tiny, "causal-lm", family), plan, objective, batch)
    return *made, sum(objective.count(each) == 0 for each in batches)


QUICK = [
    ("one_rank", "llama", "plain", 0, 1, True, False), ("two_ranks", "llama", "tiled", 2, 1, True, False),
    ("one_rank", "gpt2", "plain", 0, 8, False, True), ("two_ranks", "llama", "tiled", 2, 1, True, True),
]  # fmt: skip
RARE = [
    ("three_ranks", "llama", "plain", 3, 1, True, False), ("three_ranks", "llama", "tiled", 1, 1, True, True),
    ("two_ranks", "llama", "plain", 2, 1, True, True), ("two_ranks", "llama", "tiled", 2, 2, False, True),
    ("three_ranks", "llama", "plain", 3, 1, False, True), ("three_ranks", "gpt2", "tiled", 3, 2, False, True),
    ("two_ranks", "gpt2", "plain", 1, 1, False, True), ("one_rank", "llama", "plain", 3, 2, False, True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fixture", "family", "loss", "zero_stage", "micro_batch", "masked", "packed"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in RARE)],
)
def test_loss_and_gradient_are_those_of_transformers(
    fixture: str, family: str, loss: str, zero_stage: int, micro_batch: int, masked: bool, packed: bool,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    ranks: Ranks = request.getfixturevalue(fixture)
    (expected, expected_loss), bound = with_bound(of_transformers, family, masked)
    by_rank = ranks.run(step, family, loss, zero_stage, micro_batch, masked, packed)
    for gradient, mean_loss, evaluation, _ in by_rank:
        assert relative_error(gradient, expected) < bound
        assert mean_loss == pytest.approx(expected_loss, rel=bound)
        assert evaluation == pytest.approx(expected_loss, rel=bound)
    if masked and not packed:
        assert sum(without for *_, without in by_rank) > 0, "a micro-batch was to have no target"
