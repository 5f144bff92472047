"""Temporary folders of killed processes are removed by the next one, those of live ones are not."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from frugal import temporary

HOLDER = """
import sys, time
from pathlib import Path
from frugal import temporary

with temporary.folder(Path(sys.argv[1])) as folder:
    (folder / "plan.json").write_text("{}")
    print(folder, flush=True)
    time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def holder(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a folder in `parent`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, parent], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    with holder(tmp_path) as (killed, of_killed), holder(tmp_path) as (_, of_live):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (of_killed / "plan.json").exists()
        with temporary.folder(tmp_path) as own:
            assert names(tmp_path) == sorted([own.name, of_live.name])
            assert (of_live / "plan.json").exists()
        assert names(tmp_path) == [of_live.name]


def test_only_folders_of_its_name_and_its_user_are_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / f"{temporary.PREFIX}link").symlink_to(tmp_path / "kept")
    (tmp_path / f"{temporary.PREFIX}file").touch()
    stay = {f"{temporary.PREFIX}file", f"{temporary.PREFIX}link", "kept"}
    if os.geteuid() == 0:  # only root can give a folder to another user
        (tmp_path / f"{temporary.PREFIX}other").mkdir()
        os.chown(tmp_path / f"{temporary.PREFIX}other", 65534, 65534)
        stay.add(f"{temporary.PREFIX}other")
    temporary.remove_abandoned(tmp_path, temporary.PREFIX)
    assert (tmp_path / "kept" / "file").exists()
    assert set(names(tmp_path)) == stay


def test_many_that_are_made_at_once_take_none_from_each_other(tmp_path: Path) -> None:
    lost: list[Path] = []

    def work() -> None:
        for _ in range(50):
            with temporary.folder(tmp_path) as folder:
                try:
                    (folder / "plan.json").write_text("{}")
                except FileNotFoundError:
                    lost.append(folder)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost
    assert names(tmp_path) == []
