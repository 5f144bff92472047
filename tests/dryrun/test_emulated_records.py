"""Runs on emulated CUDA cards, predicted anew: allocated bytes of each phase and reserved bytes, torch's own.

Each file of tests/measured/emulated is one configuration of `python -m bench.emulated_gpu`. What is further off than
promised has a bound of its own here, with the reason.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from frugal.dryrun.compare import Measurement
from frugal.dryrun.figures import Figures
from frugal.dryrun.pool import Pool

FOLDER = Path(__file__).parents[1] / "measured" / "emulated"
RECORDS = sorted(FOLDER.glob("*.json"))
ALLOCATED, RESERVED = 0.001, 0.01
"""How much a prediction may be off, as a share of what was measured."""

KNOWN: dict[str, dict[str, float]] = {
    # blocks that another stream still uses are replayed as free
    "gpt2-cuda-zero2-on-8-9b46cb94": {"optimizer step": 0.0012, "reserved": 0.022},
}
"""Records that are off by more: the bounds of these phases, or of `reserved`."""

EVERY = 6
"""Of so many records `make test` predicts one; a dry run takes a second or two."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One worker for all records."""
    made = Pool(1)
    yield made
    made.close()


def off(record: Measurement, found: Figures) -> list[str]:
    """What is further off than its bound."""
    measured = record.measured
    errors = {name: found.phases[name] / size - 1 for name, size in measured.phases.items()}
    bounds = dict.fromkeys(errors, ALLOCATED) | {"reserved": RESERVED} | KNOWN.get(record.name, {})
    errors["reserved"] = found.peak_reserved_bytes / measured.peak_reserved_bytes - 1
    wrong = [f"{name} {error:+.3%}" for name, error in errors.items() if abs(error) > bounds[name]]
    if found.phase != measured.phase:
        wrong.append(f"the peak is in {measured.phase}, not in {found.phase}")
    return wrong


def test_there_are_records_of_several_families_cards_stages_and_worlds() -> None:
    records = [Measurement.read(path) for path in RECORDS]
    assert len(records) >= 30
    assert {each.kind for each in records} == {"cuda"}
    assert all(each.device.startswith("emulated ") and each.command and each.date for each in records)
    assert len({each.device for each in records}) == 4
    assert {each.strategy.zero_stage for each in records} == {0, 1, 2, 3}
    assert {each.batch.world_size for each in records} >= {1, 2, 4, 8}
    assert {path.stem for path in RECORDS} == {each.name for each in records} >= KNOWN.keys()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.exhaustive] * (number % EVERY != 0), id=path.stem)
        for number, path in enumerate(RECORDS)
    ],
)
def test_allocated_and_reserved_bytes_are_predicted_today(path: Path, pool: Pool) -> None:
    record = Measurement.read(path)
    assert off(record, record.predict(pool)) == []


@pytest.mark.parametrize("path", RECORDS[:1] + RECORDS[-1:], ids=lambda path: path.stem)
def test_a_prediction_beyond_its_bound_is_noticed(path: Path) -> None:
    record = Measurement.read(path)
    measured = record.measured
    figures = replace(
        record.predicted,
        phase=measured.phase,
        phases=dict(measured.phases),
        peak_reserved_bytes=measured.peak_reserved_bytes,
        peak_allocated_bytes=measured.peak_allocated_bytes,
        categories={"parameters": measured.peak_allocated_bytes},
    )
    assert off(record, figures) == []
    for wrong in (1 + 2 * RESERVED, 1 - 2 * RESERVED):
        reserved = int(measured.peak_reserved_bytes * wrong)
        assert len(off(record, replace(figures, peak_reserved_bytes=reserved))) == 1
    for phase, size in measured.phases.items():
        if phase != measured.phase:
            phases = measured.phases | {phase: int(size * (1 - 2 * ALLOCATED))}
            assert len(off(record, replace(figures, phases=phases))) == 1, phase
