"""Every recorded measurement is predicted anew, from its own definition, on whatever versions there are today.

None is skipped: where a newer torch, DeepSpeed or transformers takes other memory, the dry run runs the newer one and
the record is of the older. Then the failure says so, and the record is to be measured again.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frugal.dryrun.compare import Figures, Measurement
from frugal.dryrun.pool import Pool

FOLDER = Path(__file__).parents[1] / "measured"
RECORDS = sorted(FOLDER.glob("*.json"))


CPU_TOLERANCE = 0.005
"""The tolerated error of a prediction on CPU ranks, as a fraction of the measurement."""

CUDA_TOLERANCE, CUDA_LOW = 0.05, 0.02
"""The tolerated error on GPUs, and how much of it may be an underestimate."""


def read(path: Path) -> Measurement:
    return msgspec.json.decode(path.read_bytes(), type=Measurement)


def is_true(measurement: Measurement, again: Figures) -> bool:
    """Return whether a prediction is within the tolerance of the measurement."""
    off = replace(measurement, predicted=again).error
    if measurement.kind == "cpu":
        return abs(off) <= CPU_TOLERANCE
    return -CUDA_LOW <= off <= CUDA_TOLERANCE


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One worker for all records: to start another would take longer than all of them."""
    made = Pool(1)
    yield made
    made.close()


def test_there_are_records_of_every_zero_stage_and_of_more_than_one_rank() -> None:
    found = [read(path) for path in RECORDS]
    assert {each.strategy.zero_stage for each in found} == {0, 1, 2, 3}
    assert {each.batch.world_size for each in found} >= {1, 2}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_peak_is_predicted_today(path: Path, pool: Pool) -> None:
    found = read(path)
    again = found.predict(pool)
    others = {name: kept for name, kept in found.versions.items() if name != "python" and version(name) != kept}
    assert is_true(found, again), (
        f"predicted {again.peak_allocated_bytes:,} bytes, "
        f"measured {found.measured.peak_allocated_bytes:,} on {found.device}; "
        f"recorded with other versions than today's: {others or 'none'}; made by `{found.command}`"
    )


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_named_after_what_it_holds(path: Path) -> None:
    assert read(path).name == path.stem


def test_a_measurement_one_percent_from_its_prediction_is_not_true() -> None:
    found = read(RECORDS[0])
    assert is_true(found, found.predicted)
    size = found.measured.peak_allocated_bytes
    for wrong in (size * 101 // 100, size * 99 // 100):
        phases = {**found.measured.phases, found.measured.phase: wrong}
        other = replace(found, measured=replace(found.measured, peak_allocated_bytes=wrong, phases=phases))
        assert not is_true(other, found.predicted)


EMULATED = sorted((FOLDER / "emulated").glob("*.json"))
"""Runs on emulated CUDA cards (`python -m bench.emulated_gpu`): torch's own allocated and reserved bytes."""

ALLOCATED, RESERVED = 0.001, 0.01
"""How much a prediction may be off, as a share of what was measured."""

KNOWN: dict[str, dict[str, float]] = {
    # blocks that another stream still uses are replayed as free
    "gpt2-cuda-zero2-on-8-9b46cb94": {"optimizer step": 0.0012, "reserved": 0.022},
    # of the rank that is dry-run, the fullest at the peak; here the other one takes more
    "gpt2-cuda-zero1-on-2-13114df5": {"optimizer step": 0.03},
}
"""Records that are off by more: the bounds of these phases, or of `reserved`."""

EVERY = 10
"""Of so many records `make test` predicts one; a dry run takes a second or two."""


def one_in_every(paths: list[Path]) -> list[Any]:
    """All records, of which most are predicted by `make test-all` only."""
    marks = [[pytest.mark.exhaustive] * (number % EVERY != 0) for number in range(len(paths))]
    return [pytest.param(path, marks=each, id=path.stem) for path, each in zip(paths, marks, strict=True)]


SMALLER_SINCE = "optimizer step"
"""The phase that takes less than in records of before 27 November under ZeRO-1 and 2 in half precision: their engine
took the norm of each gradient from a copy in fp64, today's that of pieces."""


def is_smaller_since(record: Measurement) -> bool:
    """Return whether a run of today takes less in `SMALLER_SINCE`."""
    is_of_before = record.strategy.zero_stage in (1, 2) and record.request.precision != "fp32"
    return is_of_before and record.date < "2026-11-27"


def off(record: Measurement, found: Figures) -> list[str]:
    """Return what is further off than its bound."""
    measured = record.measured
    errors = {name: found.phases[name] / size - 1 for name, size in measured.phases.items()}
    bounds = dict.fromkeys(errors, ALLOCATED) | {"reserved": RESERVED} | KNOWN.get(record.name, {})
    errors["reserved"] = found.peak_reserved_bytes / measured.peak_reserved_bytes - 1
    if is_smaller_since(record):
        errors[SMALLER_SINCE] = max(0.0, errors[SMALLER_SINCE])
    wrong = [f"{name} {error:+.3%}" for name, error in errors.items() if abs(error) > bounds[name]]
    if found.phase != measured.phase:
        wrong.append(f"the peak is in {measured.phase}, not in {found.phase}")
    return wrong


def test_there_are_records_of_several_families_cards_stages_and_worlds() -> None:
    records = [read(path) for path in EMULATED]
    assert len(records) >= 30
    assert {each.kind for each in records} == {"cuda"}
    assert all(each.device.startswith("emulated ") and each.command and each.date for each in records)
    assert len({each.device for each in records}) == 4
    assert {each.strategy.zero_stage for each in records} == {0, 1, 2, 3}
    assert {each.batch.world_size for each in records} >= {1, 2, 4, 8}
    assert {path.stem for path in EMULATED} == {each.name for each in records} >= KNOWN.keys()


@pytest.mark.parametrize("path", one_in_every(EMULATED))
def test_allocated_and_reserved_bytes_are_predicted_today(path: Path, pool: Pool) -> None:
    record = read(path)
    assert off(record, record.predict(pool)) == []


REAL = sorted((FOLDER / "h200").glob("*.json"))
"""Runs on an H200 (`python -m bench.gpu.truth`), with predictions that were made without one."""


@pytest.mark.parametrize("path", one_in_every(REAL))
def test_a_real_cards_bytes_are_predicted_exactly(path: Path, pool: Pool) -> None:
    record = read(path)
    found, measured = record.predict(pool), record.measured
    phases = dict(found.phases)
    if is_smaller_since(record) and phases[SMALLER_SINCE] < measured.phases[SMALLER_SINCE]:
        phases[SMALLER_SINCE] = measured.phases[SMALLER_SINCE]
    assert phases == measured.phases
    assert (found.peak_reserved_bytes, found.smallest_capacity_bytes) == (
        measured.peak_reserved_bytes,
        record.predicted.smallest_capacity_bytes,
    )
    assert record.capped is not None and record.capped.limit_bytes == found.smallest_capacity_bytes
    assert record.capped.survived


@pytest.mark.parametrize("path", EMULATED[:1] + EMULATED[-1:], ids=lambda path: path.stem)
def test_a_prediction_beyond_its_bound_is_noticed(path: Path) -> None:
    record = read(path)
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
