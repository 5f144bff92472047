"""Data by links: each file is read once, whatever leads to it, and no folder is entered through one below it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from frugal.data.sources import find_named, find_sources


def tree(folder: Path) -> Path:
    """Three files in folders of a folder that is returned, and one beside it."""
    for name in ("D/a.jsonl", "D/x/b.jsonl", "D/x/y/c.jsonl", "outside/d.jsonl", "D/.hidden/e.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'{{"text": "this is {name}"}}\n')
    return folder / "D"


def link(place: Path, name: str, target: str) -> None:
    (place / name).symlink_to(target)


def links_to_each_other(place: Path) -> None:
    link(place / "x", "up", "..")
    link(place, "also", "x")
    link(place / "x/y", "top", "../..")


BEFORE = ["a.jsonl", "x/b.jsonl", "x/y/c.jsonl"]
LINKS: list[tuple[Callable[[Path], None], bool]] = [
    (links_to_each_other, False),
    (lambda place: link(place, "loop", "loop"), False),
    (lambda place: link(place, "broken.jsonl", "nowhere"), False),
    (lambda place: link(place, "out", "../outside"), False),
    (lambda place: link(place, "0.jsonl", "x/b.jsonl"), True),
    (lambda place: os.link(place / "a.jsonl", place / "z.jsonl"), True),
]


@pytest.mark.parametrize(("make", "is_said"), LINKS)
@pytest.mark.parametrize("pattern", ["**/*.jsonl", "**", ""])
def test_links_lead_into_no_folder_and_a_file_with_two_names_is_read_once(
    pattern: str, make: Callable[[Path], None], is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tree(tmp_path)
    make(place)
    found = find_sources([str(place / pattern)])
    assert [source.name for source in found] == [str(place / name) for name in BEFORE]
    assert ("under several names, such as " in caplog.text) == is_said


def test_a_pattern_below_two_stars_matches_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree(tmp_path))
    names = {
        "**/x/*.jsonl": ["x/b.jsonl"], "**/x/**/*.jsonl": ["x/b.jsonl", "x/y/c.jsonl"], "x/**": BEFORE[1:],
        "*/**/c.*": ["x/y/c.jsonl"], ".h*/*.jsonl": [".hidden/e.jsonl"], "../*/**/d.jsonl": ["../outside/d.jsonl"],
    }  # fmt: skip
    for pattern, expected in names.items():
        assert [source.name for source in find_sources([pattern])] == expected, pattern


def test_a_file_that_is_named_twice_is_read_twice_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("one")
    named = find_named([str(tmp_path / "a.txt"), str(tmp_path / "*.txt")])
    assert [len(each) for each in named] == [1, 1]
    assert caplog.messages == [f"named several times, and read as often: {tmp_path / 'a.txt'}"]
