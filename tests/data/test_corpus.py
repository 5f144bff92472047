"""From files to samples: every token once, every bad row named, the same on every machine and process."""

import codecs
import os
import random
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import datasets
import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frugal.data import corpus as data
from frugal.data.batches import GlobalBatches
from frugal.data.rows import Columns
from frugal.data.sources import Provenance
from frugal.data.tokenizer import byte_tokenizer, load_tokenizer
from frugal.errors import RequestError
from frugal.models.objectives import CausalLM, Seq2Seq, SequenceClassification
from tests.engine.corpora import ROWS, TEXTS, Load, refusal, texts, write, write_jsonl

PAD, EOS, BOS = 0, 1, 2
KINDS = ["jsonl", "json", "csv", "tsv", "parquet", "saved", "saved splits", "folder", "glob", "absolute glob"]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_the_same_from_every_kind_of_source(kind: str, load: Load, tmp_path: Path) -> None:
    assert sorted(texts(load(write(kind, tmp_path)))) == sorted(TEXTS)


def test_the_standard_library_is_a_corpus_on_every_machine(load: Load) -> None:
    corpus = load("stdlib", limit=20, seq_len=512)
    assert corpus.report.documents == 20
    assert len(corpus.train) > 20
    assert "def " in "".join(texts(corpus))


def test_a_list_names_files_globs_and_folders_in_its_order(load: Load, tmp_path: Path) -> None:
    write("folder", tmp_path)
    (tmp_path / "z.txt").write_text("first")
    (tmp_path / "list.txt").write_bytes(codecs.BOM_UTF8 + b"z.txt\r\n\r\ntexts/sub/*\ntexts\n")
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("last")
    (tmp_path / "more.txt").write_bytes(b"caf\xe9.txt")
    assert texts(load("@list.txt", "z.txt", "@more.txt")) == ["first", TEXTS[2], *TEXTS, "first", "last"]


def test_names_that_are_no_utf_8_are_told_as_bytes(load: Load, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"\xff")
    (tmp_path / "texts" / "good.txt").write_text("good")
    corpus = load("texts", skip_bad_rows=True)
    assert corpus.report.first_bad == ["texts/caf\\xe9.txt:1: not UTF-8 text; iconv -f ENCODING -t UTF-8 converts it"]
    assert list(corpus.provenance.files) == ["texts/caf\\xe9.txt", "texts/good.txt"]
    assert msgspec.json.decode(msgspec.json.encode(corpus.provenance), type=Provenance) == corpus.provenance


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("jsonl", '{"text": "one"}\r\n{"text": "two"}\r\n'),
        ("json", '[{"text": "one"},\r\n{"text": "two"}]\r\n'),
        ("csv", "id,text\r\n1,one\r\n2,two\r\n"),
        ("tsv", "id\ttext\r\n1\tone\r\n2\ttwo\r\n"),
        ("txt", "one"),
    ],
)
def test_a_byte_order_mark_is_no_text_and_line_ends_may_be_those_of_windows(
    kind: str, content: str, load: Load, tmp_path: Path
) -> None:
    (tmp_path / f"a.{kind}").write_bytes(codecs.BOM_UTF8 + content.encode())
    assert texts(load(f"a.{kind}")) == (["one"] if kind == "txt" else ["one", "two"])


# From documents to samples.


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8), seq_len=st.integers(2, 90))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_token_of_a_causal_model_is_a_target_exactly_once(
    lengths: list[int], seq_len: int, load: Load, tmp_path: Path
) -> None:
    generator = random.Random(len(lengths) * 1000 + seq_len)
    documents = ["".join(generator.choices("abcdefgh", k=length)) for length in lengths]
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents])
    corpus = load("a.jsonl", seq_len=seq_len)
    targets: list[int] = []
    for sample in corpus.train:
        batch = CausalLM().collate([sample])
        assert batch["input_ids"].shape[1] <= seq_len
        targets += batch["labels"][0, 1:].tolist()
    expected = [token for text in documents for token in [*(byte + 4 for byte in text.encode()), EOS]]
    assert targets == expected


def test_windows_of_a_masked_model_do_not_overlap(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij")
    samples = [sample["input_ids"].tolist() for sample in load("a.txt", task="masked-lm", seq_len=6).train]
    a = ord("a") + 4
    assert samples == [[BOS, *range(a, a + 4), EOS], [BOS, *range(a + 4, a + 8), EOS], [BOS, a + 8, a + 9, EOS]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
@pytest.mark.parametrize("inside", ["", "translation."])
def test_pairs_are_source_and_target(kind: str, inside: str, load: Load, tmp_path: Path) -> None:
    """Also inside one column, as those of `datasets`."""
    pair = {"de": "ja", "en": "yes!"}
    rows = [{"translation": pair} if inside else pair]
    if kind == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", rows)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    else:
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "a.dataset")
    with pytest.raises(RequestError) as caught:
        load(f"a.{kind}", task="seq2seq")
    assert f"{inside}de, {inside}en\n\nhint: if another one has it: --columns source=NAME,target=NAME" in (
        str(caught.value)
    )
    columns = Columns(source=f"{inside}de", target=f"{inside}en")
    corpus = load(f"a.{kind}", task="seq2seq", columns=columns)
    batch = Seq2Seq(PAD, start_id=PAD).collate([corpus.train[0]])
    assert byte_tokenizer().decode(batch["input_ids"][0]) == "ja<eos>"
    assert byte_tokenizer().decode(batch["labels"][0]) == "yes!<eos>"
    assert byte_tokenizer().decode(batch["decoder_input_ids"][0]) == "<pad>yes!"
    assert corpus.train.lengths.tolist() == [5]


@pytest.mark.parametrize(
    ("labels", "numbers", "names"),
    [([0, 2, 1], [0, 2, 1], []), (["1", "0", "1"], [1, 0, 1], []), (["no", "yes", "no"], [0, 1, 0], ["no", "yes"])],
)
def test_classes_are_numbers_or_names(
    labels: list[Any], numbers: list[int], names: list[str], load: Load, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": label} for label in labels])
    corpus = load("a.jsonl", task="sequence-classification")
    assert SequenceClassification().collate(list(corpus.train))["labels"].tolist() == numbers
    assert list(corpus.report.label_names) == names
    assert corpus.report.num_labels == max(numbers) + 1


def test_classes_of_validation_data_are_numbered_as_in_the_training_data(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": "x", "label": label} for label in ("no", "yes")])
    write_jsonl(tmp_path / "valid.jsonl", [{"text": "x", "label": "yes"}])
    names = load("train.jsonl", task="sequence-classification").report.label_names
    corpus = load("valid.jsonl", task="sequence-classification", label_names=names)
    assert [sample["label"] for sample in corpus.train] == [1]
    assert corpus.report.num_labels == 2
    assert "`label` is `yes`, the classes are no, maybe" in refusal(
        lambda: load("valid.jsonl", task="sequence-classification", label_names=("no", "maybe"))
    )


def test_numbers_of_named_classes_stand_for_themselves(load: Load, tmp_path: Path) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes", "maybe"])}
    )
    rows = datasets.Dataset.from_list([{"text": "x", "label": 1}], features=features)
    rows.save_to_disk(str(tmp_path / "saved"))
    report = load("saved", task="sequence-classification").report
    assert (report.label_names, report.num_labels) == (["no", "yes", "maybe"], 3)
    corpus = load("saved", task="sequence-classification", label_names=report.label_names)
    assert [sample["label"] for sample in corpus.train] == [1]


def test_long_text_files_are_cut_at_line_ends_and_nothing_is_lost(load: Load, tmp_path: Path) -> None:
    text = "".join(f"line {i} of a long file, ü\n" for i in range(10_000))
    (tmp_path / "a.txt").write_text(text)
    corpus = load("a.txt", seq_len=1 << 20)
    pieces = texts(corpus)
    assert len(pieces) > 3
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)


def test_a_batch_of_tokens_counts_the_target_tokens_of_pairs(load: Load, tmp_path: Path) -> None:
    sizes = [(40, 9), (3, 15), (50, 1), (7, 30), (20, 4), (9, 12)]
    write_jsonl(tmp_path / "a.jsonl", [{"source": "s" * a, "target": "t" * b} for a, b in sizes])
    corpus = load("a.jsonl", task="seq2seq")
    targets = np.array([len(sample["labels"]) for sample in corpus.train])
    assert corpus.train.counted_tokens.tolist() == targets.tolist() == [b + 1 for _, b in sizes]
    assert corpus.train.lengths.tolist() == [max(a, b) + 1 for a, b in sizes]
    batches = GlobalBatches(corpus.train, global_tokens=40)
    for batch, following in pairwise(islice(batches.iterate(), 5)):
        total = targets[batch.indices].sum()
        assert total <= 40 < total + targets[following.indices[0]]
        assert batch.lengths.tolist() == corpus.train.lengths[batch.indices].tolist()
    assert batches.after(batches.steps(3)).epoch >= 3


# Training and validation.


@given(num_documents=st.integers(2, 60), percent=st.integers(1, 40))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_documents_are_divided_and_none_is_in_both_parts(
    num_documents: int, percent: int, load: Load, tmp_path: Path
) -> None:
    documents = [f"document {i}" for i in range(num_documents)]
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents])
    corpus = load("a.jsonl", seq_len=5, validation_fraction=percent / 100)
    assert corpus.validation is not None
    parts = [
        "".join(byte_tokenizer().decode(sample["input_ids"][1:]) for sample in part).split("<eos>")[:-1]
        for part in (corpus.train, corpus.validation)
    ]
    assert sorted(parts[0] + parts[1]) == sorted(documents)
    assert len(parts[1]) == -(-num_documents * percent // 100)


# The cache.


def test_the_same_data_is_tokenised_once_and_any_other_is_another_corpus(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    refusal(lambda: load("bad.jsonl"))
    assert list((tmp_path / "cache").iterdir()) == [], "a failed preparation leaves nothing behind"
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    first = load("a.jsonl")
    with monkeypatch.context() as without:
        without.setattr(data, "write_samples", None)
        again = load("a.jsonl")
    assert texts(again) == texts(first)
    assert again.provenance.fingerprint == first.provenance.fingerprint
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    other = load_tokenizer("./tokenizer")
    other.add_tokens(["two"])
    made = [first, *(load("a.jsonl", **options) for options in ({"seq_len": 32}, {"limit": 2}, {"tokenizer": other}))]
    write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"text": "more"}])
    assert len({corpus.provenance.fingerprint for corpus in [*made, load("a.jsonl")]}) == 5
