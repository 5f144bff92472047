"""Two runs in one folder: the second is refused, on one host and on several."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from frugal.checkpoint import in_use, run_folder
from frugal.checkpoint.in_use import MARK, RunMark
from frugal.config.run_settings import RunSettings
from frugal.distributed import parent
from frugal.errors import RequestError

exhaustive = pytest.mark.exhaustive  # variations
BEAT, STALE = 0.05, 0.6


def in_process(work: Callable[[], object]) -> int:
    """Do this in a forked process; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except RequestError as error:
        print(f"error: {error}", flush=True)
        code = 2
    finally:
        os._exit(code)


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hold(out: Path, seconds: float) -> None:
    with run_folder.locked(RunSettings(out=out)):
        (out / f"held-{os.getpid()}").touch()
        time.sleep(seconds)


def hold_until(out: Path, path: Path) -> None:
    with run_folder.locked(RunSettings(out=out)):
        wait_for(path)


def holder(out: Path) -> int:
    """Another process that writes to `out`."""
    pid = in_process(lambda: hold(out, 60))
    wait_for(out / f"held-{pid}")
    return pid


def end(pid: int) -> None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert path.exists()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(in_use, "STALE_SECONDS", STALE)


def elsewhere() -> RunMark:
    """The mark of a run on another host."""
    mark = RunMark.of_this_process()
    mark.host, mark.boot = "elsewhere", "another"
    return mark


def test_a_second_run_of_this_host_is_refused_by_name_and_a_killed_run_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(in_use, "STALE_SECONDS", 1e6)
    first = holder(tmp_path)
    assert code_of(in_process(lambda: hold(tmp_path, 0))) == 2
    assert f"another run is writing to {tmp_path}: process {first} on " in capfd.readouterr().out
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / MARK).write_bytes((tmp_path / MARK).read_bytes())
    assert code_of(in_process(lambda: hold(copy, 0))) == 0, "nobody writes to a copy"
    end(first)
    assert (tmp_path / MARK).exists()
    assert code_of(in_process(lambda: hold(tmp_path, 0))) == 0
    assert not (tmp_path / MARK).exists()


def test_a_run_on_another_host_is_noticed_by_its_beats_whatever_its_clock_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mark, theirs = tmp_path / MARK, elsewhere()
    mark.write_bytes(theirs.encode())
    os.utime(mark, (0, 0))
    pid = in_process(lambda: hold(tmp_path, 0))
    time.sleep(STALE / 4)
    theirs.beats += 1
    mark.write_bytes(theirs.encode())
    assert code_of(pid) == 2
    assert code_of(in_process(lambda: hold(tmp_path, 0))) == 0, "it beats no more"
    assert "waiting 1 s to see whether a run on elsewhere still writes to" in capfd.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize(
    "left", ["stale", "a link to nothing", *(pytest.param(each, marks=exhaustive) for each in ("nothing", "broken"))]
)
def test_of_runs_that_start_at_once_one_goes_on(left: str, tmp_path: Path) -> None:
    mark = tmp_path / MARK
    if left == "broken":
        mark.write_bytes(b"{")
    elif left == "stale":
        mark.write_bytes(elsewhere().encode())
    elif left == "a link to nothing":
        mark.symlink_to(tmp_path / "nowhere")
    are_done = tmp_path / "the others are done"
    running = [in_process(lambda: hold_until(tmp_path, are_done)) for _ in range(8)]
    codes, until = [], time.monotonic() + 120
    while len(running) > 1 and time.monotonic() < until:
        ended = [pid for pid in running if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        running = [pid for pid in running if pid not in ended]
        codes += map(code_of, ended)
        time.sleep(0.01)
    are_done.touch()
    assert codes == [2] * 7
    assert list(map(code_of, running)) == [0]
    assert not mark.exists()


def test_a_run_that_was_stopped_and_has_lost_its_folder_ends_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = holder(tmp_path)
    os.kill(first, 19)  # SIGSTOP
    time.sleep(2 * BEAT)
    successor = elsewhere().encode()
    (tmp_path / MARK).write_bytes(successor)  # as a run on another host does
    os.kill(first, 18)  # SIGCONT
    assert code_of(first) == 2
    assert f"another run is writing to {tmp_path}: process {os.getpid()} on elsewhere" in capfd.readouterr().err
    assert (tmp_path / MARK).read_bytes() == successor


def test_a_mark_that_somebody_deletes_or_damages_is_made_again(tmp_path: Path) -> None:
    first = holder(tmp_path)
    (tmp_path / MARK).unlink()
    wait_for(tmp_path / MARK)
    (tmp_path / MARK).write_bytes(b"")
    until = time.monotonic() + 60
    while (mark := in_use.read(tmp_path / MARK)) is None and time.monotonic() < until:
        time.sleep(BEAT)
    assert mark is not None and mark.pid == first
    end(first)


def test_a_killed_run_that_no_parent_reaps_is_not_alive(tmp_path: Path) -> None:
    first = holder(tmp_path)
    os.kill(first, 9)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert code_of(in_process(lambda: hold(tmp_path, 0))) == 0
    os.waitpid(first, 0)


def test_a_run_restarted_on_other_hosts_waits_for_the_one_that_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[Path] = []

    @contextlib.contextmanager
    def marked(out: Path) -> Iterator[None]:
        attempts.append(out)
        if len(attempts) < 3:
            raise in_use.in_use(out, None)
        yield

    monkeypatch.setattr(in_use, "marked", marked)
    monkeypatch.setattr(run_folder.time, "sleep", lambda _seconds: None)
    with pytest.raises(RequestError, match="another run is writing"), run_folder.locked(RunSettings(out=tmp_path)):
        pass
    attempts.clear()
    monkeypatch.setenv(parent.OVER_SSH, "1")
    with run_folder.locked(RunSettings(out=tmp_path, resume=True)):
        assert len(attempts) == 3
