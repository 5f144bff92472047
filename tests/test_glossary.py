"""One word a thing: words that are gone stay gone, in code, messages, tests and docs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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
    r"\b(?:a|the) star\b": "connections to rank 0",
    r"\bthe (?:door|house)\b": "the command line; the package",
    r"\bwhole or not\b": "atomic",
    r"\bcloser look\b|\blooked at closely\b": "evaluated fully",
}
"""What is no longer said, and what is said instead."""


def texts() -> Iterator[tuple[str, str]]:
    """Path and text of what people read: the package, its tests and benchmarks, README and docs."""
    for pattern in (
        "frugal/**/*.py", "frugal/**/*.toml", "bench/**/*.py", "tests/**/*.py", "ds_configs/*.*", "README.md",
        "CONTRIBUTING.md", "docs/**/*.md",
    ):  # fmt: skip
        yield from ((str(path.relative_to(ROOT)), path.read_text()) for path in sorted(ROOT.glob(pattern)))


def test_words_that_are_gone_stay_gone() -> None:
    gone = re.compile("|".join(f"(?P<w{number}>{word})" for number, word in enumerate(GONE)), re.IGNORECASE)
    instead = list(GONE.values())
    uses = [
        f"{path}: {match[0]}, say `{instead[int(str(match.lastgroup)[1:])]}`"
        for path, text in texts()
        if path != "tests/test_glossary.py"
        for match in gone.finditer(text)
    ]
    assert uses == []


def test_nothing_is_named_found() -> None:
    """A name says what was looked up, not that it was."""
    names = (
        (path, node.arg if isinstance(node, ast.arg) else node.id)
        for path in sorted((ROOT / "frugal").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )
    assert [path for path, name in names if name == "found"] == []
