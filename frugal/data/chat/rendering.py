"""Chats are rendered and tokenised in a process of their own: a template is a stranger's program.

It may run or grow without end. The process is forked before there is a model, so that it holds nothing but libraries,
and does chat after chat. Each may take `SECONDS` of processor time, which the kernel measures (SIGPROF ends it, in C
code, too), and `MEMORY_BYTES` beyond what there is, which the kernel refuses to give (RLIMIT_AS). Both grow with the
chat, so that a long one is no mistake. Jinja's sandbox limits `range`, and nothing else.
"""

import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from frugal.data.chat.formats import Chat, Trained
from frugal.data.rows import BadRow
from frugal.errors import RequestError
from frugal.units import GIB, format_bytes

SECONDS, SECONDS_PER_CHARACTER = 30.0, 1e-5
MEMORY_BYTES, BYTES_PER_CHARACTER = GIB, 256


_processes: dict[tuple[int, str], "RenderingProcess"] = {}  # by the tokenizer, which they keep, and its template


def process_for(template: Any, tokenizer: Any) -> "RenderingProcess":
    """Return the process that renders a tokenizer's chats, which is started where there is none."""
    key = id(tokenizer), str(tokenizer.chat_template)
    if key not in _processes:
        _processes[key] = RenderingProcess(template)
    return _processes[key]


def end_all() -> None:
    """End all of them. A stream's are started before it trains, when all other data has been read, and stay."""
    for process in _processes.values():
        process.end()
    _processes.clear()


class RenderingProcess:
    """A forked process that renders and tokenises chats; use `process_for`."""

    def __init__(self, template: Any) -> None:
        self._template, self._parent = template, os.getpid()
        self._results, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads' locks, which it does not take
            self._pid = os.fork()  # not `multiprocessing.Process`, which a daemonic process may not start
        if self._pid == 0:
            _work(template, theirs)
        theirs.close()

    def encode(self, chats: Sequence[tuple[str, Chat]], *, train_on_all: bool) -> list[Trained | BadRow]:
        """Return the tokens of each chat, given with where it is.

        Raises:
            RequestError: as `ChatTemplate.encode`; or a chat takes too much time or memory.
        """
        encoded = []
        with suppress(BrokenPipeError):  # it has ended, and why is asked below
            self._results.send((chats, train_on_all))
        for where, chat in chats:
            try:
                result, self._template.untrained_end = self._results.recv()
            except (EOFError, OSError):
                self._refuse(where, chat)
            if isinstance(result, RequestError):
                end_all()
                raise result
            encoded.append(result)
        return encoded

    def end(self) -> None:
        """End it."""
        self._results.close()
        if os.getpid() == self._parent and self._pid:  # and no copy of it
            os.kill(self._pid, signal.SIGKILL)
            self._wait()

    def _wait(self) -> int:
        pid, self._pid = self._pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _refuse(self, where: str, chat: Chat) -> NoReturn:
        code = self._wait()
        end_all()
        what = "the chat template cannot be rendered"
        because = f"the process that does it ended with code {code}, with {format_bytes(_memory(chat))} to use"
        if code == -signal.SIGPROF:
            what = "the chat template does not come to an end"
            because = f"one chat of {chat.size:,} characters has taken {_seconds(chat):.0f} s"
        raise RequestError(what, because=f"{where}: {because}", hint=_HINT)


_HINT = "give the template that the model was trained with: --chat-template FILE"


def _seconds(chat: Chat) -> float:
    """Return the most that a chat may take: it is rendered and tokenised up to the begin and end of each turn."""
    return SECONDS + SECONDS_PER_CHARACTER * chat.size * (1 + len(chat.trained))


def _memory(chat: Chat) -> int:
    return MEMORY_BYTES + BYTES_PER_CHARACTER * chat.size


def _work(template: Any, connection: Connection) -> NoReturn:
    """Encode what is asked for, until the parent closes the connection or ends."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends this one
        for number in (signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        for name in [path.name for path in Path("/proc/self/fd").iterdir()]:  # the parent's locks end with it
            if int(name) not in (0, 1, 2, connection.fileno()):
                with suppress(OSError):
                    os.close(int(name))
        while True:
            chats, train_on_all = connection.recv()
            for where, chat in chats:
                connection.send((_encoded(template, where, chat, train_on_all), template.untrained_end))
    finally:
        os._exit(0)


def _encoded(template: Any, where: str, chat: Chat, train_on_all: bool) -> Trained | BadRow | RequestError:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = taken + _memory(chat)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, _seconds(chat))
    try:
        return template.encode(chat, where, train_on_all=train_on_all)
    except RequestError as error:
        return error
    except MemoryError:
        because = f"{where}: one chat of {chat.size:,} characters has taken {format_bytes(_memory(chat))} of memory"
        return RequestError("the chat template writes without end", because=because, hint=_HINT)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
