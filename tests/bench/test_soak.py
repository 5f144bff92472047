"""A long run does not leak, and a leak would be noticed."""

from typing import Any

import pytest

from bench.reliability import soak


def sampled(resident: list[int], descriptors: list[int]) -> list[dict[str, Any]]:
    """Return what one rank held, sample by sample."""
    return [
        {"step": step, "processes": {"rank 0": {"resident_bytes": size, "descriptors": number}}}
        for step, (size, number) in enumerate(zip(resident, descriptors, strict=True))
    ]


def test_what_a_start_takes_and_what_a_save_opens_for_a_moment_is_no_leak() -> None:
    samples = sampled([50, 100, 100, 100, 100, 100, 100, 100, 100], [5, 5, 5, 6, 5, 5, 5, 5, 6])
    assert soak.is_flat(soak.growth(samples))


def test_memory_that_grows_and_one_descriptor_that_stays_open_are_leaks() -> None:
    steady = [100] * 9
    assert not soak.is_flat(soak.growth(sampled([100 + number for number in range(9)], steady)))
    assert not soak.is_flat(soak.growth(sampled(steady, [5, 5, 5, 5, 5, 6, 6, 6, 6])))


@pytest.mark.exhaustive
def test_a_hundred_steps_are_sampled_on_every_process() -> None:
    samples = soak.soak(100, 10)
    assert len(samples) >= 3
    assert {frozenset(each["processes"]) for each in samples} == {frozenset({"command", "rank 0", "rank 1"})}
    grown = soak.growth(samples)
    for rank in ("rank 0", "rank 1"):
        assert grown[rank]["objects"]["last_third"] > 100_000
        assert grown[rank]["descriptors"]["growth"] <= 0
        assert grown[rank]["children"]["last_third"] == 0
