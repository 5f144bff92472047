"""How many measurements lie within the bounds of plans is counted, and a row that does not is named."""

from typing import Any

import msgspec
import pytest

from bench.memory.coverage import RESULTS, of_gpu, report, rows
from frugal.units import GIB, MIB

NEEDED = 10 * GIB


def gpu_row(**changes: Any) -> dict[str, Any]:
    """A run on a GPU whose requests needed 10 GiB, as was predicted."""
    answer = {"phases": {"backward": 9 * GIB}, "of_gpu": {"reserved_bytes": 11 * GIB}, "survived": True}
    return {
        "name": "gpt2",
        "prediction": {
            "configuration": {"card": "a100-80g"},
            "figures": {
                "peak_allocated_bytes": 9 * GIB, "smallest_capacity_bytes": NEEDED, "categories": {"rounding": MIB},
            },
        },
        "runs": {"free": {"cap_bytes": None, "answer": answer}},
        "measured_bytes": 9 * GIB,
        "capacity_bytes": NEEDED,
    } | changes  # fmt: skip


def test_every_run_on_cpu_ranks_is_within_the_bounds() -> None:
    measured = list(rows(msgspec.json.decode((RESULTS / "accuracy-cpu.json").read_bytes())))
    assert len(measured) > 90
    assert all(row.is_inside for row in measured)


@pytest.mark.parametrize(
    ("off", "is_inside"), [(0, True), (100 * MIB, True), (-100 * MIB, True), (GIB, False), (-GIB, False)]
)
def test_what_needs_much_more_or_less_than_predicted_is_outside(off: int, is_inside: bool) -> None:
    row = of_gpu(gpu_row(capacity_bytes=NEEDED + off), is_known_card=True)
    assert row is not None
    assert row.is_inside == is_inside
    assert len(report("some", [row])) == (1 if is_inside else 2)


def test_without_its_requests_a_run_needed_what_it_went_through_with() -> None:
    kept_less = gpu_row(capacity_bytes=0)
    free = of_gpu(kept_less, is_known_card=True)
    capped = {"cap_bytes": NEEDED, "answer": {"survived": True}}
    survived = of_gpu(kept_less | {"runs": kept_less["runs"] | {"capped": capped}}, is_known_card=True)
    assert free is not None and survived is not None
    assert (free.needed_bytes, survived.needed_bytes) == (11 * GIB, NEEDED)
    assert (free.is_inside, survived.is_inside) == (False, True)


def test_a_run_that_failed_counts_for_nothing() -> None:
    assert of_gpu(gpu_row(measured_bytes=0), is_known_card=True) is None
    assert report("none", []) == ["none: nothing measured"]
