"""Requests to stop: which signals ask, how long is waited, and what a second one does, on real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PROGRAM = """
import os, signal, subprocess, sys, time
from frugal.distributed import stop
def busy():  # for minutes in one call into C, as a long operation of torch is
    import hashlib
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
{before}
with stop.heed_stop_signals({grace}):
    print("ready", flush=True)
    {inside}
    print("asked by", getattr(stop.requested(), "name", None), flush=True)
"""


@contextmanager
def process(inside: str, *, grace: float = 60, before: str = "", **how: Any) -> Iterator[subprocess.Popen[str]]:
    """One that heeds signals, ready to be signalled."""
    program = PROGRAM.format(before=before, grace=grace, inside=inside)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        try:
            yield started
        finally:
            started.kill()


WAIT = "while stop.requested() is None: time.sleep(0.01)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_each_of_three_signals_asks_to_stop_and_says_how_long_is_waited(number: signal.Signals) -> None:
    with process(WAIT) as asked:
        asked.send_signal(number)
        output, errors = asked.communicate(timeout=60)
    assert (asked.returncode, output) == (0, f"asked by {number.name}\n")
    assert errors == f"asked to stop by {number.name}: saving after this step, at most 60 s\n"


def test_what_is_ignored_at_the_start_stays_ignored_as_nohup_asks() -> None:
    hup = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with process(WAIT, before=hup) as asked:
        asked.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        asked.send_signal(signal.SIGUSR1)
        output, errors = asked.communicate(timeout=60)
    assert (asked.returncode, output) == (0, "asked by SIGUSR1\n")
    assert "SIGHUP" not in errors


def test_the_same_signal_twice_at_once_is_one_as_it_comes_by_two_ways() -> None:
    with process(f"{WAIT}\n    time.sleep(0.5)") as asked:
        asked.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        asked.send_signal(signal.SIGTERM)
        output, _ = asked.communicate(timeout=60)
    assert (asked.returncode, output) == (0, "asked by SIGTERM\n")


@pytest.mark.parametrize("is_second", [True, False])
def test_a_long_operation_is_left_by_a_second_signal_or_when_the_grace_is_over(is_second: bool) -> None:
    before = "stop.REPEATED_SECONDS = 0.1"
    with process("busy()", grace=60 if is_second else 1, before=before) as asked:
        asked.send_signal(signal.SIGTERM)
        if is_second:
            time.sleep(0.5)
            asked.send_signal(signal.SIGTERM)
        _, errors = asked.communicate(timeout=60)
    assert asked.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[1:] == (
        ["error: ended by a second SIGTERM", "  because the step under way was not waited for"]
        if is_second
        else ["error: not done within 1 s after SIGTERM", "  because the step under way takes longer"]
    )


def test_another_signal_is_no_second_one() -> None:
    """SLURM sends SIGUSR1 as a warning, and SIGTERM at the end of the time."""
    with process(f"{WAIT}\n    time.sleep(0.5)", before="stop.REPEATED_SECONDS = 0.1") as asked:
        asked.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        asked.send_signal(signal.SIGTERM)
        output, _ = asked.communicate(timeout=60)
    assert (asked.returncode, output) == (0, "asked by SIGUSR1\n")


def test_a_process_that_forks_off_ends_by_its_own_signals_and_does_not_stop_the_rank() -> None:
    fork = """pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    ended = os.waitpid(pid, 0)[1]
    assert os.WTERMSIG(ended) == signal.SIGTERM, ended
    time.sleep(0.2)"""
    with process(fork) as asked:
        output, errors = asked.communicate(timeout=60)
    assert (asked.returncode, output, errors) == (0, "asked by None\n", "")


def test_afterwards_signals_do_what_they_did_before() -> None:
    program = (
        "import os, signal; from frugal.distributed import stop\n"
        "with stop.heed_stop_signals(): pass\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGTERM


CHILD = """
import os, time
from frugal.distributed import parent
{before}
parent.end_with_parent({deliver})
os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
from frugal.distributed import parent
read, write = os.pipe()
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, parent.PIPE: str(read)}, pass_fds=[read])
time.sleep(600)
"""
NO_DEATH_SIGNAL = "parent.set_death_signal = lambda number: None"  # where there is none, as on a Mac


@pytest.mark.parametrize("before", ["", NO_DEATH_SIGNAL], ids=["Linux", "elsewhere"])
@pytest.mark.parametrize("deliver", ["", "print"], ids=["stdin of another", "signals"])
def test_a_process_ends_with_its_parent_though_nobody_reaps_it(before: str, deliver: str) -> None:
    child = CHILD.format(before=before, deliver=deliver)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()  # and nobody waits for it: it stays a zombie
    began = time.monotonic()
    assert parent.stdout.read() == "", "the pipe is closed when the last who holds it has ended"
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        while True:  # whoever adopts it reaps it
            os.kill(pid, 0)
            assert time.monotonic() - began < 20
            time.sleep(0.01)
    parent.wait()
