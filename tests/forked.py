"""Processes of `python -m frugal...`, and ranks of tests: forked from one that has done their imports, for seconds.

A command that is no `python -m frugal...`, or that runs with other settings of the interpreter or of torch than this
process, is started as users start it.

The process that forks is started once a session (`python -m tests.forked SOCKET PIPE`), for all of xdist's workers, and
ends with it. A request is JSON over its socket: the words, environment and folder, and with it the descriptors that the
process is to have. The answer is the process's number, and once it has ended its exit code.
"""

import array
import atexit
import contextlib
import fcntl
import gc
import json
import logging
import multiprocessing
import os
import random
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import ranks
from frugal.dryrun import pool

SOCKET = "FRUGAL_TESTS_FORK"
"""In the environment: the address of the process that forks."""

PRELOADED = (
    "deepspeed", "datasets", "transformers.modeling_utils", "peft", "transformers.models.gpt2.modeling_gpt2",
    "frugal.cli.train", "frugal.engine.engine", "frugal.engine.training", "frugal.dryrun.run",
    "frugal.dryrun.trace.trace",
)  # fmt: skip

READ_AT_START = ("CUDA_", "DS_", "HF_", "LANG", "LC_", "LD_", "PYTHON", "TORCH", "TRANSFORMERS_")
"""Variables that the interpreter or a library reads when it starts; OMP_NUM_THREADS is one for all of the tests."""

SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR", "TRANSFORMERS_VERBOSITY", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Those that torch, and frugal for a rank, set where they are imported: where, and that libraries do not talk."""

HIGH = 200
"""Descriptors from here on are in nobody's way."""

_AT_START: dict[str, str] = {}
"""Such variables, as the process that forks has them."""

_Popen, _run, _started = subprocess.Popen, subprocess.run, pool.started

_may_fork = ContextVar("_may_fork", default=False)
"""Set in a thread while it starts a process that may be forked; other threads start theirs as users do."""


def use() -> None:
    """From now on fork what `subprocess.run` starts here, the processes of dry runs, and ranks.

    What a test starts with `subprocess.Popen`, to disturb it, has its processes as users have them.
    """
    _AT_START.update(_read_at_start(dict(os.environ)))
    subprocess.Popen = Forked  # type: ignore[misc]
    subprocess.run = _with_forks(_run)
    pool.started = _with_forks(_started)
    environment = dict(os.environ)  # before any test changes it: ranks stay from test to test
    ranks.started = lambda *arguments: ForkedRank(environment, *arguments)


def _with_forks(start: Callable[..., Any]) -> Callable[..., Any]:
    def starting(*args: Any, **kwargs: Any) -> Any:
        before = _may_fork.set(True)
        try:
            return start(*args, **kwargs)
        finally:
            _may_fork.reset(before)

    return starting


class Forked(_Popen):  # type: ignore[type-arg]
    """A process that is forked if its command, and who starts it, allow it."""

    _connection: socket.socket | None = None
    _always = False

    def _execute_child(self, *args: Any) -> None:  # the parameters of 3.11 to 3.13
        words, pass_fds, cwd, env = args[0], args[4], args[5], args[6]
        (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite), new_session = args[10:16], args[21]
        env = dict(os.environ if env is None else env)
        if not (self._always or _may_fork.get()) or not _can_be_forked(words, env):
            super()._execute_child(*args)  # type: ignore[misc]
            return
        descriptors = {0: p2cread, 1: c2pwrite, 2: errwrite} | {number: number for number in pass_fds}
        descriptors = {number: ours if ours >= 0 else number for number, ours in descriptors.items()}
        request = {
            "words": list(map(os.fsdecode, words)), "environment": env, "folder": os.fsdecode(cwd or Path.cwd()),
            "descriptors": list(descriptors), "new_session": bool(new_session),
        }  # fmt: skip
        self._connection = _connect()
        env[SOCKET] = os.environ[SOCKET]  # which this process may have started only now
        _send(self._connection, request, list(descriptors.values()))
        self.pid = _receive(self._connection)[0]["pid"]
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc, no-any-return]
        self._take_code(0)
        return self.returncode  # type: ignore[no-any-return]

    def _wait(self, timeout: float | None) -> int:
        if self._connection is None:
            return super()._wait(timeout=timeout)  # type: ignore[misc, no-any-return]
        self._take_code(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def __del__(self, *args: Any) -> None:
        if self._connection is not None:
            self._connection.close()
        super().__del__(*args)  # type: ignore[misc]

    def _take_code(self, timeout: float | None) -> None:
        if self.returncode is None:
            assert self._connection is not None
            ready = select.select([self._connection], [], [], timeout)[0]
            with self._waitpid_lock:  # type: ignore[attr-defined]  # several threads may wait for it
                if ready and self.returncode is None:
                    answer = _receive(self._connection)[0]
                    self.returncode = answer.get("code", -signal.SIGKILL)


class ForkedRank(Forked):
    """A rank of `bench.ranks`."""

    _always = True

    def __init__(self, environment: dict[str, str], rank: int, world_size: int, port: int, theirs: Connection) -> None:
        numbers = map(str, (rank, world_size, port, theirs.fileno()))
        words = [sys.executable, "-m", ranks.__name__, *numbers, multiprocessing.current_process().authkey.hex()]
        super().__init__(words, env=environment, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[1])

    def join(self) -> None:
        """Wait for its end."""
        self.wait()


def _can_be_forked(words: Any, environment: dict[str, str]) -> bool:
    if not isinstance(words, list | tuple) or not words or words[0] != sys.executable:
        return False
    rest = [word for word in words[1:3] if word != "-u"]
    module = words[words.index("-m") + 1] if rest[:1] == ["-m"] else ""
    is_ours = str(module).split(".")[0] == "frugal" or module == ranks.__name__
    return is_ours and _read_at_start(environment) == _AT_START


def _read_at_start(environment: dict[str, str]) -> dict[str, str]:
    names = [name for name in environment if name.startswith(READ_AT_START) and name not in SET_BY_IMPORTS]
    ours = {name: environment[name] for name in names}
    return ours | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def _connect() -> socket.socket:
    if SOCKET not in os.environ:
        start()
    connection = socket.socket(socket.AF_UNIX)
    for _ in range(3000):
        try:
            connection.connect(os.environ[SOCKET])
            break
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.1)
    else:
        raise TimeoutError("the process that forks does not listen")
    number = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH)
    connection.close()
    return socket.socket(fileno=number)


def start() -> None:
    """Start the process that forks."""
    folder = Path(tempfile.mkdtemp(prefix="frugal-fork-"))
    theirs, ours = os.pipe()  # ends when this process does
    os.environ[SOCKET] = str(folder / "socket")
    _Popen(
        [sys.executable, "-m", "tests.forked", os.environ[SOCKET], str(theirs)], pass_fds=[theirs],
        start_new_session=True, stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    os.close(theirs)
    os.dup2(ours, number := fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, HIGH), inheritable=False)
    os.close(ours)
    _PIPES.append(number)


_PIPES: list[int] = []


def _send(connection: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
    content = json.dumps(message).encode()
    numbers = array.array("i", descriptors)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if descriptors else []
    connection.sendmsg([len(content).to_bytes(4, "big")], rights)
    connection.sendall(content)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
    if len(head) < 4:
        return {}, descriptors
    content, left = b"", int.from_bytes(head, "big")
    while left and (part := connection.recv(left)):
        content, left = content + part, left - len(part)
    return (json.loads(content) if not left else {}), descriptors


# The process that forks


def serve(address: str, pipe: int) -> None:
    """Fork on request until the write end of `pipe` is closed."""
    _AT_START.update(_read_at_start(dict(os.environ)))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # as frugal does: peft imports it
    for module in PRELOADED:
        import_module(module)
    gc.freeze()  # DeepSpeed collects at every start of an engine: what was imported need not be looked at again
    listener.listen(64)
    watched = selectors.DefaultSelector()
    watched.register(pipe, selectors.EVENT_READ, None)
    watched.register(listener, selectors.EVENT_READ, None)
    while True:
        for key, _ in watched.select():
            if key.fd == pipe:
                shutil.rmtree(Path(address).parent)
                os._exit(0)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                request, descriptors = _receive(connection)
                pid = os.fork() if request else 0
                if request and not pid:
                    _be(request, descriptors, [listener.fileno(), pipe, connection.fileno(), *_descriptors(watched)])
                for number in descriptors:
                    os.close(number)
                if not request:
                    connection.close()
                    continue
                _send(connection, {"pid": pid}, [])
                watched.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            else:
                pid, connection = key.data
                watched.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):  # whoever asked is gone
                    _send(connection, {"code": code}, [])
                connection.close()


def _descriptors(watched: selectors.DefaultSelector) -> list[int]:
    others = [key.data[1].fileno() for key in watched.get_map().values() if key.data is not None]
    return [key.fd for key in watched.get_map().values() if key.data is not None] + others


def _be(request: dict[str, Any], descriptors: list[int], not_ours: list[int]) -> None:
    """Become the process that was asked for; does not return."""
    code = 1
    try:
        for number in not_ours:
            os.close(number)
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH) for number in descriptors]
        for number in descriptors:
            os.close(number)
        for number, target in zip(high, request["descriptors"], strict=True):
            os.dup2(number, target)
            os.close(number)
        if request["new_session"]:
            os.setsid()
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        random.seed()
        sys.modules["numpy"].random.seed()
        code = _be_module(request["words"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _be_module(words: list[str]) -> int:
    at = words.index("-m")
    module, sys.argv = words[at + 1], [words[0], *words[at + 2 :]]
    sys.path.insert(0, str(Path.cwd()))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.modules.pop(module, None)
    Forked._always = True  # ranks, and processes of dry runs
    subprocess.Popen = Forked  # type: ignore[misc]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 255


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
