"""The mean loss on N samples is that of one process, for any N and any number of ranks."""

import gc
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.ranks import Ranks
from bench.runs import records
from frugal.engine import training
from frugal.engine.evaluation import Evaluation
from frugal.engine.measure.two_steps import settled_collectives
from frugal.engine.reports.metrics import Log, PlannedMemory
from frugal.engine.train_step import evaluate
from frugal.errors import RequestError
from frugal.memory_watch import gauge
from tests.engine.engines import losses_of, plan_here, running
from tests.engine.gradients import plain_loss, with_bound
from tests.engine.small_models import ragged_samples, tiny_gpt2

NUMBERS = (1, 7, 23)


class Counted(list):  # type: ignore[type-arg]  # a list of samples
    """Samples that count how often each was read."""

    def __init__(self, samples: list[dict[str, list[int]]]) -> None:
        super().__init__(samples)
        self.reads = [0] * len(samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:  # type: ignore[override]  # no slices needed
        self.reads[index] += 1
        return super().__getitem__(index)


def reference(number: int, dtype: torch.dtype) -> tuple[float, int]:
    """Plain PyTorch, one process, every sample by itself."""
    return plain_loss(tiny_gpt2().to(dtype).eval(), ragged_samples(number))


def evaluations(zero_stage: int) -> list[tuple[Evaluation, list[int]]]:
    """One engine with dropout, evaluated on each number of samples; runs on ranks."""
    results, caps = [], tuple(range(3, 3 + dist.get_world_size()))
    with running(plan_here(zero_stage, 16, caps), tiny_gpt2(resid_pdrop=0.5, attn_pdrop=0.5)) as engine:
        for number in NUMBERS:
            samples = Counted(ragged_samples(number))
            results.append((evaluate(engine, samples), samples.reads))
        assert engine.module.training
    return results


@pytest.mark.parametrize(
    ("fixture", "zero_stage"),
    [
        ("one_rank", 0),
        ("three_ranks", 3),
        *(pytest.param("two_ranks", stage, marks=pytest.mark.exhaustive) for stage in (0, 1, 2)),
    ],
)
def test_the_loss_is_that_of_plain_pytorch_and_no_sample_counts_twice(
    fixture: str, zero_stage: int, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    by_rank = ranks.run(evaluations, zero_stage)
    for i, number in enumerate(NUMBERS):
        (loss, targets), bound = with_bound(reference, number)
        for results in by_rank:
            measured = results[i][0]
            assert measured.loss == pytest.approx(loss, rel=bound)
            assert measured.perplexity == pytest.approx(math.exp(measured.loss))
            assert (measured.targets, measured.samples) == (targets, number)
        assert [sum(reads) for reads in zip(*(results[i][1] for results in by_rank), strict=True)] == [1] * number


def trajectory(zero_stage: int, evaluating: bool) -> list[float]:
    """Losses of a run with dropout, with or without evaluations in between; runs on ranks."""
    losses = []
    with running(plan_here(zero_stage, 6), tiny_gpt2(resid_pdrop=0.1)) as engine:
        torch.manual_seed(dist.get_rank())
        for step in range(3):
            losses += losses_of(engine, step, step + 1)
            if evaluating:
                evaluate(engine, ragged_samples(5))
    return losses


@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_evaluating_leaves_the_training_as_it_was(zero_stage: int, two_ranks: Ranks) -> None:
    assert two_ranks.run(trajectory, zero_stage, True) == two_ranks.run(trajectory, zero_stage, False)


def peaks(zero_stage: int, strategy: dict[str, Any], model: dict[str, Any]) -> tuple[dict[str, int], set[Any]]:
    """The most live bytes of two training steps, and of an evaluation under the same limits; runs on ranks.

    And what the evaluated model returns as its keys and values.
    """
    caches = set()
    plan = plan_here(zero_stage, 16, 8, **strategy)
    with gauge("cpu") as memory, settled_collectives(), running(plan, tiny_gpt2(**model)) as engine:
        for step in range(2):
            memory.mark("training")
            engine.train_step(ragged_samples(16, seed=step, shortest=64))
        gc.collect()
        memory.mark("evaluation")
        engine.module.register_forward_hook(lambda _model, _inputs, outputs: caches.add(outputs.past_key_values))
        evaluate(engine, ragged_samples(17, seed=5, shortest=64))
        assert engine.module.config.use_cache == model.get("use_cache", False)
        return dict(memory.phases), caches


@pytest.mark.parametrize(
    ("zero_stage", "strategy", "model"),
    [
        (2, {}, {"vocab_size": 4096}),
        (2, {"activation_checkpointing": "full", "loss": "tiled"}, {"use_cache": True}),
        pytest.param(0, {"activation_checkpointing": "selective"}, {}, marks=pytest.mark.exhaustive),
        pytest.param(3, {}, {"vocab_size": 4096}, marks=pytest.mark.exhaustive),
        pytest.param(3, {"activation_checkpointing": "full"}, {"use_cache": True}, marks=pytest.mark.exhaustive),
        pytest.param(3, {"activation_checkpointing": "full", "loss": "tiled"}, {}, marks=pytest.mark.exhaustive),
    ],
)
def test_evaluating_takes_no_more_memory_than_training(
    zero_stage: int, strategy: dict[str, Any], model: dict[str, Any], two_ranks: Ranks
) -> None:
    for most, caches in two_ranks.run(peaks, zero_stage, strategy, model):
        assert most["evaluation"] < most["training"]
        assert caches == {None}  # with many layers they would be more than what training keeps for backward


def nothing_to_evaluate() -> list[str]:
    """Return what evaluating nothing and evaluating prompts says; runs on ranks."""
    messages = []
    with running(plan_here(2, 2)) as engine:
        for samples in ([], [{"input_ids": [1, 2, 3], "labels": [-100] * 3}]):
            with pytest.raises(RequestError) as raised:
                evaluate(engine, samples)
            messages.append(str(raised.value))
    return messages


def test_nothing_to_evaluate_is_said(one_rank: Ranks) -> None:
    ((of_none, of_prompts),) = one_rank.run(nothing_to_evaluate)
    assert of_none.startswith("there is no sample to evaluate on\n") and "hint: give validation data" in of_none
    assert "because every label of its 1 samples is ignored" in of_prompts


def at_the_end(folder: Path) -> list[dict[str, Any]]:
    """Return what a run records at its end that has data kept for it; runs on one rank."""
    data: Any = SimpleNamespace(
        training=ragged_samples(64), validation=ragged_samples(9), test=ragged_samples(7, seed=1)
    )
    with running(plan_here(0, 16, 4)) as engine, Log(folder, rank=0, planned=PlannedMemory(0), total_steps=5) as log:
        training.evaluate_at_the_end(engine, data, 5, log)
    return records(folder)


def test_what_was_kept_for_the_end_is_evaluated_whole_beside_what_is_known(one_rank: Ranks, tmp_path: Path) -> None:
    ((known, kept),) = one_rank.run(at_the_end, tmp_path)
    assert (known["event"], known["step"], known["samples"]) == ("train", 5, 9)
    assert (kept["event"], kept["step"], kept["samples"]) == ("test", 5, 7)
    assert kept["perplexity"] == pytest.approx(math.exp(kept["loss"]))
