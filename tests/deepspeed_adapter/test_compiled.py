"""A file that a killed compiler left behind does not stop the next; that of one at work does."""

import subprocess
import sys
from pathlib import Path
from threading import Thread

from frugal.deepspeed_adapter.kernels import wait_for_compiler

COMPILES = """
import sys
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("at work", flush=True)
sys.stdin.read()
"""


def test_it_waits_for_who_compiles_and_removes_what_the_killed_one_left(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    command = [sys.executable, "-c", COMPILES, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as compiler:
        assert compiler.stdout is not None and compiler.stdout.readline() == b"at work\n"
        waiting = Thread(target=wait_for_compiler, args=(lock, 0.0))
        waiting.start()
        waiting.join(timeout=1.5)
        assert waiting.is_alive() and lock.exists()
        compiler.kill()
    waiting.join(timeout=60)
    assert not waiting.is_alive() and not lock.exists()


def test_what_was_written_to_just_now_may_be_compiled_on_another_host(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    waiting = Thread(target=wait_for_compiler, args=(lock, 3600.0), daemon=True)
    waiting.start()
    waiting.join(timeout=1.5)
    assert waiting.is_alive() and lock.exists()
    lock.unlink()
    waiting.join(timeout=60)
    assert not waiting.is_alive()
