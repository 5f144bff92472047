"""Two runs in one folder: the second is refused, where locks work and where they do not."""

import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from frugal.config.run_settings import RunSettings
from frugal.errors import RequestError
from frugal.training.checkpoint import in_use, run_folder
from frugal.training.checkpoint.in_use import MARK, Mark

exhaustive = pytest.mark.exhaustive  # variations
BEAT, STALE = 0.05, 0.6
FLOCK = {"x86_64": 73, "aarch64": 32}[os.uname().machine]


def without_locks(number: int) -> None:
    """Let the kernel refuse flock to this process and its children with this error, by a seccomp filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = [(0x20, 0, 0, 0), (0x15, 0, 1, FLOCK), (0x06, 0, 0, 0x00050000 | number), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP


def in_process(work: Callable[[], object], *, number: int | None = errno.ENOSYS) -> int:
    """Do this in a forked process whose locks fail, with what it prints beside; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if number is not None:
            without_locks(number)
        work()
        code = 0
    except RequestError as error:
        print(f"error: {error}")
        code = 2
    finally:
        os._exit(code)


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hold(out: Path, seconds: float) -> None:
    with run_folder.locked(RunSettings(out=out)):
        (out / f"held-{os.getpid()}").touch()
        time.sleep(seconds)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert path.exists()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(in_use, "STALE_SECONDS", STALE)


def of_another_host(path: Path) -> bytes:
    """The mark as a run on another host would have written it."""
    made = in_use.read(path)
    assert made is not None
    made.host, made.boot = "elsewhere", "another"
    return made.encode()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_where_locks_fail_it_is_said_and_a_second_run_is_refused_by_name(
    number: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = in_process(lambda: hold(tmp_path, 60), number=number)
    wait_for(tmp_path / f"held-{first}")
    assert code_of(in_process(lambda: hold(tmp_path, 0), number=number)) == 2
    os.kill(first, 9)
    os.waitpid(first, 0)
    said = (
        f"{tmp_path} cannot be locked ({os.strerror(number)}): that a second run uses it is noticed by its file "
        ".running, within 1 s\n"
    )
    assert said in capfd.readouterr().err
    assert code_of(in_process(lambda: hold(tmp_path, 0), number=number)) == 0, "the first one is dead"
    assert not (tmp_path / MARK).exists()


def test_a_run_on_another_host_is_noticed_by_its_beats_whatever_its_clock_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each host has a lock: NFS keeps those of folders to itself."""
    mark = tmp_path / MARK
    own = Mark.of_this_process()
    own.host, own.boot = "elsewhere", "another"
    mark.write_bytes(own.encode())
    os.utime(mark, (0, 0))
    pid = in_process(lambda: hold(tmp_path, 0), number=None)
    time.sleep(STALE / 4)
    own.beats += 1
    mark.write_bytes(own.encode())
    assert code_of(pid) == 2
    pid = in_process(lambda: hold(tmp_path, 0), number=None)  # which beats no more
    assert code_of(pid) == 0
    assert "waiting 1 s to see whether a run on elsewhere still writes to" in capfd.readouterr().err
    assert not mark.exists()


def test_a_killed_run_of_this_host_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "STALE_SECONDS", 1e6)
    first = in_process(lambda: hold(tmp_path, 60), number=None)
    wait_for(tmp_path / f"held-{first}")
    os.kill(first, 9)
    os.waitpid(first, 0)
    assert (tmp_path / MARK).exists()
    assert code_of(in_process(lambda: hold(tmp_path, 0), number=None)) == 0


@pytest.mark.parametrize("left", ["stale", *(pytest.param(each, marks=exhaustive) for each in ("nothing", "broken"))])
def test_of_runs_that_start_at_once_where_locks_fail_one_goes_on(left: str, tmp_path: Path) -> None:
    mark = tmp_path / MARK
    if left == "broken":
        mark.write_bytes(b"{")
    elif left == "stale":
        own = Mark.of_this_process()
        own.boot = "another"
        mark.write_bytes(own.encode())
    pids = [in_process(lambda: hold(tmp_path, 3 * STALE)) for _ in range(8)]
    assert sorted(map(code_of, pids)) == [0, *[2] * 7]
    assert not mark.exists()


def test_a_run_that_was_stopped_and_has_lost_its_folder_ends_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = in_process(lambda: hold(tmp_path, 60))
    wait_for(tmp_path / f"held-{first}")
    os.kill(first, 19)  # SIGSTOP
    time.sleep(2 * BEAT)
    (tmp_path / MARK).write_bytes(of_another_host(tmp_path / MARK))  # as if it had been seen from another host
    second = in_process(lambda: hold(tmp_path, 60))
    wait_for(tmp_path / f"held-{second}")
    os.kill(first, 18)  # SIGCONT
    assert code_of(first) == 2
    assert f"another run is writing to {tmp_path}: process {second} on " in capfd.readouterr().err
    os.kill(second, 15)
    os.waitpid(second, 0)


def test_a_mark_that_somebody_deletes_is_made_again(tmp_path: Path) -> None:
    first = in_process(lambda: hold(tmp_path, 60))
    wait_for(tmp_path / f"held-{first}")
    (tmp_path / MARK).unlink()
    wait_for(tmp_path / MARK)
    os.kill(first, 9)
    os.waitpid(first, 0)
