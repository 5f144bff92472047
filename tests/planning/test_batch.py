"""A global batch is cut into cells exactly: nothing lost, nothing invented, nothing over a cap."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frugal.errors import RequestError
from frugal.planning.batch import cells
from frugal.planning.plan import Batch

CAPS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
WORLDS = [1, 2, 3, 4, 6, 8, 12, 16]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("cap", CAPS)
def test_every_batch_is_exact_even_and_in_the_fewest_steps(cap: int, world_size: int) -> None:
    for global_batch in range(1, 513):
        made = cells(global_batch, (cap,) * world_size)
        sizes = [size for row in made.sizes for size in row]
        totals = [sum(row) for row in made.sizes]
        assert sum(sizes) == global_batch
        assert made.accumulation_steps == -(-global_batch // (cap * world_size))
        assert max(sizes) <= cap
        assert max(sizes) - min(sizes) <= 1
        assert max(totals) - min(totals) <= 1


@given(st.integers(1, 5000), st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_mixed_caps_are_kept_and_shared_in_proportion(global_batch: int, caps: list[int]) -> None:
    made = cells(global_batch, caps)
    assert made.global_batch == global_batch
    assert made.accumulation_steps == -(-global_batch // sum(caps))
    for cap, row in zip(caps, made.sizes, strict=True):
        due = global_batch * cap / sum(caps)
        assert max(row) <= cap
        assert min(row) >= 0
        assert abs(sum(row) - due) < len(row) + 1


@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 12), st.integers(1, 40))
def test_pinned_steps_are_kept_or_refused(global_batch: int, cap: int, world_size: int, num_steps: int) -> None:
    possible = num_steps <= global_batch <= num_steps * cap * world_size
    if not possible:
        with pytest.raises(RequestError, match="cannot hold a global batch"):
            cells(global_batch, (cap,) * world_size, num_steps=num_steps)
        return
    made = cells(global_batch, (cap,) * world_size, num_steps=num_steps)
    sizes = [size for row in made.sizes for size in row]
    assert made.accumulation_steps == num_steps
    assert sum(sizes) == global_batch
    assert max(sizes) <= cap
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 1000), st.lists(st.integers(1, 16), min_size=1, max_size=9))
def test_cells_lie_in_the_batch_without_gap_or_overlap(global_batch: int, caps: list[int]) -> None:
    made = cells(global_batch, caps)
    covered = sorted(
        position
        for rank, row in enumerate(made.sizes)
        for start, size in zip(made.starts(rank), row, strict=True)
        for position in range(start, start + size)
    )
    assert covered == list(range(global_batch))


@given(st.integers(1, 500), st.lists(st.integers(1, 16), min_size=1, max_size=9), st.integers(1, 500))
def test_tightened_caps_still_hold_the_same_cells_and_any_other_batch(
    global_batch: int, caps: list[int], other: int
) -> None:
    batch = Batch.of(global_batch, tuple(caps))
    tight = batch.tightened()
    assert tight.cells == batch.cells
    assert tight.cells_for(global_batch).sizes == batch.cells
    assert tight.cells_for(other).global_batch == other
    assert max(tight.micro_batch) == max(1, batch.largest_cell)


def test_a_batch_smaller_than_the_world_leaves_cells_empty() -> None:
    assert cells(2, (4, 4, 4)).sizes == ((1,), (1,), (0,))


@pytest.mark.parametrize("global_batch", [0, -4])
def test_a_batch_below_one_sample_is_refused(global_batch: int) -> None:
    with pytest.raises(RequestError, match=re.escape(f"a global batch of {global_batch} samples trains nothing")):
        cells(global_batch, (1,))


def test_a_cap_below_one_sample_is_refused() -> None:
    with pytest.raises(RequestError, match="leave a rank without samples"):
        cells(8, (4, 0))
