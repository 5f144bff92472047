"""A plan is told how long the samples are that training will see."""

from dataclasses import replace
from pathlib import Path

import pytest

from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.data.corpus import lengths_of
from frugal.errors import RequestError
from tests.engine.corpora import write_jsonl


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def data(tmp_path: Path, *rows: dict[str, object]) -> RunSettings:
    write_jsonl(tmp_path / "data.jsonl", list(rows))
    return RunSettings(data=(str(tmp_path / "data.jsonl"),), validation_data=("0%",))


def test_running_text_is_as_long_as_its_windows(tmp_path: Path) -> None:
    settings = data(tmp_path, {"text": "a" * 98}, {"text": "b" * 8})
    lengths, *_ = lengths_of(Request(model="gpt2", seq_len=64), settings)
    assert (lengths.tokens, lengths.counts) == ((10, 37, 64), (1, 1, 1)), "99 targets: 63 and 36, each after one token"
    assert lengths.source == settings.data[0]


def test_pairs_are_as_long_as_their_longer_side_and_count_their_target_tokens(tmp_path: Path) -> None:
    settings = data(tmp_path, {"source": "a" * 9, "target": "b" * 3}, {"source": "c", "target": "d" * 19})
    lengths, *_ = lengths_of(Request(model="t5", seq_len=64), settings)
    assert (lengths.tokens, lengths.counts, lengths.counted_mean) == ((10, 20), (1, 1), 12.0), "with an end token each"


def test_pairs_that_are_too_long_are_named_or_counted(tmp_path: Path) -> None:
    settings = data(tmp_path, {"text": "a" * 9, "label": 0}, {"text": "b" * 99, "label": 1})
    request = Request(model="bert", task="sequence-classification", seq_len=64)
    with pytest.raises(RequestError, match="1 sample is longer than --seq-len"):
        lengths_of(request, settings)
    lengths, *_ = lengths_of(request, replace(settings, too_long="truncate"))
    assert (lengths.tokens, lengths.counts) == ((11, 64), (1, 1))
    assert lengths.source == f"{settings.data[0]}; 1 row longer than --seq-len truncated"


def test_a_default_length_becomes_that_of_much_shorter_data(tmp_path: Path) -> None:
    settings = replace(data(tmp_path, *({"text": "a" * n} for n in range(90, 125))), validation_data=("10%",))
    request = Request(model="gpt2")
    assert lengths_of(request, settings, ("seq_len",))[1] == 128, "125 tokens, rounded up to a multiple of 8"
    assert lengths_of(request, settings)[1] == 1024, "asked for"
    assert lengths_of(replace(request, seq_len=200), settings, ("seq_len",))[1] == 200, "not much shorter"


def test_longer_samples_for_validation_count_too(tmp_path: Path) -> None:
    longer = tmp_path / "longer.txt"
    longer.write_text("b" * 300)
    settings = replace(data(tmp_path, {"text": "a" * 30}), validation_data=(str(longer),))
    assert lengths_of(Request(model="gpt2"), settings, ("seq_len",))[1] == 304
