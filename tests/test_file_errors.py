"""Causes why a file cannot be written: each by its own words and numbers, from real file systems."""

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from frugal import files
from frugal.file_errors import Explanation, explain
from tests.disks import small_disk


def failure(action: Callable[[], object]) -> Explanation:
    with pytest.raises(OSError) as raised:
        action()
    return explain(raised.value)


def test_bytes_and_inodes_that_are_used_up_are_told_apart(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        because, remedy = failure(lambda: files.write_file(disk / "large", bytes(2 << 20)))
        assert because == f"{disk}/large: No space left on device (1.0 MiB of 1.0 MiB are free at {disk})"
        assert remedy == f"make room at {disk}"
        subprocess.run(["mount", "-o", "remount,nr_inodes=3", str(disk)], check=True)
        because, remedy = failure(lambda: [(disk / str(number)).touch() for number in range(9)])
        assert f"(all 3 inodes are in use at {disk}; 1.0 MiB of 1.0 MiB are free at {disk})" in because
        assert remedy == f"remove files at {disk}: it is their number that is too large, not their size"


def test_a_read_only_file_system_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        because, remedy = failure(lambda: files.write_file(disk / "file", b""))
    assert because.endswith(f"/file: Read-only file system (on the file system mounted at {disk})")
    assert remedy.startswith("mount it for writing")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_rights_that_lack_say_whose_folder_it_is() -> None:
    os.seteuid(65534)
    try:
        because, remedy = failure(lambda: Path("/etc/frugal-test").touch())
    finally:
        os.seteuid(0)
    assert because == "/etc/frugal-test: Permission denied (/etc is drwxr-xr-x of root, we are nobody)"
    assert remedy == "ask its owner for the right to write there"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EDQUOT, "make room, or have the quota raised (`quota -s` shows it)"),
        (errno.ESTALE, "see that the file system is reachable again"),
        (errno.EIO, "look at the disk (`dmesg`)"),
    ],
)
def test_what_cannot_be_had_here_is_told_by_its_number(number: int, remedy: str, tmp_path: Path) -> None:
    because, said = explain(OSError(number, os.strerror(number), str(tmp_path / "file")))
    assert said == remedy
    assert because.startswith(f"{tmp_path}/file: {os.strerror(number)} (")
