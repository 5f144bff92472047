"""Worker processes for dry runs: started when first needed, kept, and always ended.

They are forked from a process that has imported torch, transformers and DeepSpeed, which takes four CPU seconds.
"""

import os
import queue
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pickle import UnpicklingError
from signal import SIGKILL
from typing import IO, TYPE_CHECKING, Any

from frugal.errors import FrugalError, refuse
from frugal.imports import python_words

if TYPE_CHECKING:
    from frugal.dryrun.messages import Question

MARK = "FRUGAL_DRY_RUN"
"""Set in a worker's environment: it refuses dry runs inside dry runs, which would never end."""

MAX_WORKERS = 8
"""The most workers."""

STDERR_LINES = 20
"""Lines of a dead worker's standard error that are reported."""


class WorkerError(Exception):
    """A crash of a dry run: our bug, or an exception in the user's model. Its text ends with the output."""


class Pool:
    """A pool of at most `max_workers` processes; `ask` gives each question to an idle one."""

    def __init__(self, max_workers: int) -> None:
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(max_workers):
            self._idle.put(None)  # a place for a worker not yet started
        self._processes: list[_ForkServer | _Worker] = []
        self._server: _ForkServer | None = None
        self._starting = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="dry run")
        self._end = weakref.finalize(self, _end_all, self._processes)  # also at exit
        self._num_holders = 1

    def warm_up(self) -> None:
        """Start the imports of workers to come, and do not wait for them."""
        self._threads.submit(self._started)

    def ask(self, questions: "Sequence[Question]") -> list[Any]:
        """Return the answers in order; the questions are worked on in parallel.

        Raises:
            FrugalError: the request is wrong.
            WorkerError: a worker crashed.
        """
        answers = []
        for answer in self._threads.map(self._ask, questions):
            if isinstance(answer, FrugalError):
                raise answer  # questions that have not begun are dropped
            answers.append(answer)
        return answers

    def attempt(self, questions: "Sequence[Question]") -> list[Any]:
        """Answer as `ask`, with the worker's `FrugalError` in place of an answer."""
        return list(self._threads.map(self._ask, questions))

    def held(self) -> "Pool":
        """Return this pool with one more holder, who has to close it."""
        self._num_holders += 1
        return self

    def close(self) -> None:
        """End the processes once all holders have closed the pool."""
        self._num_holders -= 1
        if self._num_holders:
            return
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _started(self) -> "_ForkServer":
        with self._starting:
            if self._server is None or self._server.process.poll() is not None:
                self._server = _ForkServer()
                self._processes.insert(0, self._server)
            return self._server

    def _ask(self, question: "Question") -> Any:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._started())
                self._processes.append(worker)
            return worker.ask(question)
        except BaseException:
            if worker is not None and worker.code is not None:
                self._processes.remove(worker)
                worker = None
            raise
        finally:
            self._idle.put(worker)


_shared: list[Pool] = []


def workers() -> Pool:
    """Return a pool whose processes are not started yet; inside `shared_workers` always the same one."""
    return _shared[-1].held() if _shared else Pool(min(os.cpu_count() or 1, MAX_WORKERS))


@contextmanager
def shared_workers() -> Iterator[None]:
    """Share one pool among all planning and dry runs inside the `with` block, and end it with the block.

    A process takes seconds to start, and the steps after a plan concern the same model.
    """
    pool = workers()
    _shared.append(pool)
    try:
        yield
    finally:
        _shared.remove(pool)
        pool.close()


class _ForkServer:
    """The process that has done the imports, and forks workers."""

    def __init__(self) -> None:
        refuse(
            (
                MARK in os.environ,
                "the model's file makes a plan while it is imported",
                "a dry run imports that file to build the model, and would never end",
                'put everything but the factory under `if __name__ == "__main__":`',
            )
        )
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environment = {
            **os.environ,
            MARK: "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # also because threads do not survive a fork
        }
        self._asking = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            self.process = started(environment, theirs.fileno(), self._stderr)

    def ask(self, what: bytes, descriptors: Sequence[int] = ()) -> int:
        """Return the number of a worker that is forked with `descriptors` as its standard input and error, or the exit
        code of one whose number is asked for, once it has ended.

        Raises:
            WorkerError: this process has ended, and all workers with it.
        """
        answer = b""
        with self._asking, suppress(OSError):  # the process has ended, or was ended while a worker was being made
            socket.send_fds(self._control, [what], descriptors)
            answer = self._control.recv(16)
        if not answer:
            raise WorkerError(_last_words(self.process.wait(), self._stderr))
        return int(answer)

    def end(self) -> None:
        """End the process, and with it all workers."""
        self.process.kill()
        self.process.wait()
        self._control.close()


class _Worker:
    """A process that answers one question at a time."""

    def __init__(self, server: _ForkServer) -> None:
        self._server = server
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.pid = server.ask(b"fork", (theirs.fileno(), self._stderr.fileno()))
            self._connection = Connection(ours.detach())
        self.code: int | None = None  # its exit code

    def ask(self, question: "Question") -> Any:
        try:
            self._connection.send(question)
            answer = self._connection.recv()
        except (ConnectionError, EOFError, UnpicklingError):
            raise WorkerError(_last_words(self.end(), self._stderr)) from None
        except BaseException:  # interrupted: an answer would still come, and be taken for that to the next question
            self.end()
            raise
        if isinstance(answer, WorkerError):
            raise answer
        if isinstance(answer, FrugalError):
            answer.args = (answer.render(),)  # unpickling takes the text for one line, and cuts a long one
        return answer

    def end(self) -> int:
        """End the process, unless it has, and return its exit code. Raises as `_ForkServer.ask`."""
        if self.code is None:
            self.code = -SIGKILL
            with suppress(ProcessLookupError):  # it ended with its server
                os.kill(self.pid, SIGKILL)
            self._connection.close()
            self.code = self._server.ask(str(self.pid).encode())
        return self.code


def _last_words(code: int, stderr: IO[bytes]) -> str:
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").splitlines()[-STDERR_LINES:]
    return "\n".join((f"the dry run's process ended with exit code {code}", *lines))


def started(environment: dict[str, str], control: int, stderr: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start the process that forks workers."""
    return subprocess.Popen(
        [*python_words(), "-m", "frugal.dryrun.worker"], stdin=control, stdout=stderr, stderr=stderr, env=environment
    )


def _end_all(processes: "list[_ForkServer | _Worker]") -> None:
    while processes:
        with suppress(WorkerError):  # the server of these workers had ended
            processes.pop().end()
