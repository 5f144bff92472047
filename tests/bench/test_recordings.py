"""Recordings of real cards are replayed, most to the byte; a snapshot is read without running code."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from bench.recordings import __main__ as table
from bench.recordings.recording import FOLDER, Recording, kept
from bench.recordings.snapshot import SnapshotError, read

WORST = 0.005
"""Of what is reserved, where segments were in use before the recording began: their history is not known."""

FILES = sorted(FOLDER.glob("*.json.xz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.xz"))
def test_a_recorded_stream_of_a_real_card_comes_to_its_segments_and_blocks(path: Path) -> None:
    recording = Recording.read(path)
    if recording.is_clean:
        assert recording.reserved_error == recording.allocated_error == 0
    assert abs(recording.reserved_error) < WORST
    assert abs(recording.allocated_error) < WORST / 5


def test_most_come_out_to_the_byte_and_the_kept_results_say_so() -> None:
    rows = [table.row(recording) for recording in kept()]
    made = json.loads(table.RESULTS.read_text())
    assert made["rows"] == rows and made["summary"] == table.summary(rows)
    assert made["summary"]["reserved_error"]["median"] == made["summary"]["allocated_error"]["median"] == 0
    assert all(len(recording.source.commit) == 40 and recording.script for recording in kept())


def event(action: str, addr: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0}


def snapshot(history: list[dict[str, Any]], segments: list[dict[str, Any]]) -> bytes:
    return pickle.dumps({"device_traces": [[], history], "segments": segments})


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
    (tmp_path / "s.pickle").write_bytes(snapshot(history, [SEGMENT]))
    found = read(tmp_path / "s.pickle")
    assert (found.requests.sizes, found.num_before, found.is_clean) == ([700, 300], 1, False)
    assert (found.reserved_bytes, found.allocated_at_end_bytes) == (2 << 20, 1024)


def test_what_was_given_back_before_the_first_request_leaves_a_clean_start(tmp_path: Path) -> None:
    history = [
        event("segment_free", 1 << 24, 20 << 20),
        event("segment_alloc", 1 << 20, 2 << 20),
        event("alloc", 1 << 20, 700),
    ]
    (tmp_path / "s.pickle").write_bytes(snapshot(history, [SEGMENT]))
    found = read(tmp_path / "s.pickle")
    assert (found.requests.sizes, found.num_before, found.is_clean) == ([700], 0, True)
    assert found.reserved_bytes == 20 << 20


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
