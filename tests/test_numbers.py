"""Numbers printed for people keep a readable width, whatever their size."""

import math
import random

import pytest

from frugal.engine.evaluation import Evaluation
from frugal.units import format_number, format_rate, format_seconds

DRAWN = random.Random(5)
SIZES = [DRAWN.choice((1, -1)) * DRAWN.uniform(1, 10) * 10.0**power for power in range(-9, 300, 7)]


@pytest.mark.parametrize("value", [0.0, math.inf, -math.inf, math.nan, 999_999.99996, *SIZES])
def test_a_number_has_at_most_twelve_characters_and_is_that_number(value: float) -> None:
    text = format_number(value)
    assert len(text) <= 12
    assert math.isnan(value) if text == "nan" else float(text) == pytest.approx(value, rel=0.01, abs=5e-5)  # as printed


def test_the_perplexity_of_an_untrained_model() -> None:
    assert format_number(Evaluation(loss=61.0, targets=9, samples=3).perplexity, 2) == "3.10e+26"
    assert format_number(Evaluation(loss=3.2758, targets=9, samples=3).perplexity, 2) == "26.46"


@pytest.mark.parametrize("value", [0.0, *(DRAWN.uniform(1, 10) * 10.0**power for power in range(-3, 10))])
def test_a_rate_is_never_printed_as_nothing(value: float) -> None:
    assert float(format_rate(value).replace(",", "")) == pytest.approx(value, rel=0.01)  # as printed


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0845, "84 ms"), (12.34, "12.3 s"), (245, "4 min 05 s"), (12_000, "3 h 20 min"), (4e9, "1,111,111 h 06 min")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
