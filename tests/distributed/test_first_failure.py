"""The end of a rank."""

import os
import subprocess
import sys
from pathlib import Path

from frugal.distributed import rank_logs


def test_a_rank_whose_log_is_on_a_full_disk_is_heard_on_the_console(tmp_path: Path) -> None:
    log = rank_logs.path(tmp_path, 1)
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    program = """
import sys; from pathlib import Path
from frugal.errors import CheckpointError
from frugal.distributed import first_failure, rank_logs
rank_logs.redirect(Path(sys.argv[1]), 1)
first_failure.end_rank(CheckpointError("step 15 cannot be saved", hint="make room"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True,
        env={**os.environ, "RANK": "1", "LOCAL_RANK": "0"},
    )  # fmt: skip
    assert done.returncode == 6
    assert done.stderr == "error: step 15 cannot be saved\n\nhint: make room\n"


def test_an_exception_on_a_thread_of_the_run_ends_it_with_the_threads_name() -> None:
    name = "frugal peer watch"
    program = """
import sys, threading, time
from frugal.distributed import first_failure
def work(): raise KeyError("x")
def command(words):
    threading.Thread(target=work, name="a library's").start()  # some fail without harm
    time.sleep(0.2)
    threading.Thread(target=work, name=words[0]).start()
    time.sleep(600)
first_failure.run_command(command)
"""
    done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"ServiceError: thread `{name}`: KeyError: 'x'\n(rank 0 on " in done.stderr
