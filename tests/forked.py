"""Processes of `python -m frugal...`, scripts, torchrun, and ranks of tests: forked from one that did their imports.

Another command, or one that runs with other settings of the interpreter or of torch than this process, is started as
users start it.

The process that forks is started once a session (`python -m tests.forked SOCKET PIPE`), for all of xdist's workers, and
ends with it. A request is JSON over its socket: the words, environment and folder, and with it the descriptors that the
process is to have. The answer is the process's number, and once it has ended its exit code.
"""

import array
import atexit
import contextlib
import ctypes
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
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from bench import ranks
from frugal.dryrun import pool

SOCKET = "FRUGAL_TESTS_FORK"
"""In the environment: the address of the process that forks."""

PRELOADED = (
    "deepspeed", "datasets", "transformers.modeling_utils", "peft", "transformers.models.gpt2.modeling_gpt2",
    "frugal.cli.train", "frugal.engine.engine", "frugal.engine.training", "frugal.dryrun.run",
    "frugal.dryrun.trace.trace", "pytest",
)  # fmt: skip

READ_AT_START = ("CUDA_", "DS_", "HF_", "LANG", "LC_", "LD_", "PYTHON", "TORCH", "TRANSFORMERS_")
"""Variables that the interpreter or a library reads when it starts; OMP_NUM_THREADS is one for all of the tests."""

SET_BY_TORCHRUN = ("TORCHELASTIC_", "TORCH_NCCL_")
"""Those that it gives its ranks, which read them when they meet."""

SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR", "TRANSFORMERS_VERBOSITY", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Those that torch, and frugal for a rank, set where they are imported: where, and that libraries do not talk."""

HIGH = 200
"""Descriptors from here on are in nobody's way."""

_AT_START: dict[str, str] = {}
"""Such variables, as the process that forks has them."""

_Popen, _run, _started = subprocess.Popen, subprocess.run, pool.started

_may_fork = ContextVar("_may_fork", default="")
"""Set in a thread while it starts a process that may be forked; other threads start theirs as users do."""

_PR_SET_CHILD_SUBREAPER = 36


def use() -> None:
    """From now on fork what `subprocess.run` starts here, the processes of dry runs, and ranks.

    What a test starts with `subprocess.Popen` has its processes as users have them; `popen` forks them, too.
    """
    _AT_START.update(_read_at_start(dict(os.environ)))
    subprocess.Popen = Forked  # type: ignore[misc]
    subprocess.run = _with_forks("run", _run)
    pool.started = _with_forks("run", _started)
    environment = dict(os.environ)  # before any test changes it: ranks stay from test to test
    ranks.started = lambda *arguments: ForkedRank(environment, *arguments)


def popen(words: list[str], **how: Any) -> subprocess.Popen[Any]:
    """Start a command that a test disturbs: forked, and the parent of the processes that it starts."""
    process: subprocess.Popen[Any] = _with_forks("parent", subprocess.Popen)(words, **how)
    assert isinstance(process, Forked) and process._connection is not None, f"not forked: {words}"
    return process


def _with_forks(way: str, start: Callable[..., Any]) -> Callable[..., Any]:
    def starting(*args: Any, **kwargs: Any) -> Any:
        before = _may_fork.set(way)
        try:
            return start(*args, **kwargs)
        finally:
            _may_fork.reset(before)

    return starting


class Forked(_Popen):  # type: ignore[type-arg]
    """A process that is forked if its command, and who starts it, allow it."""

    _connection: socket.socket | None = None
    _always = False
    _own: socket.socket | None = None  # to the process that forks children of this one

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
            "ignored": [number for number in _CAN_BE_IGNORED if signal.getsignal(number) is signal.SIG_IGN],
            "is_parent": _may_fork.get() == "parent",
        }  # fmt: skip
        if self._own is None:
            self._connection = _connect()
        asked = self._own or self._connection
        assert asked is not None
        env[SOCKET] = os.environ[SOCKET]  # which this process may have started only now
        _send(asked, request, list(descriptors.values()))
        self.pid = _receive(asked)[0]["pid"]
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


_CAN_BE_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that a process ignores where the one that started it did."""


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
    first, second = [*map(str, _without_python(words)), "", ""][:2]
    is_ours = first == "-m" and (second.split(".")[0] == "frugal" or second == ranks.__name__)
    is_script = first == "-" or first.endswith(".py") or Path(first).parent == Path(sys.executable).parent
    return (is_ours or is_script) and _read_at_start(environment) == _AT_START


def _without_python(words: Any) -> list[Any]:
    return list(words[2:] if "-u" in words[1:2] else words[1:])


def _read_at_start(environment: dict[str, str]) -> dict[str, str]:
    names = {name for name in environment if name.startswith(READ_AT_START) and not name.startswith(SET_BY_TORCHRUN)}
    ours = {name: environment[name] for name in names.difference(SET_BY_IMPORTS)}
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
        [sys.executable, "-m", "tests.forked", os.environ[SOCKET], str(theirs), _ROOM_FOR_WORDS], pass_fds=[theirs],
        start_new_session=True, stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    os.close(theirs)
    os.dup2(ours, number := fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, HIGH), inheritable=False)
    os.close(ours)
    _PIPES.append(number)


_PIPES: list[int] = []
_ROOM_FOR_WORDS = " " * 4000


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
    subprocess.Popen = Forked  # type: ignore[misc]  # before others import it by its name
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


def _serve_parent(connection: socket.socket) -> None:
    """Fork children of the process that forked this one, which knows nothing of its state, as long as it lives."""
    parent = os.getppid()
    while True:
        request, descriptors = _receive(connection)
        if not request:
            os._exit(0)
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                while os.getppid() != parent:  # which adopts it once the process in between has ended
                    time.sleep(0.001)
                _be(request, descriptors, [connection.fileno(), read, write])
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # before that its parent cannot wait for it
        _send(connection, {"pid": int(os.read(read, 20))}, [])
        for number in (read, write, *descriptors):
            os.close(number)


def _start_own() -> None:
    """Have what this process starts be its own children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        _serve_parent(theirs)
    theirs.close()
    Forked._own = ours


def _be_listed_as(words: list[str]) -> None:
    """Write the words of this process where the kernel has those of the process that forks."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    content = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def _be(request: dict[str, Any], descriptors: list[int], not_ours: list[int]) -> None:
    """Become the process that was asked for; does not return."""
    code = 1
    try:
        for number in not_ours:
            os.close(number)
        _be_listed_as(request["words"])
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
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        if request["is_parent"]:
            _start_own()
        code = _be_program(_without_python(request["words"]))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _program(words: list[str]) -> Callable[[], Any]:
    sys.argv, name = words, words[0]
    sys.path.insert(0, str(Path.cwd() if name.startswith("-") else Path(name).absolute().parent))
    if name == "-m":
        del sys.argv[0]
        sys.modules.pop(sys.argv[0], None)
        return partial(runpy.run_module, sys.argv[0], run_name="__main__", alter_sys=True)
    if name == "-":
        main = sys.modules["__main__"] = ModuleType("__main__")
        return lambda: exec(compile(sys.stdin.read(), "<stdin>", "exec"), main.__dict__)
    return partial(runpy.run_path, name, run_name="__main__")


def _be_program(words: list[str]) -> int:
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    run = _program(words)
    Forked._always = True  # ranks, and processes of dry runs
    code = 0
    try:
        run()
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
