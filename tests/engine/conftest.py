"""Fixtures for models and data that come from files alone."""

from pathlib import Path
from typing import Any

import pytest

from frugal.data.corpus import Corpus
from frugal.data.tokenizer import byte_tokenizer
from frugal.models import factories as hub
from tests.corpora import load_corpus
from tests.engine.corpora import Load
from tests.engine.small_models import FACTORIES


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, and a working folder of its own."""
    monkeypatch.setattr(hub, "hub_unreachable_because", lambda: "HF_HUB_OFFLINE is set")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def load(tmp_path: Path, offline: None) -> Load:
    """`data.load` with the byte tokenizer, a cache of its own, no network, and short relative paths."""

    def load(*where: str, task: str = "causal-lm", seq_len: int = 64, **options: Any) -> Corpus:
        options = {"tokenizer": byte_tokenizer(), "cache_dir": tmp_path / "cache", **options}
        return load_corpus(where, task=task, seq_len=seq_len, **options)

    return load


@pytest.fixture
def factories(tmp_path: Path) -> None:
    """Functions that make models, and some that do not, in `my_models.py`."""
    (tmp_path / "my_models.py").write_text(FACTORIES)
