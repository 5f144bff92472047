"""Where a run's data comes from: so that a run that continues on other data can say what has changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from frugal.training.sources import Source

MOST_FILES = 100  # named; of more, only the hash over all of them is kept
_SHOWN = 3

_WORDS = {
    "task": "--task", "seq_len": "--seq-len", "limit": "--limit", "too_long": "--too-long", "labels": "the classes",
    "validation": "--validation-fraction", "columns": "the columns", "tokenizer": "the tokenizer",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What samples were made of.

    Attributes:
        fingerprint: a hash of all that made the samples.
        options: how they were made, by name, in words.
        files: the hash of each file's content, by name; none where there are more than `MOST_FILES`.
        documents: good rows.
        samples: made of them.
        tokens: in the samples.
    """

    fingerprint: str = ""
    options: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    documents: int = 0
    samples: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, sources: Sequence[Source], fingerprint: str, options: Mapping[str, Any], **counts: int) -> Self:
        """Of samples made of `sources` with `options`, of which those in `_WORDS` are kept."""
        files = {source.name: source.fingerprint.partition(":")[2][:16] for source in sources}
        kept = {name: "not given" if options[name] is None else str(options[name]) for name in _WORDS}
        return cls(fingerprint=fingerprint, options=kept, files=files if len(files) <= MOST_FILES else {}, **counts)

    def changes(self, now: "Provenance") -> list[str]:
        """What differs, a line each."""
        lines = [
            "the tokenizer is another one" if name == "tokenizer" else f"{word} was {self.options[name]}, is {value}"
            for name, word in _WORDS.items()
            if (value := now.options.get(name)) != self.options.get(name, value)
        ]
        if self.files and now.files:
            lines += self._changed_files(now)
        counts = [
            f"{each.documents:,} documents, {each.samples:,} samples, {each.tokens:,} tokens" for each in (self, now)
        ]
        if counts[0] != counts[1]:
            lines.append(f"it had {counts[0]}, now it has {counts[1]}")
        return lines or ["its files have other content"]

    def _changed_files(self, now: "Provenance") -> list[str]:
        gone = [name for name in self.files if name not in now.files]
        new = [name for name in now.files if name not in self.files]
        other = [name for name, digest in self.files.items() if now.files.get(name, digest) != digest]
        said = ((other, "other content"), (gone, "gone"), (new, "new"))
        lines = [f"{_names(names)} {_verb(names, word)}" for names, word in said if names]
        return lines or ["its files are in another order"] * (list(self.files) != list(now.files))


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _verb(names: Sequence[str], word: str) -> str:
    several = len(names) > 1
    return (
        f"{'have' if several else 'has'} {word}" if word == "other content" else f"{'are' if several else 'is'} {word}"
    )
