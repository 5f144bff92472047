"""A run's secret comes from where only its user can have put it."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from frugal.distributed.connections import secret
from frugal.errors import RequestError


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make this a process of several hosts, with nothing in its environment."""
    for name in (secret.SECRET, secret.SECRET_FILE, "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    secret.of_run.cache_clear()
    yield
    secret.of_run.cache_clear()


def test_one_of_the_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = secret.make()
    monkeypatch.setenv(secret.SECRET, made)
    assert len(made) * 4 == 256
    assert secret.of_run() == made.encode()
    assert secret.SECRET not in os.environ
    assert secret.of_run() == made.encode()


def test_ranks_of_several_hosts_that_were_given_none_have_none() -> None:
    assert secret.of_run() is None


def test_ranks_of_one_host_share_a_file_of_their_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    first = secret.of_run()
    secret.of_run.cache_clear()
    assert first is not None
    assert secret.of_run() == first
    (file,) = (tmp_path / "cache" / "frugal").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def a_file(path: Path, mode: int, text: str = "x" * 40) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(secret.SECRET_FILE, str(a_file(tmp_path / "secret", 0o600, "x" * 40 + "\n")))
    assert secret.of_run() == b"x" * 40


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(mode: int, tmp_path: Path) -> None:
    path = a_file(tmp_path / "secret", mode)
    with pytest.raises(RequestError, match=f"its mode is {mode:03o}: others than its owner can read") as caught:
        secret.read(path)
    assert "hint: make a new one: (umask 077; head -c 32 /dev/urandom | base64 > FILE)" in str(caught.value)


def test_what_is_no_file_or_short_or_another_user_s_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    cases = [
        (tmp_path / "fifo", "it is no regular file"),
        (tmp_path / "none", "No such file or directory"),
        (a_file(tmp_path / "short", 0o600, "123456\n"), "it has 6 bytes, and 16 or more cannot be guessed"),
    ]
    if os.geteuid() == 0:  # only root gives files away
        os.chown(given := a_file(tmp_path / "given", 0o600), 12345, -1)
        cases.append((given, "it belongs to user 12345, and this process to user 0"))
    for path, why in cases:
        with pytest.raises(RequestError, match=why):
            secret.read(path)
