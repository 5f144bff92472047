"""A plan for samples of different lengths: what it proves, and what it says of the data."""

import random
from dataclasses import replace
from typing import Any

import pytest

from frugal.config import sample_lengths
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.planning.report import summary
from tests.planning.synthetic import planned

SMALL = {"parameters": 124_000_000, "flops_per_token": 8e8, "num_operators": 100}


def heavy_tailed(number: int = 4000) -> list[int]:
    """Lengths whose logarithms are normal: 99 % are 13 times as long as half of them at most."""
    generator = random.Random(0)
    return [max(4, min(1024, round(generator.lognormvariate(3.9, 1.1)))) for _ in range(number)]


def plan(model: dict[str, Any] | None = None, **settings: Any) -> Plan:
    asked: dict[str, Any] = {"gpus": 4, "mem": "12G", "lengths": heavy_tailed(), "model": SMALL | (model or {})}
    return planned(**(asked | settings))


def test_the_micro_batch_sizes_and_the_memory_stay_those_of_full_length_samples() -> None:
    known, unknown = plan(micro_batch=8), plan(micro_batch=8, lengths=None)
    assert unknown.grouping is None
    assert unknown.batch.shortest is None
    assert known.batch == replace(
        unknown.batch, shortest=known.batch.shortest, overhead_tokens=known.batch.overhead_tokens
    )
    assert known.memory == unknown.memory
    assert Plan.from_json(known.to_json()) == known


def test_ragged_samples_take_fewer_micro_steps_and_less_time() -> None:
    known, unknown = plan(), plan(lengths=None)
    assert known.grouping is not None
    assert known.grouping.micro_steps < known.batch.accumulation_steps / 2
    assert known.time.total_seconds < unknown.time.total_seconds / 3
    assert known.grouping.fixed_padding > 2
    assert known.grouping.padding < known.grouping.fixed_padding / 5


def test_equal_samples_of_full_length_are_planned_as_ever() -> None:
    known, unknown = plan(lengths={1024: 10}), plan(lengths=None)
    assert known.grouping is not None
    assert known.grouping.padding == known.grouping.fixed_padding == 0
    assert known.time.total_seconds == pytest.approx(unknown.time.total_seconds, rel=0.02)


def test_a_micro_batch_has_no_more_samples_than_fit_whatever_their_length() -> None:
    free, dear = (plan(each, global_batch=1024).batch for each in ({}, {"bytes_per_sample": 15_000_000}))
    assert free.shortest == 1024 // 64
    assert dear.shortest is not None
    assert dear.shortest > free.shortest
    samples = max(dear.micro_batch) * 1024 // dear.shortest
    assert samples * (dear.shortest * 1_000_000 + 15_000_000) < 12 << 30


def test_where_only_full_length_samples_are_proven_no_micro_batch_has_more_of_them() -> None:
    assert plan({"bytes_per_sample": 4_000_000_000, "bytes_per_token": 1_000}).batch.shortest is None


@pytest.mark.parametrize(("pins", "most"), [({"micro_batch": 6}, 6), ({"micro_batch": 4}, 4)])
def test_a_cap_on_samples_holds_for_short_ones_too(pins: dict[str, Any], most: int) -> None:
    batch = plan(**pins).batch
    assert max(batch.micro_batch) * 1024 // (batch.shortest or 1024) <= most


def test_a_token_target_counts_the_tokens_there_are() -> None:
    found = plan(global_tokens=1 << 16).grouping
    assert found is not None
    assert found.step_tokens == pytest.approx(1 << 16, rel=0.01)
    assert found.step_samples > 64, "as many as full-length ones would be"


def test_a_token_target_counts_only_the_target_of_pairs() -> None:
    of_pairs = replace(sample_lengths.of(heavy_tailed()), counted_mean=20.0)
    found = plan(global_tokens=1 << 16, lengths=of_pairs).grouping
    assert found is not None
    assert found.step_samples == (1 << 16) // 20
    assert found.step_tokens == pytest.approx(of_pairs.mean * found.step_samples, rel=1e-4)


def test_the_report_says_what_the_data_comes_to() -> None:
    lines = summary(plan(lengths={16: 300, 64: 90, 1024: 4})).splitlines()
    assert [line for line in lines if line.split(" ")[0] in ("data", "typical", "padding")] == [
        "data       394 samples, 14.66k tokens: half have up to 16, 99 % up to 1024, the longest has 1024",
        "typical    512 samples are 19,045 tokens in 1 micro-step, with up to 512 samples in one micro-batch",
        "padding    13 % of the tokens; micro-batches of 8 samples in random order would have 260 %",
    ]


def test_samples_longer_than_the_plan_are_refused_or_counted() -> None:
    with pytest.raises(RequestError, match="1 of 11 samples are longer than --seq-len 1024"):
        plan(lengths={64: 10, 2000: 1})
