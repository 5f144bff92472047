"""Tokenised data that is damaged is noticed and made anew; where that cannot be, it is said."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from frugal.data import corpus
from frugal.data.report import BuildReport
from frugal.data.store import cache
from frugal.data.tokenizer import byte_tokenizer
from tests.corpora import load_corpus
from tests.disks import small_disk
from tests.engine.corpora import Load, refusal, texts, write_jsonl

TEXTS = [f"line {number}: to be or not to be" for number in range(50)]
WAIT_SECONDS = 120


@pytest.fixture
def stored(load: Load, tmp_path: Path) -> Path:
    """An entry of the cache."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    load("a.jsonl", validation_fraction=0.1)
    (folder,) = (tmp_path / "cache").iterdir()
    return folder


def turned(path: Path, at: float) -> None:
    """One bit of a file is another, at this part of its length."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def another_token(path: Path) -> None:
    """`not` becomes `nor`, in the middle of the tokens: a sample as good as any."""
    data = path.read_bytes()
    ids = [b"".join((4 + byte).to_bytes(4, "little") for byte in word) for word in (b"not", b"nor")]
    assert data.count(ids[0]) > 10
    path.write_bytes(data.replace(*ids, 1))


def replaced_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def deep(folder: Path) -> None:
    (folder / cache.CHECKSUMS).write_bytes(b"[" * 200_000)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "another token": (lambda folder: another_token(folder / "train.arrow"), "train.arrow has other bytes than it had"),
    "half of a file": (
        lambda folder: os.truncate(folder / "train.arrow", 1000),
        "train.arrow has other bytes than it had",
    ),
    "a file is gone": (lambda folder: (folder / "validation.arrow").unlink(), "validation.arrow cannot be read"),
    "a file is a pipe": (
        lambda folder: replaced_by_a_pipe(folder / "train.arrow"),
        "train.arrow cannot be read: it is a named pipe",
    ),
    "a bit of the report": (lambda folder: turned(folder / cache.REPORT, 0.5), cache.REPORT),
    "a bit of the checksums": (lambda folder: turned(folder / cache.CHECKSUMS, 0.5), ""),
    "a name in the checksums": (lambda folder: turned(folder / cache.CHECKSUMS, 0.02), cache.REPORT),
    "no report": (lambda folder: (folder / cache.REPORT).unlink(), cache.REPORT),
    "no checksums": (lambda folder: (folder / cache.CHECKSUMS).unlink(), cache.CHECKSUMS),
    "the checksums are deep": (deep, cache.CHECKSUMS),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_is_said_in_a_line_and_made_anew(
    case: str, stored: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    damage, reason = DAMAGE[case]
    damage(stored)
    again = load("a.jsonl", validation_fraction=0.1)
    assert texts(again) == [text for number, text in enumerate(TEXTS) if number % 10]
    assert again.validation is not None and len(again.validation) == 5
    (said,) = caplog.messages
    assert said.startswith(f"the tokenised data in {stored} is damaged (") and said.endswith("): making it anew")
    assert reason in said
    assert list(stored.parent.iterdir()) == [stored]
    load("a.jsonl", validation_fraction=0.1)
    assert len(caplog.messages) == 1


def test_several_that_notice_the_same_damage_at_once_do_not_disturb_each_other(
    stored: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        turned(stored / "train.arrow", 0.5)
        with ThreadPoolExecutor(4) as pool:
            corpora = list(pool.map(lambda _: load("a.jsonl", validation_fraction=0.1), range(4)))
        assert all(texts(each) == texts(corpora[0]) for each in corpora)
        cache.read(stored)
        assert list(stored.parent.iterdir()) == [stored]


BUILDER = """
import sys, time
from pathlib import Path
from frugal.data.store import cache

def write(folder):
    (folder / "train.arrow").write_bytes(bytes(1000))
    print(folder.parent.name, flush=True)
    time.sleep(1000)

cache.read_or_build(Path(sys.argv[1]), write)
"""


@contextlib.contextmanager
def building(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process in the middle of making an entry, and the temporary folder that it fills."""
    command = [sys.executable, "-c", BUILDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, folder.parent / process.stdout.readline().strip()
        finally:
            process.kill()


def test_what_a_killed_builder_leaves_is_not_taken_for_whole_and_is_removed(stored: Path, load: Load) -> None:
    with building(stored.with_name("other")) as (process, unfinished):
        load("a.jsonl")
        assert unfinished.exists()  # it is at work
        process.kill()
        process.wait(WAIT_SECONDS)
        with pytest.raises(FileNotFoundError):
            cache.read(stored.with_name("other"))
        load("a.jsonl", seq_len=32)
        assert not unfinished.exists()


def test_another_builder_is_waited_for_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def write(folder: Path) -> BuildReport:
        (folder / "train.arrow").write_bytes(b"x")
        return BuildReport(documents=1)

    entry = tmp_path / "entry"
    with building(entry) as (process, _), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.read_or_build, entry, write)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        process.kill()
        assert waiting.result(WAIT_SECONDS).documents == 1
        assert "waiting for another process" in caplog.text
    assert cache.read(entry).documents == 1


def test_a_full_disk_is_said_with_numbers_and_nothing_is_left(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "word " * 50}] * 2000)
    with small_disk(tmp_path / "small", "600k") as disk:
        said = refusal(lambda: load("a.jsonl", cache_dir=disk / "data"))
        assert said.startswith(f"the tokenised data cannot be written\n  because {disk}/data: ")
        assert f"No space left on device (0.6 MiB of 0.6 MiB are free at {disk})" in said
        assert said.endswith(f"hint: make room at {disk}, or set XDG_CACHE_HOME to a folder on another disk")
        assert list((disk / "data").iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])

    def said() -> str:
        return refusal(
            lambda: load_corpus([str(tmp_path / "a.jsonl")], tokenizer=byte_tokenizer(), task="causal-lm", seq_len=64)
        )

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert said() == (
        f"the tokenised data cannot be written\n  because {tmp_path}/file/frugal/data: Not a directory\n\n"
        "hint: see to it that it can be written, or set XDG_CACHE_HOME to a folder on another disk"
    )
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    assert "could not determine the home directory for '~/.cache'" in said()


def test_what_is_damaged_on_a_disk_that_cannot_be_written_to_is_refused(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    with small_disk(tmp_path / "small", "1m") as disk:
        entry = Path(load("a.jsonl", cache_dir=disk).folder)
        corpus._locks.pop(entry).close()
        turned(entry / "train.arrow", 0.5)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert refusal(lambda: load("a.jsonl", cache_dir=disk)).startswith(
            f"the tokenised data cannot be written\n  because {entry.with_name(f'.{entry.name}.lock')}: Read-only file"
        )
