"""Small corpora for tests, in every kind of source."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frugal.data.corpus import Corpus
from frugal.data.tokenizer import byte_tokenizer
from frugal.errors import RequestError

Load = Callable[..., Corpus]


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
