"""Caches do not grow for ever, and nothing that is needed is removed."""

import os
import time
from pathlib import Path

import pytest

from frugal.data.tokenizer import load_tokenizer
from frugal.dryrun import cache as profiles
from frugal.dryrun.cache import Cache
from frugal.files import DAY, lock, prune, touch
from tests.corpora import load_corpus


def entry(path: Path, num_bytes: int, days: float) -> Path:
    """A file of so many bytes, or a folder with one, last used so many days ago."""
    file = path if path.suffix else path / "report.json"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(num_bytes))
    used = time.time() - days * DAY
    os.utime(file, (used, used))
    os.utime(path, (used, used))
    return path


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("entries", "stays"),
    [
        ({"old.json": (1, 91), "young.json": (1, 89)}, {"young.json"}),
        ({f"{days}": (40, days) for days in (2, 3, 4, 5)}, {"2", "3"}),
        ({"new.json": (1000, 0.9)}, {"new.json"}),
    ],
    ids=["90 days", "the least recently used beyond the limit", "today's, whatever its size"],
)
def test_what_is_old_or_beyond_the_limit_is_removed(
    entries: dict[str, tuple[int, float]], stays: set[str], tmp_path: Path
) -> None:
    for name, (num_bytes, days) in entries.items():
        entry(tmp_path / name, num_bytes, days)
    prune(tmp_path, 100)
    assert left(tmp_path) == stays


def test_what_a_process_has_locked_stays(tmp_path: Path) -> None:
    data = entry(tmp_path / "data", 1, 100)
    with lock(data / "report.json"):
        prune(tmp_path, 100)
    assert left(tmp_path) == {"data"}


def test_pruning_is_done_once_a_day(tmp_path: Path) -> None:
    prune(tmp_path, 100)
    entry(tmp_path / "old.json", 1, 91)
    prune(tmp_path, 100)
    assert left(tmp_path) == {"old.json"}
    yesterday = time.time() - 1.1 * DAY
    os.utime(tmp_path.with_name(f".{tmp_path.name}.pruned"), (yesterday, yesterday))
    prune(tmp_path, 100)
    assert left(tmp_path) == set()
    prune(tmp_path / "missing", 100)  # no error
    touch(tmp_path / "missing")


def test_a_profile_that_is_read_was_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "LIMIT_BYTES", 10)
    kept = Cache(tmp_path)
    for key in ("read", "not-read"):
        kept.write(key, "12345")
        entry_time = time.time() - 80 * DAY
        os.utime(tmp_path / f"{key}.json", (entry_time, entry_time))
    assert kept.read("read", str) == "12345"
    os.utime(tmp_path.with_name(f".{tmp_path.name}.pruned"), (0, 0))
    kept.write("new", "1")
    assert left(tmp_path) == {"read.json", "new.json"}


def test_tokenised_data_of_another_time_is_removed_and_that_of_this_process_stays(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a few words\n" * 20)
    cache = tmp_path / "data"

    load_corpus(
        [str(tmp_path / "text.txt")], tokenizer=load_tokenizer("byte"), task="causal-lm", seq_len=16, cache_dir=cache
    )
    (own,) = left(cache)
    entry(cache / "other", 1, 101)
    used = time.time() - 100 * DAY
    for path in (cache / own, tmp_path / ".data.pruned"):
        os.utime(path, (used, used))
    prune(cache, 10)
    assert left(cache) == {own}
