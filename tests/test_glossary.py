"""One word a thing: words that are gone stay gone, in code, messages, tests and docs."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

GONE = {
    r"rehears\w*": "dry run",
    r"\bcells?\b": "micro-batch, or micro-batch sizes",
    r"\bladder\w*": "strategy table",
    r"\brelief\b": "remedies",
    r"\bcaution\b": "adaptive limits",
    r"\bballots?\b": "vote",
    r"\blifelines?\b": "peer watch",
    r"\bappraisals?\b": "evaluation",
    r"\bmeetings?\b|\bmeeting_": "rendezvous",
    r"\bcircumstances?\b": "environment",
    r"\b(a|the) star\b": "connections to rank 0",
    r"\bthe (door|house)\b": "the command line; the package",
    r"\bwhole or not\b": "atomic",
    r"\bcloser look\b|\blooked at closely\b": "evaluated fully",
}
"""What is no longer said, and what is said instead."""

KEPT = {
    "a table cell": re.compile(r"\btable cells?\b|\bcells? of (a|the) table\b"),
}

LEFT: dict[str, int] = {}
"""Uses of a word that is gone which are still to be replaced; more of them fail."""

NAMED_FOUND: dict[str, int] = {}
"""Local names `found` still to be replaced, by folder below the package; more of them fail."""


def texts() -> Iterator[tuple[str, str]]:
    """Path and text of what people read: the package, its tests and benchmarks, README and docs."""
    for pattern in ("frugal/**/*.py", "frugal/**/*.toml", "bench/**/*.py", "tests/**/*.py", "ds_configs/*.*"):
        yield from ((str(path.relative_to(ROOT)), path.read_text()) for path in sorted(ROOT.glob(pattern)))
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md"):
        yield from ((str(path.relative_to(ROOT)), path.read_text()) for path in sorted(ROOT.glob(pattern)))


@pytest.mark.parametrize("word", GONE)
def test_a_word_that_is_gone_stays_gone(word: str) -> None:
    uses = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts()
        if path != "tests/test_glossary.py"
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(word, line, re.IGNORECASE)
    ]
    assert len(uses) <= LEFT.get(word, 0), f"say `{GONE[word]}`:\n" + "\n".join(uses)


def test_nothing_is_named_found() -> None:
    """A name says what was looked up, not that it was."""
    uses: Counter[str] = Counter()
    for path in sorted((ROOT / "frugal").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""
            if isinstance(node, ast.arg):
                name = node.arg
            uses[path.relative_to(ROOT / "frugal").parts[0]] += name == "found"
    more = {folder: number for folder, number in uses.items() if number > NAMED_FOUND.get(folder, 0)}
    assert not more
