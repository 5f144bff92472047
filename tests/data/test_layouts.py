"""However data lies on disk, and from whatever function it comes, training sees the same samples."""

from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frugal.data.sources import find_sources
from tests.engine.corpora import Load, refusal, texts

TEXTS = [f"{i:03} " + "word " * (i % 5) for i in range(101)]
STREAM = """
import datasets

def rows():
    for i in range(101):
        yield {"text": f"{i:03} " + "word " * (i % 5)}

def dataset():
    return datasets.IterableDataset.from_generator(rows)

def broken():
    yield {"text": "fine"}
    yield 5
    raise OSError("the link is down")
"""


def parquet(folder: Path) -> str:
    """Three files, which are no multiple of two or four ranks, with row groups of very unequal size."""
    (folder / "parquet").mkdir()
    rest, schema = list(TEXTS), pa.schema({"text": pa.string()})
    for name, row_groups in (("a", (1, 70, 2)), ("b", (3,)), ("c", (20, 5))):
        with pq.ParquetWriter(folder / "parquet" / f"{name}.parquet", schema) as writer:
            for number in row_groups:
                writer.write_table(pa.table({"text": rest[:number]}, schema=schema))
                del rest[:number]
    assert not rest
    return "parquet"


def shards(folder: Path) -> str:
    datasets.Dataset.from_list([{"text": text} for text in TEXTS]).save_to_disk(str(folder / "saved"), num_shards=7)
    return "saved"


def stream(folder: Path) -> str:
    (folder / "stream.py").write_text(STREAM)
    return "stream.py:dataset"


@pytest.mark.parametrize("write", [parquet, shards, stream])
def test_every_layout_gives_the_same_samples(write: Callable[[Path], str], load: Load, tmp_path: Path) -> None:
    assert texts(load(write(tmp_path))) == TEXTS


def test_an_endless_stream_is_limited_and_a_broken_one_told_and_other_code_is_another(
    load: Load, tmp_path: Path
) -> None:
    stream(tmp_path)
    assert load("stream.py:rows", limit=3).report.documents == 3
    told = (
        "the data has 2 problems\n"
        "  because stream.py:broken failed (OSError: the link is down; stream.py, line 14, runs "
        '`raise OSError("the link is down")`)\n'
        "  because stream.py:broken:row 2: a number, not an object\n"
        "\nhint: of rows: repair them, or leave them out with --skip-bad-rows"
    )
    assert refusal(lambda: load("stream.py:broken")) == told
    assert "hint: did you mean stream.py:rows?" in refusal(lambda: load("stream.py:row"))
    names = ("rows", "dataset")
    before = [find_sources([f"stream.py:{name}"])[0].fingerprint for name in names]
    (tmp_path / "stream.py").write_text(STREAM + "# other\n")
    assert len({*before, find_sources(["stream.py:rows"])[0].fingerprint}) == 3
