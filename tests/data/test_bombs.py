"""Small files that become large, and lines without end: refused with a message before they fill the memory."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above
import pytest

from frugal.data import rows
from frugal.data.rows import Columns, Row
from frugal.data.sources import find_sources
from frugal.data.stream.samples import find_streams
from frugal.errors import RequestError

MIB = 1 << 20


def read(path: Path) -> Iterator[Row]:
    (source,) = find_sources([str(path)])
    return source.rows(Columns())


@pytest.mark.parametrize("is_dictionary", [True, False])
def test_a_parquet_file_that_expands_without_measure_is_refused(
    is_dictionary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * 20_000]))
    pq.write_table(pa.table({"text": text if is_dictionary else text.cast(pa.string())}), path)
    assert path.stat().st_size < 4000
    assert sum(1 for _ in read(path)) == 3000, "a thousand times may be more than it has"
    monkeypatch.setattr(rows, "_LEAST_EXPANDED_BYTES", 32 * MIB)
    for each in (lambda: sum(1 for _ in read(path)), lambda: sum(1 for shard in streamed(path) for _ in shard.rows())):
        with pytest.raises(RequestError) as raised:
            each()
        said = str(raised.value)
        assert said.startswith(f"{path} expands to more than 1,000 times its size\n  because of its 0.0 MiB ")
        assert "rows have become 3" in said and "compression='none', use_dictionary=False" in said


def streamed(path: Path) -> Iterator[rows.Any]:
    (stream,) = find_streams([str(path)], Columns())
    return iter(stream.shards)


def test_rows_of_large_groups_are_read_in_small_batches_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.parquet"
    texts = [f"this is text number {number}" * 100 for number in range(300)]
    pq.write_table(pa.table({"text": texts}), path)
    expected = [*read(path)]
    monkeypatch.setattr(rows, "available_bytes", lambda: 1)
    assert [*read(path)] == expected and len(expected) == 300


@pytest.mark.parametrize(("name", "begin"), [("a.jsonl", b'{"text": "'), ("a.txt", b""), ("a.csv", b"text\n")])
def test_a_line_without_end_is_refused(
    name: str, begin: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(begin + b"x" * 9 * MIB)
    monkeypatch.setattr(rows, "available_bytes", lambda: 2048 * MIB)
    with pytest.raises(RequestError) as raised:
        sum(1 for _ in read(path))
    where = "" if name == "a.csv" else ":1"
    assert str(raised.value).startswith(
        f"{path}{where} cannot be read\n  because the line has more than 8.0 MiB, 1/256 of"
    )


def test_an_array_larger_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b" " * 9 * MIB + b"]")
    monkeypatch.setattr(rows, "available_bytes", lambda: 32 * MIB)
    with pytest.raises(RequestError, match=r"it is one array of 9.0 MiB; 8.0 MiB are a quarter of the free memory"):
        sum(1 for _ in read(path))


def test_a_saved_dataset_with_absurd_lengths_is_refused(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["one", "two", "three"]}).save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 3, 6, 11))
    content = file.read_bytes()
    assert content.count(offsets) == 1
    file.write_bytes(content.replace(offsets, offsets[:12] + (1 << 30).to_bytes(4, "little")))
    with pytest.raises(RequestError, match=r"the dataset .* is damaged"):
        sum(1 for _ in read(tmp_path / "saved"))
