"""The allocator's model against torch's own: the same requests come to the same peaks, to the byte.

The streams were taken from real runs of torch's CUDA build (`bench.gpu.streams` says how), most of them on emulated
cards. Nothing of ours made their peaks.
"""

from pathlib import Path

import pytest

from bench.gpu.streams import Stream
from frugal.units import MIB

FOLDER = Path(__file__).parents[1] / "measured" / "streams"
FILES = sorted(FOLDER.glob("*.json.xz"))


def test_there_are_streams_of_every_zero_stage_cards_and_both_kinds_of_segments() -> None:
    streams = [Stream.read(path) for path in FILES]
    assert len(streams) >= 40
    assert {stage for each in streams for stage in range(4) if f"zero{stage}" in each.name} >= {0, 2, 3}
    assert len({each.device for each in streams}) >= 2
    assert {each.expandable_segments for each in streams} == {False, True}
    assert sum(path.stat().st_size for path in FILES) < 4_000_000
    for each in streams:
        assert each.date and each.command and each.versions.keys() >= {"torch", "deepspeed"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.xz"))
def test_the_requests_of_a_run_come_to_torchs_own_peaks(path: Path) -> None:
    stream = Stream.read(path)
    found = stream.replays().under()
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (
        stream.peak_allocated_bytes,
        stream.reserved_bytes,
    )


def test_larger_requests_come_to_other_peaks() -> None:
    for path in FILES[:3]:
        stream = Stream.read(path)
        stream.sizes[:] = [size + MIB for size in stream.sizes]
        found = stream.replays().under()
        assert found.peak_allocated_bytes > stream.peak_allocated_bytes
        assert found.peak_reserved_bytes != stream.reserved_bytes
