"""Tokens that are not trained on add nothing: loss and gradient are those of transformers' own loss with labels."""

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.data.store.packing import Packer
from frugal.engine.engine import initialize
from frugal.engine.evaluation import evaluate
from frugal.models.objectives import CausalLM
from frugal.models.tiled_loss import IGNORED
from tests.data.test_micro_batches import Known
from tests.engine.gradients import SGD, Gradient, applied, relative_error, weights, with_bound
from tests.engine.small_models import tiny

LENGTHS = (60, 40, 33, 20, 12, 9, 8, 5)


def rows() -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens, and which are trained on: of the longest none, so that a rank has a micro-batch without a target."""
    random = np.random.default_rng(0)
    made = []
    for number, length in enumerate(LENGTHS):
        trained = random.random(length) < 0.4
        trained[-1] = True
        made.append((random.integers(5, 256, length).astype(np.int32), trained & (number > 0)))
    return made


def samples() -> Known:
    return Known({"input_ids": ids, "labels": np.where(trained, ids, IGNORED)} for ids, trained in rows())


def packs() -> list[dict[str, Any]]:
    packer = Packer(64)
    made = [pack for ids, trained in rows() for pack in packer.add(ids, trained)] + list(packer.flush())
    return [pack | {"labels": np.where(pack["trained"], pack["input_ids"], IGNORED)} for pack in made]


def of_transformers(dtype: torch.dtype) -> tuple[Gradient, float]:
    """The model's own loss of all samples in one padded batch, one process."""
    model = tiny("causal-lm", "llama").to(dtype)
    batch = CausalLM().collate(samples())
    real = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    loss = model(input_ids=batch["input_ids"], attention_mask=real, labels=batch["labels"]).loss
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, float(loss)


def step(loss: str, zero_stage: int, packed: bool) -> tuple[Gradient, float, float, int]:
    """Gradient and loss of a step, loss of an evaluation, and micro-batches of this rank without a target."""
    plan = plan_by_hand(
        world_size=dist.get_world_size(), global_batch=len(packs() if packed else samples()), micro_batch=1,
        zero_stage=zero_stage, strategy={"loss": loss}, request=SGD,
    )  # fmt: skip
    plan = replace(plan, batch=replace(plan.batch, shortest=8, overhead_tokens=16)).sealed()
    before = weights(tiny("causal-lm", "llama"))
    engine = initialize(tiny("causal-lm", "llama"), plan, CausalLM(packed=packed))
    batch = packs() if packed else samples()
    evaluation = evaluate(engine, batch)
    without = sum(engine.objective.count(each) == 0 for each in engine.prepare(batch).batches)
    result = engine.train_step(batch)
    gradient = applied(engine, before)
    engine.destroy()
    del engine
    gc.collect()
    return gradient, result.loss, evaluation.loss, without


@pytest.mark.parametrize(
    ("fixture", "loss", "zero_stage", "packed"),
    [
        ("one_rank", "plain", 0, False),
        ("two_ranks", "tiled", 2, False),
        pytest.param("three_ranks", "plain", 3, False, marks=pytest.mark.exhaustive),
        ("two_ranks", "plain", 2, True),
        pytest.param("three_ranks", "tiled", 1, True, marks=pytest.mark.exhaustive),
    ],
)
def test_loss_and_gradient_are_those_of_transformers(
    fixture: str, loss: str, zero_stage: int, packed: bool, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    (expected, expected_loss), bound = with_bound(of_transformers)
    by_rank = ranks.run(step, loss, zero_stage, packed)
    for gradient, mean_loss, evaluation, _ in by_rank:
        assert relative_error(gradient, expected) < bound
        assert mean_loss == pytest.approx(expected_loss, rel=bound)
        assert evaluation == pytest.approx(expected_loss, rel=bound)
    if not packed:
        assert sum(without for *_, without in by_rank) > 0, "a micro-batch was to have no target"
