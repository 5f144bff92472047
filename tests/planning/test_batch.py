"""A global batch is cut into micro-batches exactly: nothing lost, nothing invented, nothing over a cap."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugal.errors import RequestError
from frugal.planning.batch import BatchPlan, MicroSteps, balanced


@settings(max_examples=500)
@given(st.integers(1, 2000), st.integers(1, 40), st.integers(1, 24))
def test_every_batch_is_exact_even_and_in_the_fewest_steps(global_batch: int, cap: int, world_size: int) -> None:
    made = BatchPlan.of(global_batch, (cap,) * world_size)
    sizes = [size for row in made.sizes for size in row]
    totals = [sum(row) for row in made.sizes]
    assert sum(sizes) == global_batch
    assert made.accumulation_steps == -(-global_batch // (cap * world_size))
    assert max(sizes) <= cap
    assert max(sizes) - min(sizes) <= 1
    assert max(totals) - min(totals) <= 1


@given(st.integers(1, 5000), st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_mixed_caps_are_kept_and_shared_in_proportion(global_batch: int, caps: list[int]) -> None:
    made = BatchPlan.of(global_batch, caps)
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
            BatchPlan.of(global_batch, (cap,) * world_size, accumulation_steps=num_steps)
        return
    made = BatchPlan.of(global_batch, (cap,) * world_size, accumulation_steps=num_steps)
    sizes = [size for row in made.sizes for size in row]
    assert made.accumulation_steps == num_steps
    assert sum(sizes) == global_batch
    assert max(sizes) <= cap
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 1000), st.lists(st.integers(1, 16), min_size=1, max_size=9))
def test_micro_batches_lie_in_the_batch_without_gap_or_overlap(global_batch: int, caps: list[int]) -> None:
    made = BatchPlan.of(global_batch, caps)
    covered = sorted(
        position
        for rank, row in enumerate(made.sizes)
        for start, size in zip(made.starts_of(rank), row, strict=True)
        for position in range(start, start + size)
    )
    assert covered == list(range(global_batch))
    assert [made.sizes_of(rank) for rank in range(len(caps))] == list(made.sizes)


@given(st.integers(1, 500), st.lists(st.integers(1, 16), min_size=1, max_size=9), st.integers(1, 500))
def test_tightened_caps_are_filled_and_hold_the_same_steps_and_any_other_batch(
    global_batch: int, caps: list[int], other: int
) -> None:
    batch = BatchPlan.of(global_batch, tuple(caps))
    tight = batch.tightened()
    assert [sum(step) for step in zip(*tight.sizes, strict=True)] == [
        sum(step) for step in zip(*batch.sizes, strict=True)
    ]
    for cap in set(tight.micro_batch):
        rows = [row for row, other_cap in zip(tight.sizes, tight.micro_batch, strict=True) if other_cap == cap]
        assert max(1, *map(max, rows)) == cap
    assert all(now <= before for now, before in zip(tight.micro_batch, caps, strict=True))
    assert tight.resized(global_batch).sizes == tight.sizes
    assert tight.resized(other).global_batch == other
    assert max(tight.micro_batch) == max(1, batch.largest_micro_batch)


def test_a_thousand_ranks_and_micro_steps_are_a_few_numbers() -> None:
    batch = BatchPlan.of(10_000_000, (5, 11) * 512)
    assert batch.accumulation_steps == 1221
    assert batch.micro_steps == (
        MicroSteps(count=10, samples=(2560, 5631)),
        MicroSteps(count=1211, samples=(2559, 5631)),
    )
    assert sum(batch.sizes_of(0)) + sum(batch.sizes_of(1)) in range(
        2 * 10_000_000 // 1024 - 2, 2 * 10_000_000 // 1024 + 3
    )


@given(st.data(), st.integers(1, 9))
def test_balanced_caps_hold_the_step_and_no_other_caps_end_it_sooner(data: st.DataObject, world_size: int) -> None:
    caps = data.draw(st.lists(st.integers(1, 5), min_size=world_size, max_size=world_size))
    speeds = data.draw(st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.1e14]), min_size=world_size, max_size=world_size))
    samples = data.draw(st.integers(1, sum(caps)))
    found = balanced(samples, caps, speeds)
    assert sum(found) >= samples
    assert all(1 <= now <= cap for now, cap in zip(found, caps, strict=True))
    seconds = max((size / speed for size, speed in zip(found, speeds, strict=True) if size > 1), default=0)
    for sooner in (size / speed for cap, speed in zip(caps, speeds, strict=True) for size in range(cap + 1)):
        if sooner < seconds * (1 - 1e-9):
            taken = [min(cap, int(sooner * speed * (1 + 1e-12))) for cap, speed in zip(caps, speeds, strict=True)]
            assert sum(taken) < samples


def test_ranks_of_twice_the_speed_take_twice_the_samples_where_memory_allows() -> None:
    assert balanced(24, (100,) * 4, (1.0, 1.0, 2.0, 2.0)) == (4, 4, 8, 8)
    assert balanced(24, (100, 100, 6, 100), (1.0, 1.0, 2.0, 2.0)) == (5, 5, 6, 10)


@pytest.mark.parametrize(
    ("global_batch", "caps", "said"),
    [
        (0, (1,), "a global batch of 0 samples trains nothing"),
        (-4, (1,), "a global batch of -4 samples trains nothing"),
        (8, (4, 0), "a micro-batch cap of 0 leaves a rank without samples"),
    ],
)
def test_a_batch_or_a_cap_below_one_sample_is_refused(global_batch: int, caps: tuple[int, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        BatchPlan.of(global_batch, caps)


def test_a_batch_is_sent_to_another_process_whatever_was_asked_of_it_before() -> None:
    batch = BatchPlan.of(100, (3, 5, 5))
    assert batch.sizes and batch.largest_micro_batch and batch.groups
    assert pickle.loads(pickle.dumps(batch)) == batch
