"""A run is asked to stop, by SIGTERM, SIGUSR1 or SIGHUP: it ends at the next step boundary, with a checkpoint.

A thread receives the signal at once, however long the main thread is in one operation, logs it and counts the grace.
The loop asks `is_requested` at each step boundary, and all ranks stop at the same one. Where that has not come when the
grace is over, or the same signal comes a second time, the process ends.

Signals that were ignored when the process was started stay ignored, which is what `nohup` asks for.

A signal to all processes of a run (`kill -- -GROUP`, systemd, docker, scancel) reaches a rank twice: once
directly, and once through the command or launcher that passes its own signal on. And a shell whose terminal closes
passes on the SIGHUP that its jobs got from the kernel. So the same signal counts as a second one only after
`REPEATED_SECONDS`.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from frugal.distributed import env, rank_logs
from frugal.errors import logger

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

GRACE_SECONDS = 600

REPEATED_SECONDS = 5.0

OTHER_FAILED = 0
"""The number that `deliver` takes in place of a signal's number: another rank has failed, and this one is to end."""

under_way = "the step"
"""Work that a request to stop waits for; whoever does other work names it here."""

_requested: signal.Signals | None = None  # signals are the process's, and so is this
_has_other_failed = False
_wakeup: socket.socket | None = None  # through which numbers of signals come to the thread


def requested() -> signal.Signals | None:
    """Return the signal by which this process was asked to stop; None if it was not."""
    return _requested


def is_ending() -> bool:
    """Return whether this process was asked to stop, or another rank's failure ends it."""
    return _requested is not None or _has_other_failed


def note(number: int) -> None:
    """Record that this process was asked to stop by the signal of this number."""
    global _requested
    _requested = _requested or signal.Signals(number)


def deliver(number: int) -> None:
    """Do what the signal of this number would do; the process that started this one passes on its own."""
    global _has_other_failed
    if number == OTHER_FAILED:
        _has_other_failed = True
    elif (wakeup := _wakeup) is not None:
        with suppress(OSError):  # it is closed already
            wakeup.send(bytes([number]))
    else:
        os.kill(os.getpid(), number)


@contextmanager
def heed_stop_signals(
    grace_seconds: float = GRACE_SECONDS, end: Callable[[str, str, int], None] | None = None
) -> Iterator[None]:
    """Have signals to stop ask this process to stop inside the `with` block, instead of ending it; on the main thread.

    After a step `Engine.is_to_stop` is true on all ranks. When the grace is over, or the same signal comes again, the
    process ends with 128 + the signal's number. `end`, if given, is called for that with what happened, the reason, and
    this exit code.
    """
    global _requested, _wakeup
    _requested = None
    heard, wakeup = socket.socketpair()
    with heard, wakeup:
        wakeup.setblocking(False)
        arguments = (heard, grace_seconds, end or _end)
        listening = threading.Thread(target=_listen, args=arguments, name="frugal signals", daemon=True)
        listening.start()
        usual_wakeup = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        _wakeup = wakeup
        try:
            with handled(SIGNALS, lambda _number, _frame: None):  # the thread reads their numbers
                yield
        finally:
            _wakeup = None
            signal.set_wakeup_fd(usual_wakeup)
            wakeup.shutdown(socket.SHUT_RDWR)  # also where a process that was forked holds it, too
            listening.join()
            _requested = None


class Received:
    """The signals that came so far. Call `add` with each."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}  # when each came first

    def add(self, number: int) -> int:
        """Return how often this signal came, up to 2; 0 where the last one arrives again by another way."""
        now = time.monotonic()
        if number not in self._first:
            self._first[number] = now
            return 1
        return 2 if now - self._first[number] > REPEATED_SECONDS else 0


def _listen(heard: socket.socket, grace_seconds: float, end: Callable[[str, str, int], None]) -> None:
    """Hear signals, and end the process when it is time for that; the thread of `heed_stop_signals`."""
    received, deadline = Received(), math.inf
    while True:
        heard.settimeout(None if deadline == math.inf else max(0.001, deadline - time.monotonic()))
        try:
            numbers = heard.recv(64)
        except TimeoutError:
            assert _requested is not None
            what = f"not done within {grace_seconds} s after {_requested.name}"
            end(what, f"{under_way} under way takes longer", 128 + _requested)
            return
        if not numbers:
            return
        for number in numbers:
            if number not in SIGNALS:
                continue
            times, name = received.add(number), signal.Signals(number).name
            if times == 2:
                end(f"ended by a second {name}", f"{under_way} under way was not waited for", 128 + number)
            elif times == 1 and deadline == math.inf:
                deadline = time.monotonic() + grace_seconds
                then = "saving after this step" if under_way == "the step" else f"waiting for {under_way}"
                text = f"asked to stop by {name}: {then}, at most {grace_seconds} s"
                say = logger.warning if env.rank() == 0 else rank_logs.to_file
                try:
                    say(text)
                finally:
                    note(number)  # after the line: a run of short steps may end now, and its log with it


def _end(what: str, why: str, code: int) -> None:
    rank_logs.to_console(f"error: {what}\n  because {why}")
    os._exit(code)


@contextmanager
def handled(signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have `signals` call `handler` inside the `with` block. Ignored signals stay ignored."""
    heeded = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, usual in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, usual)


def ignore() -> None:
    """Ignore signals to stop from now on: what they ask for is done, and the process is at its end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def restore_defaults() -> None:
    """Have signals to stop end the process from now on, except those that are ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _block(how: int) -> None:
    if _wakeup is not None:
        signal.pthread_sigmask(how, SIGNALS)


def _forget_in_child() -> None:
    """Restore default signals in a forked process, which is no rank."""
    global _wakeup
    if _wakeup is not None:
        signal.set_wakeup_fd(-1)
        restore_defaults()
        _block(signal.SIG_UNBLOCK)
        _wakeup = None


os.register_at_fork(
    before=lambda: _block(signal.SIG_BLOCK),
    after_in_parent=lambda: _block(signal.SIG_UNBLOCK),
    after_in_child=_forget_in_child,
)
