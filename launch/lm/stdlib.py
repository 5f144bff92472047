"""Python's own library as a corpus for language models: a file is a document, and belongs to one part for good."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

PARTS = 40
"""Every so many files one is for validation and one for the test."""


def files() -> list[Path]:
    """Sorted, without the library's tests, which not every distribution has."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if not left_out.intersection(path.relative_to(root).parts))


def part_of(number: int) -> str:
    """Where file `number` belongs."""
    return {0: "test", PARTS // 2: "validation"}.get(number % PARTS, "training")


def training() -> Iterator[dict[str, str]]:
    """What is learned from."""
    return _documents("training")


def validation() -> Iterator[dict[str, str]]:
    """What is looked at meanwhile."""
    return _documents("validation")


def test() -> Iterator[dict[str, str]]:
    """What is looked at once, at the end."""
    return _documents("test")


def _documents(part: str) -> Iterator[dict[str, str]]:
    for number, path in enumerate(files()):
        if part_of(number) == part:
            yield {"text": path.read_text(encoding="utf-8", errors="replace")}
