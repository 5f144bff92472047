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
WAIT_ON = f"{WAIT}\n    time.sleep(0.5)"
SOON, HANGUP = "stop.REPEATED_SECONDS = 0.1", "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
TERM, USR1, HUP = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


@pytest.mark.parametrize(
    ("inside", "before", "numbers", "asks"),
    [
        *((WAIT, "", [number], number) for number in (TERM, USR1, HUP)),
        (WAIT, HANGUP, [HUP, USR1], USR1),  # what is ignored at the start stays ignored, as nohup asks
        (WAIT_ON, "", [TERM, TERM], TERM),  # the same twice at once is one, as it comes by two ways
        (WAIT_ON, SOON, [USR1, TERM], USR1),  # SLURM's warning, and its end of the time: no second one
    ],
)
def test_a_signal_asks_to_stop_and_says_how_long_is_waited(
    inside: str, before: str, numbers: list[signal.Signals], asks: signal.Signals
) -> None:
    with process(inside, before=before) as asked:
        for number in numbers:
            asked.send_signal(number)
            time.sleep(0.25)
        output, errors = asked.communicate(timeout=60)
    assert (asked.returncode, output) == (0, f"asked by {asks.name}\n")
    assert errors.splitlines()[0] == f"asked to stop by {asks.name}: saving after this step, at most 60 s"
    assert before != HANGUP or "SIGHUP" not in errors


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


def test_a_signal_after_the_last_step_is_told_what_it_waits_for() -> None:
    with process("stop.under_way = 'the copy'\n    busy()", grace=1) as asked:
        time.sleep(0.3)
        asked.send_signal(signal.SIGTERM)
        _, errors = asked.communicate(timeout=60)
    assert errors.splitlines() == [
        "asked to stop by SIGTERM: waiting for the copy, at most 1 s",
        "error: not done within 1 s after SIGTERM", "  because the copy under way takes longer",
    ]  # fmt: skip


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
