"""A file that a killed compiler left behind does not stop the next; that of one at work does."""

import os
import time
from pathlib import Path
from threading import Thread

from frugal.deepspeed_adapter.kernels import QUIET_SECONDS, wait_for_compiler


def test_it_waits_for_who_compiles_and_removes_what_the_killed_one_left(tmp_path: Path) -> None:
    lock, source = tmp_path / "lock", tmp_path / "object.o"
    lock.touch()
    source.touch()
    long_ago = time.time() - 2 * QUIET_SECONDS
    os.utime(lock, (long_ago, long_ago))
    waiting = Thread(target=wait_for_compiler, args=(lock,), daemon=True)
    waiting.start()
    waiting.join(timeout=1.0)
    assert waiting.is_alive() and lock.exists(), "an object was written just now"
    os.utime(source, (long_ago, long_ago))
    waiting.join(timeout=60)
    assert not waiting.is_alive() and not lock.exists()


def test_it_goes_on_when_the_compiler_is_done(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    waiting = Thread(target=wait_for_compiler, args=(lock,), daemon=True)
    waiting.start()
    lock.unlink()
    waiting.join(timeout=60)
    assert not waiting.is_alive()
