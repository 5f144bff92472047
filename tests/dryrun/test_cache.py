"""A damaged entry of the cache is no entry; it is made again."""

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from frugal.config.hardware import calibration
from frugal.dryrun.cache import Cache
from frugal.planning.memory.breakdown import MemoryBreakdown
from tests.disks import small_disk

GOOD = MemoryBreakdown(
    parameters=1, gradients=2, optimizer=3, activations=4, logits=0, communication=0, temporary=0, slack=0, context=0,
    total_bytes=10, usable_bytes=20, host_bytes_per_node=0, phase="forward", operator="mm",
)  # fmt: skip


def sealed(data: bytes) -> bytes:
    """As the cache writes it."""
    return b"%b\n%b" % (hashlib.sha256(data).hexdigest().encode(), data)


TEXT = msgspec.json.encode(GOOD)
DAMAGED = {
    "cut off": sealed(TEXT)[:100],
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "no checksum": TEXT,
    "another digit": sealed(TEXT).replace(b'"usable_bytes":20', b'"usable_bytes":21'),
    "another kind": sealed(b"[1, 2]"),
    "numbers that do not add up": sealed(TEXT.replace(b'"activations":4', b'"activations":5')),
    "nested too deep": sealed(b"[" * 200_000),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_entry_is_none_and_is_written_over(case: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    (tmp_path / "key.json").write_bytes(DAMAGED[case])
    assert cache.read("key", MemoryBreakdown) is None
    cache.write("key", GOOD)
    assert cache.read("key", MemoryBreakdown) == GOOD


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("/dev/zero")]
)
def test_what_is_no_file_is_no_entry_and_is_not_waited_for(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "key.json")
    make(tmp_path / "other.json")
    cache = Cache(tmp_path)
    assert cache.read("key", MemoryBreakdown) is None
    cache.write("key", GOOD)  # where a folder is not in the way
    assert cache.read("key", MemoryBreakdown) in (GOOD, None)


@pytest.mark.parametrize("place", ["a file", "below a file", "a pipe", "a full disk"])
def test_that_nothing_can_be_kept_is_said_once(place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "profiles"
    with ExitStack() as stack:
        match place:
            case "a file":
                folder.write_text("")
            case "below a file":
                (tmp_path / "file").write_text("")
                folder = tmp_path / "file" / "profiles"
            case "a pipe":
                os.mkfifo(folder)
            case "a full disk":
                disk = stack.enter_context(small_disk(tmp_path / "small", "64k"))
                (disk / "filler").write_bytes(bytes(40 << 10))
                folder = disk / "profiles"
        for _ in range(2):
            Cache(folder).write("key", "x" * (40 << 10))
            assert Cache(folder).read("key", str) is None
    (said,) = caplog.messages
    assert said.startswith(f"plans are not kept in {folder}: ")


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nobody(_: int) -> None:
        raise KeyError("no such user")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    for _ in range(2):
        assert Cache.of_user().folder is None
    assert len(caplog.messages) == 1
    assert calibration.chosen({"device": "cpu"}) == (None, [])
