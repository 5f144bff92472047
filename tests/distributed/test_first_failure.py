"""How a rank ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.ranks import free_port
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


@pytest.mark.parametrize("name", ["frugal gate", "frugal peer watch"])
def test_an_exception_on_a_thread_of_the_run_ends_it_with_the_threads_name(name: str) -> None:
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


def test_rank_0_says_so_where_what_serves_the_store_fails() -> None:
    program = """
import time
from frugal.distributed import first_failure, rendezvous
from frugal.distributed.connections import store
def look(self): raise KeyError("x")
def command(words):
    rendezvous.join_store().set("key", "value")
    store.StoreServer.look = look
    rendezvous.store().get("nobody sets this")
first_failure.run_command(command)
"""
    place = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=dict(os.environ) | place
    )
    assert done.returncode == 1
    assert done.stderr.count("ServiceError: thread `frugal gate`: KeyError: 'x'\n(rank 0 on ") == 1, done.stderr
