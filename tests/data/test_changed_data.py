"""Data that changes between stopping and going on is noticed, told in detail, and accepted only if asked."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frugal.checkpoint import resume_checks
from frugal.checkpoint.progress import Progress
from frugal.data import build
from frugal.data.batches import Position
from frugal.data.sources import Provenance
from frugal.data.tokenizer import byte_tokenizer
from frugal.errors import FrugalError
from tests.corpora import load_corpus


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files, in the current folder."""
    monkeypatch.chdir(tmp_path)
    write("a.jsonl", ["one", "two"])
    write("b.jsonl", ["three"])
    return tmp_path


def write(name: str, texts: list[str]) -> None:
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def read(*sources: str, tokenizer: Any = None, **options: Any) -> Provenance:
    how = {"task": "causal-lm", "seq_len": 16, "cache_dir": Path("cache"), **options}
    return load_corpus(sources, tokenizer=tokenizer or byte_tokenizer(), **how).provenance


def test_it_is_told_what_changed(folder: Path) -> None:
    before = read("a.jsonl", "b.jsonl")
    assert read("b.jsonl", "a.jsonl").fingerprint != before.fingerprint
    assert before.changes(read("b.jsonl", "a.jsonl")) == ["its files are in another order"]
    assert before.changes(read("a.jsonl", "b.jsonl", limit=2)) == [
        "train.limit was not given, is 2",
        "it had 3 documents, 3 samples, 17 tokens, now it has 2 documents, 2 samples, 10 tokens",
    ]
    other = copy.deepcopy(byte_tokenizer())
    other.add_tokens(["two"])
    assert before.changes(read("a.jsonl", "b.jsonl", tokenizer=other))[0] == "the tokenizer is another one"
    Path("b.jsonl").rename("c.jsonl")
    write("a.jsonl", ["one", "TWO"])
    changes = before.changes(read("a.jsonl", "c.jsonl"))
    assert changes == ["other content: a.jsonl", "gone: b.jsonl", "new: c.jsonl"]


def test_of_many_files_the_first_are_named_and_of_very_many_none() -> None:
    def of(content: str, number: int) -> Provenance:
        files = {f"{i}.txt": content for i in range(number)}
        return Provenance(fingerprint=content, files=files, documents=number)

    assert of("x", 9).changes(of("y", 9)) == ["other content: 0.txt, 1.txt, 2.txt and 6 more"]
    assert Provenance(fingerprint="x").changes(Provenance(fingerprint="y")) == ["its files have other content"]


DATA = Provenance(fingerprint="x", files={"a.txt": "1"}, documents=3, samples=3, tokens=9)
OTHER = replace(DATA, fingerprint="y", files={"a.txt": "2"}, tokens=10)
PROGRESS = Progress(step=40, position=Position(2, 5), data=DATA, seed=1)


def go_on(now: Provenance, *, seed: int = 1, accept: bool = False) -> tuple[Progress, tuple[str, ...]]:
    resume_checks.check_progress(PROGRESS, Path("run"), seed, None)
    return resume_checks.on_data(PROGRESS, now, Path("run"), accepts_changes=accept)


def test_changed_data_and_another_seed_are_refused() -> None:
    assert go_on(DATA) == (PROGRESS, ())
    for code, said, asked in (
        (4, ("since step 40", "other content: a.txt", "9 tokens, now", "--accept-changed-data"), {}),
        (2, ("its seed is 1, this one is 2", "hint: resume with the same --seed"), {"seed": 2, "accept": True}),
    ):
        with pytest.raises(FrugalError) as refused:
            go_on(OTHER, **asked)
        assert refused.value.exit_code == code
        assert all(part in str(refused.value) for part in said)


def test_accepted_data_begins_an_epoch() -> None:
    progress, changed = go_on(OTHER, accept=True)
    assert progress == replace(PROGRESS, data=OTHER, position=Position(3, 0))
    assert resume_checks.describe_changes(changed, 40, Path("run")) == (
        "resumed at step 40 of run: the data (other content: a.txt; it had 3 documents, 3 samples, 9 tokens, now "
        "it has 3 documents, 3 samples, 10 tokens), which begins with epoch 4; "
        "global batch and learning rate are unchanged"
    )


def test_what_is_not_trained_on_is_told(folder: Path) -> None:
    write("a.jsonl", ["one", "", "", "t"])
    bare = copy.deepcopy(byte_tokenizer())
    bare.bos_token = bare.eos_token = None  # around no text
    corpus = load_corpus(["a.jsonl"], tokenizer=bare, task="causal-lm", seq_len=16, cache_dir=Path("cache"))
    assert corpus.report.left_out("error") == ["2 rows without text left out", "1 row of one token left out"]
    assert build.BuildReport(bad_rows=1, too_long_rows=2).left_out("truncate") == [
        "1 row that cannot be read left out", "2 rows longer than --seq-len truncated"
    ]  # fmt: skip
    assert build.BuildReport(too_long_rows=1).left_out("skip") == ["1 row longer than --seq-len left out"]
