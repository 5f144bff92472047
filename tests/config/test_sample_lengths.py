"""Lengths of samples from a histogram or a list, and the errors where they make no sense."""

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from frugal.config import sample_lengths
from frugal.config.sample_lengths import MOST_BINS, Lengths
from frugal.errors import RequestError


def test_a_list_and_a_table_of_the_same_samples_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"7": 2, "3": 1}))
    assert sample_lengths.of([7, 3, 7]) == sample_lengths.of({3: 1, 7: 2, 5: 0})
    assert sample_lengths.of(str(file)) == sample_lengths.of([3, 7, 7], source=str(file))


def test_mean_quantiles_and_typical_samples() -> None:
    found = sample_lengths.of({10: 50, 20: 49, 1000: 1})
    assert (found.num_samples, found.num_tokens, found.longest) == (100, 2480, 1000)
    assert [found.quantile(share) for share in (0.5, 0.51, 0.99, 1.0)] == [10, 20, 20, 1000]
    assert found.typical(100) == [1000, *[20] * 49, *[10] * 50]
    assert found.typical(3) == [20, 10, 10]


def test_the_longest_of_some_is_what_drawing_them_gives() -> None:
    found, generator = sample_lengths.of({1: 70, 5: 20, 40: 10}), random.Random(0)
    population = [1] * 70 + [5] * 20 + [40] * 10
    drawn = [max(generator.choices(population, k=4)) for _ in range(20_000)]
    assert found.expected_longest(4) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)


def test_many_lengths_become_few_and_hardly_change() -> None:
    generator = random.Random(0)
    exact = [round(generator.lognormvariate(6, 1)) + 1 for _ in range(50_000)]
    found = sample_lengths.of(exact)
    assert len(found.tokens) <= MOST_BINS + 10
    assert found.num_samples == len(exact)
    assert found.longest == max(exact)
    assert found.num_tokens == pytest.approx(sum(exact), rel=1e-3)
    assert found.quantile(0.5) == pytest.approx(sorted(exact)[25_000], rel=0.02)


FORM = '{}\n  because it must be {{"tokens": samples, ...}} or a list with the tokens of each sample'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the lengths FILE are no JSON\n  because Input data was truncated"),
        ("[]", "there is no sample among the lengths in FILE"),
        ('{"3": -1}', "there is no sample among the lengths in FILE"),
        ("[0, 3]", "the lengths in FILE have 1 sample of 0 tokens\n  because there is nothing to learn from"),
        *(
            (content, FORM.format("the lengths in FILE cannot be used"))
            for content in ("3", "[3, 2.5]", '{"long": 3}', "[3, true]")
        ),
        (None, "cannot read the lengths FILE\n  because No such file or directory"),
    ],
)
def test_what_is_no_histogram_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(RequestError) as raised:
        sample_lengths.of(file)
    assert str(raised.value).startswith(message.replace("FILE", str(file)))


def of(too_long: Any) -> Lengths:
    return sample_lengths.of({10: 5, 70: 2, 90: 1}, too_long=too_long)


def test_samples_that_are_too_long_are_named_longest_first() -> None:
    with pytest.raises(RequestError) as raised:
        of("error").within(64)
    assert str(raised.value) == (
        "3 of 8 samples are longer than --seq-len 64\n"
        "  because the longest have 90 tokens, 70 tokens (2 of them)\n\n"
        "hint: use --seq-len 90, or --too-long truncate, or --too-long skip"
    )


def test_what_is_cut_or_left_out_is_counted() -> None:
    cut, said = of("truncate").within(64)
    assert (cut.tokens, cut.counts) == ((10, 64), (5, 3))
    assert said == ["3 of 8 samples are cut to 64 tokens; the longest have 90 tokens, 70 tokens (2 of them)"]
    left, said = of("skip").within(64)
    assert (left.tokens, left.counts) == ((10,), (5,))
    assert said[0].startswith("3 of 8 samples are left out: they are longer than 64 tokens")
    assert of("error").within(90) == (of("error"), [])


def test_data_of_other_lengths_than_planned_is_said() -> None:
    planned = sample_lengths.of({10: 50, 20: 50}, source="lengths.json")
    assert sample_lengths.unlike(planned, 7, 7 * 16) is None
    assert sample_lengths.unlike(planned, 7, 7 * 40) == (
        "the plan is for samples of 15 tokens on average (lengths.json), this data has 40: memory holds for both, "
        "the seconds of a step do not"
    )


def test_drawn_lengths_have_the_histogram_of_all_and_stretches_that_differ_as_random_ones() -> None:
    lengths = Lengths(tokens=(10, 20, 40), counts=(50, 30, 20))
    for seed in (0, 777):
        drawn = lengths.drawn(10_000, seed)
        assert [drawn.count(tokens) for tokens in (10, 20, 40)] == pytest.approx([5000, 3000, 2000], abs=200)
        means = [statistics.mean(drawn[start : start + 16]) for start in range(0, 10_000, 16)]
        one_draw = (0.5 * 9**2 + 0.3 * 1**2 + 0.2 * 21**2) ** 0.5  # standard deviation; 19 is the mean
        assert statistics.stdev(means) == pytest.approx(one_draw / 4, rel=0.15)
