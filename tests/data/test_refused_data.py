"""Data that cannot be trained on: each row named, each way out said."""

import bz2
import gzip
import lzma
import os
import socket
import zipfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints
import pyarrow.feather as feather  # type: ignore[import-untyped]  # as above
import pyarrow.parquet as parquet  # type: ignore[import-untyped]  # as above
import pytest

from frugal.data.rows import Columns
from tests.engine.corpora import ROWS, Load, refusal, texts, write, write_jsonl


def test_a_name_that_is_neither_a_file_nor_known_to_the_hub(load: Load) -> None:
    assert refusal(lambda: load("somebody/some-data")) == (
        "there is no data at somebody/some-data\n"
        "  because no such file or folder\n"
        "  because the hub cannot be asked (HF_HUB_OFFLINE is set), and its local cache does not have it\n"
        "\n"
        "hint: pass --data PATH, or --data stdlib for Python's own library"
    )


@pytest.mark.parametrize("name", ["{role}", "{0}", "a {", "%s"])
def test_a_column_may_have_any_name(name: str, load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{name: "some words", "b": 3}])
    assert refusal(lambda: load("a.jsonl")).endswith(f"; there is text in {name}")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "saved"])
def test_a_missing_column_is_answered_with_those_there_are(kind: str, load: Load, tmp_path: Path) -> None:
    name = write(kind, tmp_path)
    said = refusal(lambda: load(name, columns=Columns(text="content"), task="masked-lm"))
    columns = {"csv": "id, text", "parquet": "text, other"}.get(kind, "text")
    assert said == (
        f"{name} has no column `content`\n"
        f"  because its columns are {columns}\n"
        "\n"
        "hint: if another one has it: --columns text=NAME; there is text in text"
    )


BAD_ROW = "1 row of the data cannot be read\n  because {}\n\nhint: repair them, or leave them out with --skip-bad-rows"
NO_TEXT = (
    "there is no text in the data\n  because {}\n\n"
    "hint: give data with text, or name the column that has it: --columns text=NAME"
)
OTHER = "not UTF-8 text; iconv -f ENCODING -t UTF-8 converts it"
UTF_16 = "not UTF-8 text but UTF-16; iconv -f UTF-16 -t UTF-8 converts it"
NUL = "a NUL byte, which text has not: a binary file, or UTF-16"
TRUNCATED = "Input data was truncated"
BAD_JSON = "JSON is malformed: invalid character"
TOO_DEEP = "maximum recursion depth exceeded while deserializing an object"
CONTENTS: list[tuple[str, str, bytes, str]] = [
    ("a.txt", NO_TEXT, b"", ": no rows"),
    ("a.csv", NO_TEXT, b"text\n", ": no rows"),
    ("a.jsonl", NO_TEXT, b'{"text": ""}\n{"text": ""}\n', ": 2 rows without text left out"),
    ("a.txt", NO_TEXT, b"\n \n\t\n", ": 1 row without text left out"),
    ("a.jsonl", NO_TEXT, b'{"text": " \\n"}\n', ": 1 row without text left out"),
    ("a.jsonl", BAD_ROW, b'{"text": "ok"}\n{"text": \n', f":2: {TRUNCATED}"),
    ("a.jsonl", BAD_ROW, b'{"text": "ok", "n": NaN}\n', f":1: {BAD_JSON} (byte 20); NaN is no JSON, null is"),
    ("a.jsonl", BAD_ROW, b'{"text": "ok"}\n[1]\n', ":2: a list, not an object"),
    ("a.jsonl", BAD_ROW, b'{"text": "ok"}\n\n{"text": 5}\n', ":3: `text` is a number, not text"),
    ("a.jsonl", BAD_ROW, b'{"text": "ok"}\n{"txet": "x"}\n', ":2: no `text`"),
    ("a.csv", BAD_ROW, b'id,text\n1,"two\nlines"\n2\n', ":4: 1 fields, the header has 2"),
    ("a.csv", BAD_ROW, b"text\nok\n\xff\xfe\n", ":3: `text` is not UTF-8 text"),
    ("a.txt", BAD_ROW, b"good\nbad \xff\n", f":2: {OTHER}"),
    ("a.txt", BAD_ROW, "text".encode("utf-16"), f":1: {UTF_16}"),
    ("a.jsonl", BAD_ROW, b"\xfe\xff" + '{"text": "x"}'.encode("utf-16-be"), f":1: {UTF_16}"),
    ("a.txt", BAD_ROW, b"good\n" + "text".encode("utf-16-le"), f":2: {NUL}"),
    ("a.csv", BAD_ROW, b"text\none\nt\0wo\n", f":3: {NUL}"),
    (
        "a.txt",
        BAD_ROW,
        gzip.compress(b"text", mtime=0),
        ":1: not UTF-8 text but compressed by gzip; give it a name that ends in .gz",
    ),
    ("a.jsonl", BAD_ROW, b"[" * 200_000, f":1: {TOO_DEEP}"),
    ("a.json", BAD_ROW, b"[" * 200_000, f":1: {TOO_DEEP}"),
]


@pytest.mark.parametrize(("name", "message", "content", "reason"), CONTENTS)
def test_what_cannot_be_read_is_named_by_file_and_line(
    name: str, message: str, content: bytes, reason: str, load: Load, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert refusal(lambda: load(name)) == message.format(name + reason)


def test_what_is_no_file_is_refused_and_not_waited_for(load: Load, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "null").symlink_to(os.devnull)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("sock")
        for name, what in {"pipe.jsonl": "a pipe or socket", "null": "a device", "sock": "a pipe or socket"}.items():
            said = refusal(lambda name=name: load(name))
            assert said.startswith(f"the data {name} is {what}, not a file\n") and "hint: write it into a file" in said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["@gone"], "cannot read the list of data gone\n  because No such file or directory"),
        (["@pipe"], "cannot read the list of data pipe\n  because it is a named pipe, and not a file"),
        (["@empty"], "empty is no list of data\n  because it is empty\n\nhint: write one file, glob or folder a line"),
        (["@nested"], "nested is no list of data\n  because a line is no name of a file\n\nhint: write one file, glob"),
        (["x" * 5000 + "/a.txt"], f"cannot read {'x' * 5000}"),
        (["loop"], "there is no data at loop\n  because no such file or folder\n  because the hub cannot be asked"),
        ([], "no data was given"),
        (["nope/a.txt"], "there is no data at nope/a.txt"),
        (["*.jsonl"], "no file matches *.jsonl"),
        (["texts"], "the folder texts is empty"),
        (["broken.parquet"], "broken.parquet is not a parquet file"),
    ],
)
def test_lists_and_names_that_cannot_be_read(names: list[str], said: str, load: Load, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "nested").write_text("@empty\n")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "texts").mkdir()
    (tmp_path / "broken.parquet").write_bytes(b"nonsense")
    os.mkfifo(tmp_path / "pipe")
    assert refusal(lambda: load(*names)).startswith(said[:1000])


def test_a_parquet_file_damaged_behind_its_schema(load: Load, tmp_path: Path) -> None:
    path = tmp_path / write("parquet", tmp_path)
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)
    assert refusal(lambda: load("a.parquet")).startswith("a.parquet cannot be read after row 0\n  because ")


def test_bad_rows_are_left_out_only_if_asked_and_then_reported(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{\n{"text": ""}\n{"text": "too"}\n')
    corpus = load("a.jsonl", skip_bad_rows=True)
    assert texts(corpus) == ["ok", "too"]
    assert (corpus.report.bad_rows, corpus.report.empty_rows) == (1, 1)
    assert corpus.report.first_bad == [f"a.jsonl:2: {TRUNCATED}; an object takes one line: `jq -c .` writes it so"]
    refusal(lambda: load("a.jsonl"))  # also when the cache has them


def test_a_saved_dataset_without_a_training_split(load: Load, tmp_path: Path) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    said = refusal(lambda: load("splits"))
    assert said.startswith("the dataset splits has no split `train`\n  because its splits are test\n")
    assert said.endswith("hint: give one of them: --data splits/test")


def test_pairs_that_are_too_long_can_be_truncated_or_left_out(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"source": "x" * n, "target": "y"} for n in (5, 70, 90)])
    for choice, lengths in (("truncate", [6, 64, 64]), ("skip", [6])):
        corpus = load("a.jsonl", task="seq2seq", too_long=choice)
        assert (corpus.train.lengths.tolist(), corpus.report.too_long_rows) == (lengths, 2)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, "yes"], "a.jsonl:2: `label` is `yes`, other rows have numbers"),
        (["yes", 0], "a.jsonl:2: `label` is `0`, other rows have names"),
        ([0, -1], "a.jsonl:2: `label` is -1, classes are numbered from 0"),
        (
            [0.0, 1, 0.5],
            "a.jsonl:3: `label` is a number, not a class: a whole number from 0, or a name (regression needs a model "
            "of your own)",
        ),
    ],
)
def test_classes_that_are_none(labels: list[Any], said: str, load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": label} for label in labels])
    assert f"  because {said}\n" in refusal(lambda: load("a.jsonl", task="sequence-classification"))


def test_one_class_is_nothing_to_learn(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"x{i}", "label": "same"} for i in range(8)])
    said = refusal(lambda: load("a.jsonl", task="sequence-classification"))
    assert said == "the data have one class\n  because all 8 samples are of it"


def test_a_table_with_semicolons_is_recognised(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;label\none;1\n")
    assert "\nhint: its fields are separated by `;`: save it with commas" in refusal(lambda: load("a.csv"))


def test_a_sequence_too_short_to_learn_from(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for task, shortest in (("causal-lm", 2), ("masked-lm", 3), ("seq2seq", 2)):
        said = refusal(lambda task=task, size=shortest - 1: load("a.txt", task=task, seq_len=size))
        assert said == f"--seq-len {shortest - 1} leaves no token to learn from\n\nhint: use at least {shortest}"


def test_files_of_other_programs_are_named_by_what_they_are(load: Load, tmp_path: Path) -> None:
    table = pa.table({"text": ["some words"]})
    feather.write_feather(table, tmp_path / "a.feather")
    parquet.write_table(table, tmp_path / "b.text")
    np.save(tmp_path / "c.npy", np.arange(9))
    with zipfile.ZipFile(tmp_path / "d.xlsx", "w") as archive:
        archive.writestr("sheet.xml", "<x/>")
    (tmp_path / "e.txt").write_bytes(bz2.compress(b"text"))
    (tmp_path / "f.txt").write_bytes(lzma.compress(b"text"))
    said = refusal(lambda: load("."))
    for part in (
        "a.feather:1: not UTF-8 text but an Arrow file", "b.text:1: not UTF-8 text but parquet",
        "c.npy:1: not UTF-8 text but a numpy array", "e.txt:1: not UTF-8 text but compressed by bzip2",
        "f.txt:1: not UTF-8 text but compressed by xz", "d.xlsx:1: not UTF-8 text but a zip file, as .xlsx",
    ):  # fmt: skip
        assert part in said


def test_a_chat_under_another_name_is_told_how_to_name_it(load: Load, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"dialog": [{"speaker": "bot", "said": "hello"}], "tags": ["a"]}])
    said = refusal(lambda: load("a.jsonl"))
    assert said.endswith("; if dialog is a chat: --columns messages=dialog,role=NAME,content=NAME")
