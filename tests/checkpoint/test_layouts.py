"""However data lies on disk, training sees the same samples; and however many ranks there are, each sample once."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from frugal.data.batches import GlobalBatches, Position
from frugal.data.corpus import Corpus
from frugal.data.sources import find_sources
from frugal.data.tokenizer import byte_tokenizer
from frugal.errors import RequestError
from frugal.planning.batch import BatchPlan
from tests.corpora import load_corpus

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


def one_file(folder: Path) -> str:
    (folder / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return "all.jsonl"


def many_files(folder: Path) -> str:
    (folder / "many").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "many" / f"{i:03}.jsonl").write_text(json.dumps({"text": text}))
    return "many"


def parquet(folder: Path) -> str:
    """Three files, which are no multiple of two or four ranks, with row groups of very unequal size."""
    import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above

    (folder / "parquet").mkdir()
    rest = list(TEXTS)
    for name, row_groups in (("a", (1, 70, 2)), ("b", (3,)), ("c", (20, 5))):
        schema = pa.schema({"text": pa.string()})
        with pq.ParquetWriter(folder / "parquet" / f"{name}.parquet", schema) as writer:
            for number in row_groups:
                writer.write_table(pa.table({"text": rest[:number]}, schema=schema))
                del rest[:number]
    assert not rest
    return "parquet"


def shards(folder: Path) -> str:
    import datasets

    datasets.Dataset.from_list([{"text": text} for text in TEXTS]).save_to_disk(str(folder / "saved"), num_shards=7)
    return "saved"


def stream(folder: Path) -> str:
    (folder / "stream.py").write_text(textwrap.dedent(STREAM))
    return "stream.py:dataset"


def read(source: str, **options: object) -> Corpus:
    return load_corpus(
        [source], tokenizer=byte_tokenizer(), task="causal-lm", seq_len=64, cache_dir=Path("cache"), **options
    )  # type: ignore[arg-type]  # a limit


@pytest.mark.parametrize("write", [one_file, many_files, parquet, shards, stream])
def test_every_layout_gives_the_same_samples(
    write: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    samples = read(write(tmp_path)).train
    texts = [byte_tokenizer().decode(sample["input_ids"], skip_special_tokens=True) for sample in samples]
    assert texts == TEXTS


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_each_global_batch_and_take_equally_many_steps(world_size: int) -> None:
    """101 samples, 8 to a batch, at most 2 on a rank at once, and 1 on the first: nothing divides."""
    batches, position, caps = GlobalBatches(TEXTS, global_batch=8, seed=4), Position(), (1, 2, 2, 2)[:world_size]
    drawn: list[int] = []
    for _ in range(101):  # eight epochs
        batch = batches.at(position)
        cut = BatchPlan.of(len(batch), caps)
        shares = [
            [int(batch.indices[start + i]) for i in range(size)]
            for rank in range(world_size)
            for start, size in zip(cut.starts_of(rank), cut.sizes_of(rank), strict=True)
        ]
        assert len(shares) == world_size * cut.accumulation_steps
        taken = [index for share in shares for index in share]
        assert sorted(taken) == sorted(map(int, batch.indices))
        drawn += map(int, batch.indices)
        position = batch.end
    assert position == Position(8, 0)
    for epoch in range(8):
        assert sorted(drawn[epoch * 101 : (epoch + 1) * 101]) == list(range(101))


def test_an_endless_stream_is_limited_and_a_broken_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stream(tmp_path)
    assert read("stream.py:rows", limit=3).report.documents == 3
    for name, said in (
        ("broken", "stream.py:broken failed after 2 rows\n  because OSError: the link is down"),
        ("row", "stream.py has no `row`\n\nhint: did you mean stream.py:rows?"),
    ):
        with pytest.raises(RequestError) as refused:
            read(f"stream.py:{name}")
        assert str(refused.value) == said


def test_other_code_is_another_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stream(tmp_path)
    ((rows,), (dataset,)) = (find_sources([f"stream.py:{name}"]) for name in ("rows", "dataset"))
    (tmp_path / "stream.py").write_text((tmp_path / "stream.py").read_text() + "# other\n")
    (other,) = find_sources(["stream.py:rows"])
    assert len({rows.fingerprint, dataset.fingerprint, other.fingerprint}) == 3
