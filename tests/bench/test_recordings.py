"""Recordings of real cards are replayed to the byte; a snapshot is read without running code."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import streams
from bench.recordings import __main__ as table
from bench.recordings import addresses
from bench.recordings.recording import FOLDER, Recording, kept
from bench.recordings.snapshot import Snapshot, SnapshotError, read

FILES = sorted(FOLDER.glob("*.json.xz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.xz"))
def test_a_recorded_stream_of_a_real_card_comes_to_its_segments_and_blocks(path: Path) -> None:
    recording = Recording.read(path)
    assert recording.reserved_error == recording.allocated_error == 0
    if recording.printed_peak_gib is not None:
        assert round(recording.peak_allocated_bytes / 2**30, 2) == recording.printed_peak_gib


def test_the_kept_results_are_those_of_today_and_of_several_cards_and_versions() -> None:
    rows = [table.row(recording) for recording in kept()]
    made = json.loads(table.RESULTS.read_text())
    summary = made["summary"]
    assert made["rows"] == rows and summary == table.summary(rows)
    assert summary["recordings"] >= 60 and summary["card"] >= 4 and summary["torch"] >= 4
    assert summary["printed_peaks"]["printed"] == summary["printed_peaks"]["same"] >= 10
    assert all(len(recording.source.commit) == 40 and recording.script for recording in kept())


def test_a_stream_of_other_sizes_comes_out_otherwise() -> None:
    recording = Recording.read(FOLDER / "transformer-4-layers-ctx100-step.json.xz")
    recording.stream.sizes[:] = [size + size // 8 for size in recording.stream.sizes]
    assert recording.reserved_error > 0.05
    assert recording.allocated_error > 0.05


def event(action: str, addr: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0}


def snapshot(history: list[dict[str, Any]], segments: list[dict[str, Any]]) -> bytes:
    return pickle.dumps({"device_traces": [[], history], "segments": segments})


def read_of(history: list[dict[str, Any]], segment: dict[str, Any], folder: Path) -> Snapshot:
    (folder / "s.pickle").write_bytes(snapshot(history, [segment]))
    return read(folder / "s.pickle")


SEGMENT = {
    "device": 1, "address": 1 << 20, "total_size": 2 << 20, "allocated_size": 1024, "stream": 0,
    "blocks": [
        {"size": 1024, "requested_size": 700, "state": "active_allocated"},
        {"size": (2 << 20) - 1024, "state": "inactive"},
    ],
}  # fmt: skip


def test_a_block_from_before_the_recording_is_requested_first(tmp_path: Path) -> None:
    history = [
        event("alloc", (1 << 20) + 1024, 300),
        *(event(f"free_{each}", (1 << 20) + 1024, 300) for each in ("requested", "completed")),
    ]
    found = read_of(history, SEGMENT, tmp_path)
    rest = (2 << 20) - 1024
    assert found.requests.sizes == [1024, 1 << 20, rest - (1 << 20), 300]
    assert found.requests.events == [0, 0, 0, 2, 1, 0, 1]
    assert (found.num_before, found.is_clean) == (3, False)
    assert (found.reserved_bytes, found.allocated_at_end_bytes) == (2 << 20, 1024)


def test_a_rest_that_was_not_split_off_belongs_to_its_block_and_what_lies_beyond_was_free(tmp_path: Path) -> None:
    mib = 1 << 20
    history = [
        event("alloc", 6 * mib, 2 * mib),  # behind 3 MiB at 2 MiB: so 1 MiB of rest
        *(event(f"free_{each}", 2 * mib, 3 * mib) for each in ("requested", "completed")),
    ]
    states = ((4, "inactive"), (2, "active_allocated"), (14, "inactive"))
    blocks = [{"size": size * mib, "state": state} for size, state in states]
    large = {**SEGMENT, "address": 2 * mib, "total_size": 20 * mib, "allocated_size": 2 * mib, "blocks": blocks}
    found = read_of(history, large, tmp_path)
    assert found.requests.sizes == [20 * mib, 4 * mib, 16 * mib, 2 * mib]
    assert found.requests.events == [0, 1, 0, 0, 1, 0, 3]


def test_what_was_given_back_before_the_first_request_was_there_and_the_cache_is_emptied(tmp_path: Path) -> None:
    segments = event("segment_free", 1 << 24, 20 << 20), event("segment_alloc", 1 << 20, 2 << 20)
    history = [*segments, event("alloc", 1 << 20, 700)]
    found = read_of(history, SEGMENT, tmp_path)
    assert (found.requests.sizes, found.num_before, found.is_clean) == ([20 << 20, 20 << 20, 700], 2, False)
    assert found.requests.empty_caches == [4]
    assert found.reserved_bytes == 20 << 20


def test_new_segments_are_compared_with_where_the_model_puts_them(tmp_path: Path) -> None:
    """44 MiB, 44 below, and 20 behind the lower ones: neither all down nor all up."""
    mib = 1 << 20
    top = 1 << 46
    placed = [(44, top), (44, top - 64 * mib), (20, top - 20 * mib)]
    history = [event("segment_alloc", address, size * mib) for size, address in placed]
    segments = [{**SEGMENT, "address": address, "total_size": size * mib} for size, address in placed]
    (tmp_path / "s.pickle").write_bytes(snapshot([*history, event("alloc", top, 44 * mib)], segments))
    found = addresses.compared(tmp_path / "s.pickle")
    assert found == {"as planned": (3, 3), "down": (2, 3), "up": (1, 3)}


@pytest.mark.parametrize(("placed", "fall"), [((9, 5, 2), True), ((2, 5, 9), False), ((9, 5, 6, 1), True), ((), False)])
def test_a_stream_says_whether_its_addresses_fall(placed: tuple[int, ...], fall: bool) -> None:
    history = [event("segment_alloc", address << 25, 20 << 20) for address in placed]
    small = [event("segment_alloc", address << 21, 2 << 20) for address in range(8)]
    assert streams.addresses_fall([*small, *history]) == fall


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this ran",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(Harmful()), "it names builtins.print, and a snapshot has plain values only"),
        (snapshot([event("alloc", 1, 1)], [SEGMENT])[:60], "it cannot be read as a snapshot"),
        (pickle.dumps([1, 2]), "it cannot be read as a snapshot"),
        (b"", "it cannot be read as a snapshot"),
        (snapshot([], [SEGMENT]), "no device has a recorded request"),
        (snapshot([event("alloc", 1, 1)], [{"total_size": "many"}]), "it cannot be read as a snapshot"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_one_sentence(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)
    assert capsys.readouterr().out == ""
