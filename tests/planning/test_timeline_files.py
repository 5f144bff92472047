"""Timelines as files: torch's own reader follows a snapshot."""

import pickle
from pathlib import Path

import pytest
from torch.cuda import _memory_viz

from frugal.errors import RequestError
from frugal.planning.memory import timeline_files
from frugal.planning.memory.timeline import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    PARAMETERS,
    TEMPORARY,
    Timeline,
    TimelineBuilder,
)


def timeline(activations: int = 3) -> Timeline:
    """A forward that keeps so many activations of 1000 bytes, each beside something temporary, and its backward."""
    builder = TimelineBuilder()
    builder.phase("initialisation")
    builder.born(5000, PARAMETERS, "to device")
    builder.phase(FORWARD)
    kept = []
    for layer in range(activations):
        kept.append(builder.born(1000, ACTIVATIONS, "aten.mm.default", f"layers.{layer}"))
        builder.events.append(builder.born(300, TEMPORARY, "aten.mul.Tensor", f"layers.{layer}"))
    builder.phase(BACKWARD)
    builder.events.extend(reversed(kept))
    return builder.timeline()


def test_torchs_own_reader_follows_a_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "memory.pickle"
    timeline_files.write(file, {"predicted": timeline(), "measured": timeline(4)})
    snapshot = pickle.loads(file.read_bytes())
    told = _memory_viz.trace(snapshot)
    predicted, measured = told.split("Device 1 ")
    assert "13 entries" in predicted and "17 entries" in measured
    assert predicted.count("MEM[") == 7 and predicted.count("# free completed for") == 6
    assert "aten.mm.default" in str(snapshot["device_traces"][0][1]["frames"])
    assert "<script" in _memory_viz.trace_plot(snapshot)


def test_live_bytes_of_a_snapshot_are_those_of_the_timeline() -> None:
    made = timeline()
    (entries,) = timeline_files.snapshot({"predicted": made})["device_traces"]
    alive: dict[int, int] = {}
    most = 0
    for entry in entries:
        if entry["action"] == "alloc":
            assert entry["addr"] not in alive
            alive[entry["addr"]] = entry["size"]
            most = max(most, sum(alive.values()))
        else:
            assert alive.pop(entry["addr"]) == entry["size"]
    assert most == made.peak_bytes(1) == 8300
    assert sum(alive.values()) == 5000


def test_a_timeline_without_categories_claims_none(tmp_path: Path) -> None:
    """A measured one knows sizes and times only."""
    builder = TimelineBuilder()
    builder.phase(FORWARD)
    builder.events.append(builder.born(300, TEMPORARY, ""))
    measured = builder.timeline()
    (entries,) = timeline_files.snapshot({"measured": measured})["device_traces"]
    assert not any("temporary" in str(entry["frames"]) for entry in entries)


@pytest.mark.parametrize(("name", "has_table"), [("a.png", True), ("a.csv", False), ("none/a.pickle", True)])
def test_what_cannot_be_written_is_refused_before_the_work(name: str, has_table: bool, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a timeline cannot be written"):
        timeline_files.check_file(tmp_path / name, has_table=has_table)


@pytest.mark.parametrize("name", ["a.csv", "a.pickle"])
def test_every_kind_of_file_is_accepted(name: str, tmp_path: Path) -> None:
    timeline_files.check_file(tmp_path / name)
    timeline_files.write(tmp_path / name, {"predicted": timeline()})
    assert (tmp_path / name).stat().st_size > 100
