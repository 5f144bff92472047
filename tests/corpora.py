"""Reading data in tests: `frugal.data.corpus.load_corpus` with its settings as keywords."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frugal.data import corpus
from frugal.data.build import SampleSettings


def load_corpus(
    sources: Sequence[str],
    *,
    tokenizer: Any,
    cache_dir: Path | None = None,
    label_names: Sequence[str] = (),
    validation_fraction: float = 0.0,
    **settings: Any,
) -> corpus.Corpus:
    """Return the samples in `sources`; `settings` are those of `SampleSettings`."""
    return corpus.load_corpus(
        sources, tokenizer, SampleSettings(**settings), label_names=label_names,
        validation_fraction=validation_fraction, cache_dir=cache_dir,
    )  # fmt: skip
