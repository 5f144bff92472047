"""The order: a permutation for every n, seed and epoch, that looks random and costs nothing to start."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugal.data.batches import _TABLE, Permutation, permutation

SIZES = st.one_of(
    st.integers(1, 300),
    st.integers(_TABLE - 2, _TABLE + 300),
    st.sampled_from([2**13 - 1, 2**13, 2**13 + 1, 2**14 + 1, 60_000]),
)
SEEDS = st.integers(-(2**70), 2**70)


@given(n=SIZES, seed=SEEDS, epoch=st.integers(0, 2**40))
@settings(max_examples=150, deadline=None)
def test_every_sample_comes_exactly_once(n: int, seed: int, epoch: int) -> None:
    assert (np.sort(permutation(n, seed, epoch)[:]) == np.arange(n)).all()


def test_the_order_never_changes_between_versions() -> None:
    """Resuming relies on it."""
    assert list(permutation(10, 0, 0)[:]) == [0, 3, 5, 7, 9, 6, 2, 8, 1, 4]
    assert list(permutation(10**9, 7, 3)[:5]) == [419780184, 378261970, 522946071, 16087200, 431909802]


@pytest.mark.parametrize("n", [100, 10_000])
@pytest.mark.parametrize("other", [(1, 0), (0, 1)])
def test_another_seed_or_epoch_is_another_order(n: int, other: tuple[int, int]) -> None:
    same_place = int((permutation(n, 0, 0)[:] == permutation(n, *other)[:]).sum())
    assert same_place < 10  # one is expected, by Poisson more than nine in 1e-7 of all cases


def deviations(counts: np.ndarray, expected: Any, degrees: int) -> float:
    """Return how many standard deviations the chi-square of `counts` is from its mean."""
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_of_a_few_samples_is_equally_likely(n: int) -> None:
    orders = np.stack([permutation(n, 1, epoch)[:] for epoch in range(6000)])
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == math.factorial(n)
    assert abs(deviations(counts, counts.mean(), len(counts) - 1)) < 4


@pytest.mark.parametrize("n", [7, 16, 33, 100, _TABLE, _TABLE + 1, 2**13, 10_000])
def test_every_sample_is_equally_likely_at_every_place(n: int) -> None:
    bins = min(n, 16)
    counts = np.zeros((bins, bins))
    places = np.arange(n) * bins // n
    for epoch in range(max(20, 40_000 // n)):
        np.add.at(counts, (places, permutation(n, 5, epoch)[:] * bins // n), 1)
    expected = np.outer(np.bincount(places), np.bincount(places)) / n * max(20, 40_000 // n)
    assert abs(deviations(counts, expected, (bins - 1) ** 2)) < 4


@pytest.mark.parametrize("n", [1000, _TABLE + 1, 2**13, 10_007, 10**9])
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_not_correlated(n: int, lag: int) -> None:
    values = permutation(n, 3, 0)[np.arange(min(n, 100_000))].astype(float)
    correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
    assert abs(correlation) * math.sqrt(len(values)) < 4


@pytest.mark.parametrize("place", [0, 10**9 - 512])
def test_a_place_far_into_a_billion_costs_what_the_first_does(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    worked_on = []
    step = Permutation._step
    monkeypatch.setattr(Permutation, "_step", lambda self, value: worked_on.append(np.size(value)) or step(self, value))
    permutation(10**9, 0, 7)[np.arange(place, place + 512)]
    assert sum(worked_on) < 2 * 512, "cycle walking takes 2 ** 30 / 10 ** 9 steps a sample on average"
