"""From files to samples: every token once, every bad row named, the same on every machine and process."""

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frugal.errors import RequestError
from frugal.training import data, hub, preparation, sources
from frugal.training.batches import GlobalBatches
from frugal.training.data import Corpus
from frugal.training.objectives import CausalLM, Seq2Seq, SequenceClassification
from frugal.training.sources import Columns
from frugal.training.tiled_loss import IGNORED
from frugal.training.tokenizing import byte_tokenizer, encode, fingerprint, load_tokenizer

Load = Callable[..., Corpus]
PAD, EOS, BOS, MASK = 0, 1, 2, 3


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """`data.load` with the byte tokenizer, a cache of its own, no network, and short relative paths."""
    monkeypatch.setattr(hub, "unreachable_because", lambda: "HF_HUB_OFFLINE is set")
    monkeypatch.chdir(tmp_path)

    def load(*where: str, task: str = "causal-lm", seq_len: int = 64, **options: Any) -> Corpus:
        options = {"tokenizer": byte_tokenizer(), "cache_dir": tmp_path / "cache", **options}
        return data.load(where, task=task, seq_len=seq_len, **options)

    return load


def refusal(function: Callable[[], object]) -> str:
    with pytest.raises(RequestError) as caught:
        function()
    return str(caught.value)


def texts(corpus: Corpus) -> list[str]:
    return [byte_tokenizer().decode(sample["input_ids"], skip_special_tokens=True) for sample in corpus.train]


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


ROWS = [{"text": "one"}, {"text": 'two, and "more"'}, {"text": "drei\nvier ü"}]
TEXTS = [row["text"] for row in ROWS]


def write(kind: str, folder: Path) -> str:
    """`ROWS` in a file (or two) of the given kind; what to pass as --data."""
    match kind:
        case "jsonl":
            write_jsonl(folder / "a.jsonl", ROWS)
            return "a.jsonl"
        case "json":
            (folder / "a.json").write_text(json.dumps(ROWS))
            return "a.json"
        case "csv":
            (folder / "a.csv").write_text('id,text\n1,one\n2,"two, and ""more"""\n3,"drei\nvier ü"\n')
            return "a.csv"
        case "tsv":
            (folder / "a.tsv").write_text('id\ttext\n1\tone\n2\t"two, and ""more"""\n3\t"drei\nvier ü"\n')
            return "a.tsv"
        case "parquet":
            pq.write_table(pa.table({"text": TEXTS, "other": [1, 2, 3]}), folder / "a.parquet", row_group_size=2)
            return "a.parquet"
        case "saved":
            datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
            return "saved"
        case "saved splits":
            datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(folder / "splits"))
            return "splits"
    for name, text in zip(("a.txt", "b.md", "sub/c.py"), TEXTS, strict=True):
        (folder / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "texts" / name).write_text(text)
    (folder / "texts/.hidden").write_bytes(b"\xff")
    return {"folder": "texts", "glob": "texts/**/*", "absolute glob": f"{folder}/texts/**/*.*"}[kind]


KINDS = ["jsonl", "json", "csv", "tsv", "parquet", "saved", "saved splits", "folder", "glob", "absolute glob"]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_the_same_from_every_kind_of_source(kind: str, load: Load, tmp_path: Path) -> None:
    assert sorted(texts(load(write(kind, tmp_path)))) == sorted(TEXTS)


def test_several_sources_are_read_in_the_order_given(load: Load, tmp_path: Path) -> None:
    (tmp_path / "z.txt").write_text("first")
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert texts(load("z.txt", "a.jsonl")) == ["first", *TEXTS]


def test_the_standard_library_is_a_corpus_on_every_machine(load: Load) -> None:
    corpus = load("stdlib", limit=20, seq_len=512)
    assert corpus.report.documents == 20
    assert len(corpus.train) > 20
    assert "def " in "".join(texts(corpus))


def test_the_limit_is_in_documents(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert texts(load("a.jsonl", limit=2)) == TEXTS[:2]


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


def test_only_the_last_window_of_a_document_is_short(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 25)
    corpus = load("a.txt", seq_len=10)
    assert corpus.train.lengths.tolist() == [10, 10, 9]  # 27 tokens, one of overlap at each of two cuts
    assert corpus.train[0]["input_ids"][0] == BOS
    assert corpus.train[2]["input_ids"][-1] == EOS


def test_windows_of_a_masked_model_do_not_overlap(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij")
    samples = [sample["input_ids"].tolist() for sample in load("a.txt", task="masked-lm", seq_len=6).train]
    a = ord("a") + 4
    assert samples == [[BOS, *range(a, a + 4), EOS], [BOS, *range(a + 4, a + 8), EOS], [BOS, a + 8, a + 9, EOS]]


def test_pairs_are_source_and_target(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"de": "ja", "en": "yes!"}])
    corpus = load("a.jsonl", task="seq2seq", columns=Columns(source="de", target="en"))
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
    assert (report.label_names, report.num_labels) == (("no", "yes", "maybe"), 3)
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


def test_text_like_a_special_token_is_text(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("<eos>")
    assert len(load("a.txt").train[0]["input_ids"]) == 7


def test_lengths_are_those_of_the_samples(load: Load, tmp_path: Path) -> None:
    write("folder", tmp_path)
    corpus = load("texts", seq_len=8)
    assert corpus.train.lengths.tolist() == [len(sample["input_ids"]) for sample in corpus.train]
    assert corpus.report.tokens == corpus.train.lengths.sum()
    assert corpus.report.samples == len(corpus.train)


def test_samples_make_global_batches(load: Load, tmp_path: Path) -> None:
    write("folder", tmp_path)
    corpus = load("texts", seq_len=8)
    batch = GlobalBatches(corpus.train, global_tokens=32).at()
    assert sum(len(sample["input_ids"]) for sample in batch) <= 32
    assert (CausalLM().collate(list(batch))["labels"] != IGNORED).any()


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


def test_no_validation_unless_asked(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert load("a.txt").validation is None


def test_one_document_cannot_be_divided(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert refusal(lambda: load("a.txt", validation_fraction=0.05)) == (
        "the data cannot be divided into training and validation\n"
        "  because it is 1 document\n"
        "\n"
        "hint: set the validation fraction to 0, or give validation data of its own"
    )


# The cache.


def test_data_is_tokenised_once(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    first = load("a.jsonl")
    monkeypatch.setattr(data, "prepare", None)
    again = load("a.jsonl")
    assert texts(again) == texts(first)
    assert again.fingerprint == first.fingerprint


def test_other_data_other_options_and_another_tokenizer_are_another_corpus(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    other = load_tokenizer("./tokenizer")
    other.add_tokens(["two"])
    fingerprints = [
        load("a.jsonl").fingerprint,
        load("a.jsonl", seq_len=32).fingerprint,
        load("a.jsonl", limit=2).fingerprint,
        load("a.jsonl", tokenizer=other).fingerprint,
    ]
    write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"text": "more"}])
    fingerprints.append(load("a.jsonl").fingerprint)
    assert len(set(fingerprints)) == 5


def test_the_same_data_elsewhere_is_the_same_corpus(load: Load, tmp_path: Path) -> None:
    for name in ("here.jsonl", "there.jsonl"):
        write_jsonl(tmp_path / name, ROWS)
    assert load("here.jsonl").fingerprint == load("there.jsonl").fingerprint


def test_ranks_that_prepare_the_same_data_at_once_do_not_disturb_each_other(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "word " * 50}] * 2000)
    byte_tokenizer()  # threads, unlike ranks, would import transformers at the same time
    with ThreadPoolExecutor(4) as pool:
        corpora = list(pool.map(lambda _: load("a.jsonl"), range(4)))
    assert len({(corpus.fingerprint, int(corpus.train.lengths.sum())) for corpus in corpora}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_failed_preparation_leaves_nothing_behind(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{")
    refusal(lambda: load("a.jsonl"))
    assert list((tmp_path / "cache").iterdir()) == []


# What is refused.


def test_missing_data(load: Load) -> None:
    assert refusal(lambda: load("nope/a.txt")) == "there is no data at nope/a.txt\n  because no such file or folder"


def test_no_data_at_all(load: Load) -> None:
    assert refusal(load) == "no data was given\n\nhint: pass --data PATH, or --data stdlib for Python's own library"


def test_a_name_that_is_neither_a_file_nor_known_to_the_hub(load: Load) -> None:
    assert refusal(lambda: load("somebody/some-data")) == (
        "there is no data at somebody/some-data\n"
        "  because no such file or folder\n"
        "  because the hub cannot be asked (HF_HUB_OFFLINE is set), and its local cache does not have it\n"
        "\n"
        "hint: pass --data PATH, or --data stdlib for Python's own library"
    )


def test_a_glob_without_matches(load: Load, tmp_path: Path) -> None:
    assert refusal(lambda: load("*.jsonl")) == f"no file matches *.jsonl\n  because it was looked for from {tmp_path}"


def test_an_empty_folder(load: Load, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    assert refusal(lambda: load("texts")) == "the folder texts is empty\n  because it has no file that is not hidden"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", "", "a.txt has no rows"),
        ("a.jsonl", "\n\n", "a.jsonl has no rows"),
        ("a.csv", "text\n", "a.csv has no rows"),
        ("a.jsonl", '{"text": ""}\n{"text": ""}\n', "a.jsonl has 2 rows without text"),
    ],
)
def test_empty_data(name: str, content: str, reason: str, load: Load, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert refusal(lambda: load(name)) == f"there is no text in the data\n  because {reason}"


def test_nothing_left_after_leaving_out_bad_rows(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n[\n")
    assert refusal(lambda: load("a.jsonl", skip_bad_rows=True)) == (
        "there is no text in the data\n  because a.jsonl has 2 rows that cannot be read"
    )


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "saved"])
def test_a_missing_column_is_answered_with_those_there_are(kind: str, load: Load, tmp_path: Path) -> None:
    name = write(kind, tmp_path)
    said = refusal(lambda: load(name, columns=Columns(text="content")))
    columns = {"csv": "id, text", "parquet": "text, other"}.get(kind, "text")
    assert said == (
        f"{name} has no column `content`\n"
        f"  because its columns are {columns}\n"
        "\n"
        f"hint: choose one, such as --text-column {columns.split(',')[0]}"
    )


def test_plain_text_has_no_pairs(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert refusal(lambda: load("a.txt", task="seq2seq")) == (
        "a.txt has no column `source`\n  because its columns are text\n\nhint: choose one, such as --source-column text"
    )


@pytest.mark.parametrize(
    ("name", "content", "where", "reason"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', 2, "Input data was truncated"),
        ("a.jsonl", b'{"text": "ok"}\n[1]\n', 2, "a list, not an object"),
        ("a.jsonl", b'{"text": "ok"}\n\n{"text": 5}\n', 3, "`text` is a number, not text"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": null}\n', 2, "`text` is nothing, not text"),
        ("a.jsonl", b'{"text": "ok"}\n{"txet": "x"}\n', 2, "no `text`"),
        ("a.csv", b'id,text\n1,"two\nlines"\n2\n', 4, "1 fields, the header has 2"),
        ("a.csv", b"id,text\n1,ok\n2,a,b,c\n", 3, "4 fields, the header has 2"),
        ("a.csv", b"text\nok\n\xff\xfe\n", 3, "`text` is not UTF-8 text"),
        ("a.txt", b"good\nbad \xff\n", 2, "not UTF-8 text"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    name: str, content: bytes, where: int, reason: str, load: Load, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert refusal(lambda: load(name)) == (
        f"1 row of the data cannot be read\n"
        f"  because {name}:{where}: {reason}\n"
        "\n"
        "hint: repair them, or leave them out with --skip-bad-rows"
    )


def test_many_bad_rows_are_counted_and_the_first_is_named(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n' + "{\n" * 1234)
    assert refusal(lambda: load("a.jsonl")) == (
        "1234 rows of the data cannot be read\n"
        "  because the first is a.jsonl:2: Input data was truncated\n"
        "\n"
        "hint: repair them, or leave them out with --skip-bad-rows"
    )


def test_bad_rows_are_left_out_only_if_asked_and_then_reported(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{\n{"text": ""}\n{"text": "too"}\n')
    corpus = load("a.jsonl", skip_bad_rows=True)
    assert texts(corpus) == ["ok", "too"]
    assert (corpus.report.bad_rows, corpus.report.empty_rows) == (1, 1)
    assert corpus.report.first_bad == ("a.jsonl:2: Input data was truncated",)
    refusal(lambda: load("a.jsonl"))  # also when the cache has them


def test_a_broken_parquet_file(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"nonsense")
    assert re.match(r"a\.parquet is not a parquet file\n  because ArrowInvalid: ", refusal(lambda: load("a.parquet")))


def test_a_saved_dataset_without_a_training_split(load: Load, tmp_path: Path) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    assert refusal(lambda: load("splits")) == (
        "the dataset splits has no split `train`\n"
        "  because its splits are test\n"
        "\n"
        "hint: give one of them: --data splits/test"
    )


def test_pairs_that_are_too_long(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"source": "x" * n, "target": "y"} for n in (5, 70, 90)])
    assert refusal(lambda: load("a.jsonl", task="seq2seq")) == (
        "2 of 3 samples are longer than --seq-len\n"
        "  because the longest, a.jsonl:3, has 91 tokens with special ones, --seq-len is 64\n"
        "\n"
        "hint: use --seq-len 91, or --too-long truncate, or --too-long skip"
    )


@pytest.mark.parametrize(("choice", "lengths"), [("truncate", [6, 64, 64]), ("skip", [6])])
def test_pairs_that_are_too_long_can_be_truncated_or_left_out(
    choice: str, lengths: list[int], load: Load, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"source": "x" * n, "target": "y"} for n in (5, 70, 90)])
    corpus = load("a.jsonl", task="seq2seq", too_long=choice)
    assert corpus.train.lengths.tolist() == lengths
    assert corpus.report.too_long_rows == 2


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, "yes"], "a.jsonl:2: `label` is `yes`, other rows have numbers"),
        (["yes", 0], "a.jsonl:2: `label` is 0, other rows have names"),
        ([0, -1], "a.jsonl:2: `label` is -1, classes are numbered from 0"),
        ([0, 0.5], "a.jsonl:2: `label` is a number, not a class"),
    ],
)
def test_classes_that_are_none(labels: list[Any], said: str, load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": label} for label in labels])
    assert f"  because {said}\n" in refusal(lambda: load("a.jsonl", task="sequence-classification"))


def test_a_full_disk(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(preparation, "_write", no_space)
    assert refusal(lambda: load("a.txt")) == (
        f"the tokenised data cannot be written to {tmp_path}/cache\n"
        "  because No space left on device\n"
        "\n"
        "hint: free some space, or set XDG_CACHE_HOME to a folder on another disk"
    )
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(("task", "shortest"), [("causal-lm", 2), ("masked-lm", 3), ("seq2seq", 2)])
def test_a_sequence_too_short_to_learn_from(task: str, shortest: int, load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert refusal(lambda: load("a.txt", task=task, seq_len=shortest - 1)) == (
        f"--seq-len {shortest - 1} leaves no token to learn from\n\nhint: use at least {shortest}"
    )


# Tokenizers.


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_bytes_come_back_as_the_text_they_were(text: str) -> None:
    tokenizer = byte_tokenizer()
    (ids,) = encode(tokenizer, [text])
    assert tokenizer.decode(ids) == text


def test_the_byte_tokenizer_survives_being_saved(tmp_path: Path) -> None:
    """And the fast path for it agrees with the tokenizer itself."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    loaded = load_tokenizer(str(tmp_path / "tokenizer"))
    text = "".join(map(chr, range(1, 0x3000, 7))) + " <eos>\r\n\t<mask> 🐢"
    assert np.array_equal(encode(loaded, [text])[0], encode(byte_tokenizer(), [text])[0])
    assert len(loaded) == len(byte_tokenizer()) == 260
    assert [loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id, loaded.mask_token_id] == [
        PAD,
        EOS,
        BOS,
        MASK,
    ]


def test_using_a_tokenizer_does_not_change_its_fingerprint(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    loaded = load_tokenizer(str(tmp_path / "tokenizer"))
    before = fingerprint(loaded)
    loaded(["text", "longer text"], padding=True, truncation=True, max_length=6)
    assert fingerprint(loaded) == before


def test_a_missing_tokenizer(load: Load) -> None:
    assert refusal(lambda: load_tokenizer("./nope")) == (
        "there is no tokenizer at ./nope\n\nhint: give a folder with a tokenizer.json, or `byte`"
    )
    assert refusal(lambda: load_tokenizer("nobody/nothing")) == (
        "there is no tokenizer `nobody/nothing`\n"
        "  because the hub cannot be asked (HF_HUB_OFFLINE is set), and its local cache does not have it\n"
        "\n"
        "hint: `byte` needs no download"
    )


def test_the_library_of_a_python_without_sources(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path))
    assert refusal(lambda: load("stdlib")) == (
        f"Python's library has no sources here\n  because {tmp_path} has no .py file\n\nhint: pass --data PATH"
    )
