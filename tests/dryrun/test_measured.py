"""Every recorded measurement is predicted anew, from its own definition, on whatever versions there are today.

None is skipped: where a newer torch, DeepSpeed or transformers takes other memory, the dry run runs the newer one and
the record is of the older. Then the failure says so, and the record is to be measured again.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from frugal.dryrun.compare import CPU_TOLERANCE, CUDA_LOW, CUDA_TOLERANCE, Measurement, error
from frugal.dryrun.figures import Figures
from frugal.dryrun.pool import Pool
from frugal.errors import RequestError

FOLDER = Path(__file__).parents[1] / "measured"
RECORDS = sorted(FOLDER.glob("*.json"))


def is_true(measurement: Measurement, again: Figures) -> bool:
    """Return whether a prediction is within the tolerance of the measurement."""
    off = error(again, measurement.measured)
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
    found = [Measurement.read(path) for path in RECORDS]
    assert {each.strategy.zero_stage for each in found} == {0, 1, 2, 3}
    assert {each.batch.world_size for each in found} >= {1, 2}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_peak_is_predicted_today(path: Path, pool: Pool) -> None:
    found = Measurement.read(path)
    again = found.predict(pool)
    others = {name: kept for name, kept in found.versions.items() if name != "python" and version(name) != kept}
    assert is_true(found, again), (
        f"predicted {again.peak_allocated_bytes:,} bytes, "
        f"measured {found.measured.peak_allocated_bytes:,} on {found.device}; "
        f"recorded with other versions than today's: {others or 'none'}; made by `{found.command}`"
    )


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_named_after_what_it_holds(path: Path) -> None:
    assert Measurement.read(path).name == path.stem


def test_a_measurement_one_percent_from_its_prediction_is_not_true() -> None:
    found = Measurement.read(RECORDS[0])
    assert is_true(found, found.predicted)
    size = found.measured.peak_allocated_bytes
    for wrong in (size * 101 // 100, size * 99 // 100):
        phases = {**found.measured.phases, found.measured.phase: wrong}
        other = replace(found, measured=replace(found.measured, peak_allocated_bytes=wrong, phases=phases))
        assert not is_true(other, found.predicted)


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(RECORDS[0].read_bytes()[:500])
    with pytest.raises(RequestError, match="is not a measurement"):
        Measurement.read(path)
