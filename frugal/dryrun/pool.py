"""Worker processes for dry runs: started when first needed, kept, and always ended."""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from frugal.distributed import parent
from frugal.errors import FrugalError, RequestError

if TYPE_CHECKING:
    from frugal.dryrun.messages import Question

MARK = "FRUGAL_DRY_RUN"
"""Set in a worker's environment: it refuses dry runs inside dry runs, which would never end."""

MAX_WORKERS = 8
"""The most workers; each takes half a GiB."""

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
        self._workers: list[_Worker] = []
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="dry run")
        self._end = weakref.finalize(self, _end_all, self._workers)  # also at exit
        self._num_holders = 1

    def tell(self, question: "Question", most: int) -> None:
        """Ask up to `most` processes that are idle, and do not wait for their answers."""
        for _ in range(min(most, self._idle.qsize())):
            self._threads.submit(self._ask, question)

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

    def _ask(self, question: "Question") -> Any:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker()
                self._workers.append(worker)
            return worker.ask(question)
        except BaseException:
            if worker is not None and worker._process.poll() is not None:
                self._workers.remove(worker)
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


class _Worker:
    """A process that answers one question at a time."""

    def __init__(self) -> None:
        if MARK in os.environ:
            raise RequestError(
                "the model's file makes a plan while it is imported",
                because="a dry run imports that file to build the model, and would never end",
                hint='put everything but the factory under `if __name__ == "__main__":`',
            )
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environment = {
            **os.environ,
            MARK: "1",
            parent.PIPE: "0",  # its standard input
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        self._process = started(environment, self._stderr)

    def ask(self, question: "Question") -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump(question, self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            code = self._process.wait()
            self._stderr.seek(0)
            last_words = self._stderr.read().decode(errors="replace").splitlines()[-STDERR_LINES:]
            raise WorkerError("\n".join((f"the dry run's process ended with exit code {code}", *last_words))) from None
        except BaseException:  # interrupted: an answer would still come, and be taken for that to the next question
            self.end()
            raise
        if isinstance(answer, WorkerError):
            raise answer
        if isinstance(answer, FrugalError):
            answer.args = (answer.render(),)  # unpickling takes the text for one line, and cuts a long one
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def started(environment: dict[str, str], stderr: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start the process of a worker."""
    return subprocess.Popen(
        [sys.executable, "-m", "frugal.dryrun.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
    )


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()
