"""Workers of dry runs, forked from a process that has their imports done: each would spend three seconds on its own.

Commands that tests start as processes have workers as users have them.
"""

import os
import subprocess
import sys
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any

from bench.ranks import forks
from frugal.dryrun import pool

_IMPORTED_WITH = ("CUDA_", "DS_", "HF_", "LD_", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS_")
"""What libraries read when they are imported; with others than the tests', a worker imports for itself."""

_REAL = pool.started
_HERE: dict[str, str] = {}


def use() -> None:
    """From now on this process has such workers."""
    _HERE.update(_read_at_import(dict(os.environ)), CUDA_VISIBLE_DEVICES="")
    pool.started = _started


def _started(environment: dict[str, str], stderr: IO[bytes]) -> "subprocess.Popen[bytes] | _Forked":
    is_as_here = _read_at_import(environment) == _HERE
    return _Forked(environment, stderr) if is_as_here else _REAL(environment, stderr)


def _read_at_import(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_IMPORTED_WITH)}


class _Forked:
    """As much of a `subprocess.Popen` as a pool uses."""

    def __init__(self, environment: dict[str, str], stderr: IO[bytes]) -> None:
        (questions, asked), (answered, answers) = os.pipe(), os.pipe()
        theirs = [_Descriptor(number) for number in (questions, answers, stderr.fileno())]
        self._process = forks().Process(target=_work, args=(theirs, environment, str(Path.cwd())), daemon=True)
        self._process.start()
        os.close(questions)
        os.close(answers)
        self.pid = self._process.pid
        self.stdin, self.stdout = os.fdopen(asked, "wb"), os.fdopen(answered, "rb")

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class _Descriptor:
    """An open file, the same in the process that gets it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(passed: Any) -> int:
    number: int = passed.detach()
    return number


def _work(files: list[int], environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, ours in enumerate(files):
        os.dup2(ours, number)
        os.close(ours)
    sys.stdin = os.fdopen(0, closefd=False)
    from frugal.dryrun import worker

    worker.main()
