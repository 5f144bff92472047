"""A damaged entry of the cache is no entry; it is made again."""

from pathlib import Path

import msgspec
import pytest

from frugal.dryrun.cache import Cache
from frugal.planning.memory.breakdown import MemoryBreakdown

GOOD = MemoryBreakdown(
    parameters=1, gradients=2, optimizer=3, activations=4, logits=0, communication=0, temporary=0, slack=0, context=0,
    total_bytes=10, usable_bytes=20, host_bytes_per_node=0, phase="forward", operator="mm",
)  # fmt: skip
DAMAGED = {
    "cut off": msgspec.json.encode(GOOD)[:40],
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "another kind": b"[1, 2]",
    "numbers that do not add up": msgspec.json.encode(GOOD).replace(b'"activations":4', b'"activations":5'),
    "nested too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_entry_is_none_and_is_written_over(case: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    (tmp_path / "key.json").write_bytes(DAMAGED[case])
    assert cache.read("key", MemoryBreakdown) is None
    cache.write("key", GOOD)
    assert cache.read("key", MemoryBreakdown) == GOOD


def test_a_folder_in_the_place_of_an_entry_is_none(tmp_path: Path) -> None:
    (tmp_path / "key.json").mkdir()
    assert Cache(tmp_path).read("key", MemoryBreakdown) is None
