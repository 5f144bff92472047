"""A language model on the standard library's sources learns the same on any number of ranks."""

import math

import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.data import corpus as data
from frugal.data import tokenizer
from frugal.data.batches import GlobalBatches, Position
from frugal.engine.engine import initialize
from frugal.models.objectives import CausalLM
from tests.corpora import load_corpus
from tests.engine.gradients import bound_of_losses
from tests.engine.small_models import tiny_gpt2


def texts() -> data.Corpus:
    return load_corpus(
        ["stdlib"], tokenizer=tokenizer.byte_tokenizer(), task="causal-lm", seq_len=128, limit=40,
        validation_fraction=0.1,
    )  # fmt: skip


def small() -> torch.nn.Module:
    return tiny_gpt2(vocab_size=260)


def perplexities(world_size: int, micro_batch: int, zero_stage: int) -> tuple[float, float]:
    """On 50 validation samples, before and after 60 steps of 24 ragged samples. Runs on ranks."""
    corpus = texts()
    assert corpus.validation is not None
    validation = [corpus.validation[i] for i in range(0, len(corpus.validation), len(corpus.validation) // 50)][:50]
    plan = plan_by_hand(
        world_size=world_size, global_batch=24, micro_batch=micro_batch, zero_stage=zero_stage,
        request={"learning_rate": 3e-3}, strategy={"activation_checkpointing": "full", "loss": "tiled"},
    )  # fmt: skip
    torch.manual_seed(torch.distributed.get_rank())
    engine = initialize(small(), plan, CausalLM())
    batches, position = GlobalBatches(corpus.train, global_batch=24, seed=1), Position()
    before = engine.evaluate(validation).perplexity
    for _ in range(60):
        batch = batches.at(position)
        engine.train_step(batch)
        position = batch.end
    after = engine.evaluate(validation).perplexity
    engine.destroy()
    return before, after


@pytest.fixture(scope="module")
def alone(one_rank: Ranks) -> tuple[float, float]:
    ((before, after),) = one_rank.run(perplexities, 1, 8, 0)
    assert after < before / 5
    return before, after


@pytest.mark.parametrize(
    ("fixture", "micro_batch", "zero_stage"),
    [("two_ranks", 12, 3), pytest.param("three_ranks", 5, 2, marks=pytest.mark.exhaustive)],
)
@pytest.mark.exhaustive
def test_the_perplexity_is_that_of_one_rank(
    fixture: str, micro_batch: int, zero_stage: int, alone: tuple[float, float], request: pytest.FixtureRequest
) -> None:
    corpus = texts()
    drawn = GlobalBatches(corpus.train, global_batch=24, seed=1).iterate()
    batches = [next(drawn)[:] for _ in range(60)]
    bound = math.log(260) * bound_of_losses(small, batches, learning_rate=3e-3)  # a perplexity's: by the loss at most
    ranks: Ranks = request.getfixturevalue(fixture)
    for measured in ranks.run(perplexities, ranks.world_size, micro_batch, zero_stage):
        assert measured == pytest.approx(alone, rel=bound)
