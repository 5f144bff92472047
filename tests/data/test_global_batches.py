"""Global batches: the order in pieces, none lost, none twice, resumable from one number."""

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugal.data import batches as global_batches
from frugal.data.batches import GlobalBatch, GlobalBatches, Position, permutation
from frugal.errors import RequestError


class Recorder(Sequence[dict[str, int]]):
    """A data set that remembers what was read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return {"value": index}


def indices(batches: Sequence[GlobalBatch]) -> list[int]:
    return [int(index) for batch in batches for index in batch.indices]


@given(n=st.integers(1, 60), size=st.integers(1, 100), seed=st.integers(0, 5))
@settings(deadline=None)
def test_batches_are_the_epochs_one_after_another(n: int, size: int, seed: int) -> None:
    batches = GlobalBatches(range(n), global_batch=size, seed=seed)
    drawn = indices(list(islice(batches.iterate(), 3 * n // size + 2)))
    expected = [int(index) for epoch in range(3 + 2 * size // n + 1) for index in permutation(n, seed, epoch)[:]]
    assert drawn == expected[: len(drawn)]
    assert all(batch_size == size for batch_size in map(len, islice(batches.iterate(), 5)))


@given(n=st.integers(1, 50), size=st.integers(1, 70), steps=st.integers(0, 40))
@settings(deadline=None)
def test_a_batch_can_be_had_without_those_before_it(n: int, size: int, steps: int) -> None:
    batches = GlobalBatches(range(n), global_batch=size, seed=3)
    *_, last = islice(batches.iterate(), steps + 1)
    assert batches.after(steps) == last.start
    assert (batches.at(last.start).indices == last.indices).all()


def test_a_batch_reads_only_the_samples_that_are_asked_for_and_a_sample_knows_its_draw() -> None:
    data = Recorder(1000)
    batch = GlobalBatches(data, global_batch=100, seed=0).at(Position(2, 30))
    assert data.read == []
    assert batch[7]["value"] == batch.indices[7]
    assert data.read == [int(batch.indices[7])]
    batch = GlobalBatches(Recorder(10), global_batch=4, seed=0).at(Position(2, 8))
    assert [sample["draw"] for sample in batch] == [28, 29, 30, 31]
    assert batch[-1] == batch[3]
    assert batch.end == Position(3, 2)


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)


@given(lengths=LENGTHS, target=st.integers(30, 200), seed=st.integers(0, 5))
@settings(deadline=None)
def test_a_token_batch_is_never_over_its_target_and_never_leaves_out_a_sample_that_fits(
    lengths: list[int], target: int, seed: int
) -> None:
    tokens = np.array(lengths)
    batches = GlobalBatches(range(len(lengths)), global_tokens=target, lengths=tokens, seed=seed)
    taken = list(islice(batches.iterate(), 10))
    for batch, following in pairwise(taken):
        total = tokens[batch.indices].sum()
        assert total <= target < total + tokens[following.indices[0]]


def test_token_batches_resume_at_any_position() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 300)
    batches = GlobalBatches(range(300), global_tokens=4096, lengths=lengths, seed=2)
    whole = list(islice(batches.iterate(), 80))
    again = GlobalBatches(range(300), global_tokens=4096, lengths=lengths, seed=2)
    assert indices(list(islice(again.iterate(whole[40].start), 40))) == indices(whole[40:])
    assert again.after(40) == whole[40].start


@pytest.mark.parametrize("stretch", [1, 7, 64, global_batches._STRETCH])
def test_the_steps_of_epochs_of_tokens_are_those_that_walking_them_counts(
    stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_batches, "_STRETCH", stretch)
    for n, tokens in ((1, 60), (5, 60), (20, 100), (50, 5000), (200, 128)):
        lengths = np.random.default_rng(n).integers(1, 60, n)
        batches = GlobalBatches(range(n), global_tokens=tokens, lengths=lengths, seed=n)
        for epochs in (1, 2, 3):
            steps = batches.steps(epochs)
            assert batches.after(steps).epoch >= epochs > batches.after(steps - 1).epoch


def test_no_data_and_samples_beyond_the_target_are_refused() -> None:
    with pytest.raises(RequestError, match="there is no sample to train on"):
        GlobalBatches([], global_batch=4)
    with pytest.raises(RequestError, match="sample 1 does not fit into a global batch of 100 tokens"):
        GlobalBatches(range(3), global_tokens=100, lengths=np.array([5, 101, 7]))
