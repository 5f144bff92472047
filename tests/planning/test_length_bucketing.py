"""Samples of different lengths fill micro-steps without a token too many."""

import random

from hypothesis import given
from hypothesis import strategies as st

from frugal.planning.batch import BatchPlan
from frugal.planning.length_bucketing import MOST_SAMPLES, TokenBudget, grouped, work

SEQ_LEN = 64
samples = st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=200).map(lambda lengths: sorted(lengths, reverse=True))
caps = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def heavy_tailed(number: int, seed: int = 0) -> list[int]:
    """Lengths whose logarithms are normal, a tail of them cut at 512, longest first."""
    generator = random.Random(seed)
    return sorted((max(2, min(512, round(generator.lognormvariate(3.5, 1.4)))) for _ in range(number)), reverse=True)


@given(samples, caps, st.integers(1, SEQ_LEN), st.sampled_from([None, 0, 10, 1000]))
def test_every_sample_is_in_one_micro_batch_and_none_is_over_the_budget(
    lengths: list[int], max_samples: list[int], shortest: int, overhead: int | None
) -> None:
    budget = TokenBudget(tokens=tuple(SEQ_LEN * cap for cap in max_samples), shortest=shortest)
    steps = grouped(lengths, budget, overhead)
    assert sorted(place for step in steps for samples in step for place in samples) == list(range(len(lengths)))
    for step in steps:
        assert any(step)
        for samples, tokens in zip(step, budget.tokens, strict=True):
            assert not samples or len(samples) * max(lengths[samples.start], shortest) <= tokens


@given(samples, caps, st.integers(1, SEQ_LEN))
def test_it_takes_no_more_micro_steps_than_samples_of_full_length(
    lengths: list[int], max_samples: list[int], shortest: int
) -> None:
    budget = TokenBudget(tokens=tuple(SEQ_LEN * cap for cap in max_samples), shortest=shortest)
    assert len(grouped(lengths, budget)) <= BatchPlan.of(len(lengths), max_samples).accumulation_steps


def test_equal_samples_are_dealt_evenly() -> None:
    budget = TokenBudget(tokens=(4 * SEQ_LEN,) * 3, shortest=SEQ_LEN)
    assert [tuple(map(len, step)) for step in grouped([SEQ_LEN] * 18, budget)] == [(3, 3, 3), (3, 3, 3)]


def test_the_longest_samples_are_dealt_to_the_ranks_by_turns() -> None:
    budget = TokenBudget(tokens=(SEQ_LEN, SEQ_LEN), shortest=SEQ_LEN)
    first, second = grouped([9, 8, 7, 6], budget)
    assert [list(samples) for samples in (*first, *second)] == [[0], [1], [3], [2]]


def fastest(lengths: list[int], budget: TokenBudget, overhead: int) -> float:
    """Return the cost of the fastest way to cut samples into micro-steps for two equal ranks, by brute force."""
    if not lengths:
        return 0.0
    options = []
    for first in range(1, min(len(lengths), budget.most_samples(0, lengths[0])) + 1):
        rest = lengths[first:]
        most = min(len(rest), budget.most_samples(1, rest[0])) if rest else 0
        for second in range(bool(rest), most + 1):
            slowest = max(first * lengths[0], second * rest[0] if second else 0)
            options.append(overhead + slowest + fastest(rest[second:], budget, overhead))
    return min(options)


@given(st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=9), st.integers(0, 40))
def test_hardly_any_other_cut_is_sooner_done(lengths: list[int], overhead: int) -> None:
    lengths = sorted(lengths, reverse=True)
    budget = TokenBudget(tokens=(2 * SEQ_LEN,) * 2, shortest=1)
    steps = grouped(lengths, budget, overhead)
    taken = work(lengths, steps, budget) + overhead * len(steps)
    assert taken <= 1.12 * fastest(lengths, budget, overhead)


def test_a_huge_batch_is_cut_alike_and_about_as_well() -> None:
    lengths = heavy_tailed(MOST_SAMPLES)
    budget = TokenBudget(tokens=(8 * 512,) * 8, shortest=32)
    taken = []
    for each in (lengths, [512, *lengths]):
        steps = grouped(each, budget, 100)
        assert [
            place for step in steps for samples in sorted(step, key=lambda samples: samples.start) for place in samples
        ] == list(range(len(each)))
        taken.append(work(each, steps, budget) + 100 * len(steps))
    assert taken[0] < taken[1] < 1.05 * taken[0]
