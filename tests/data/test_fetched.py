"""Data at an address of a storage: the samples of the same files on a disk, and one message where there are none."""

import gzip
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints
import pyarrow.csv  # type: ignore[import-untyped]  # as above
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above
import pytest

from bench.runs import frugal_train, prepared, records
from frugal import cli
from frugal.data.rows import Columns
from frugal.data.sources import fetch, find_sources
from frugal.data.stream.samples import find_streams
from frugal.errors import RequestError
from tests.checkpoint.test_mirror import Proxy, s3  # noqa: F401 - a fixture
from tests.commands import Capture

SECRET = "a-secret-of-the-storage"


@pytest.fixture
def storage(s3: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:  # noqa: F811 - as above
    """The file system of a server of S3 that has a bucket, and a cache that has nothing of it."""
    import s3fs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield s3fs.S3FileSystem()


def write_some(folder: Path, seed: int) -> None:
    """Write files of random kinds, names and rows, also in folders, hidden and empty ones."""
    draw = random.Random(seed)

    def rows() -> list[dict[str, str]]:
        words = ["to be", "or not", "\u00fc\u00f1\u00ef", 'a "quoted, word"', "NA", ""]
        return [{"text": " ".join(draw.choices(words, k=draw.randint(1, 9)))} for _ in range(draw.randint(1, 30))]

    def lines() -> bytes:
        return "".join(json.dumps(row) + "\n" for row in rows()).encode()

    def zipped(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("b/one.jsonl", lines())
            archive.writestr("a.txt", "to be or not")

    kinds: dict[str, Callable[[Path], object]] = {
        ".jsonl": lambda path: path.write_bytes(lines()),
        ".jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines())),
        ".parquet": lambda path: pq.write_table(pa.Table.from_pylist(rows()), path),
        ".csv": lambda path: pyarrow.csv.write_csv(pa.Table.from_pylist(rows()), path),
        ".txt": lambda path: path.write_text("\n".join(row["text"] for row in rows()) + "\n"),
        ".zip": zipped,
    }
    for number in range(draw.randint(2, 7)):
        suffix = draw.choice(list(kinds))
        path = folder / draw.choice(["", "x", "x/y", "z"]) / f"{draw.choice('abc')} {number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        kinds[suffix](path)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "d.jsonl").write_bytes(b"no row")


def read(name: str, shown: str) -> list[object]:
    """Content and place of all rows, and of all shards of a stream, without the name of the place itself."""
    columns = Columns()
    sources = [
        (source.name.removeprefix(shown), source.fingerprint, [
            (where.removeprefix(shown), row) for where, row in source.rows(columns)
        ]) for source in find_sources([name])
    ]  # fmt: skip
    (stream,) = find_streams([name], columns)
    return [sources, stream.fingerprint, [list(shard.rows())[-1][1] for shard in stream.shards]]


@pytest.mark.parametrize("seed", range(4))
def test_a_folder_of_a_storage_has_the_rows_of_the_same_folder_on_a_disk(
    seed: int, storage: Any, tmp_path: Path
) -> None:
    here = tmp_path / "corpus"
    write_some(here, seed)
    storage.put(str(here), "bucket/corpus", recursive=True)
    expected = read(str(here), str(here))
    assert expected[0], "it has files"
    assert read("s3://bucket/corpus", "s3://bucket/corpus") == expected
    for pattern in ("*", "**/*.jsonl", "x/*"):
        try:
            matching = read(f"{here}/{pattern}", str(here))
        except RequestError:
            with pytest.raises(RequestError, match="cannot read the data"):
                find_sources([f"s3://bucket/corpus/{pattern}"])
        else:
            assert read(f"s3://bucket/corpus/{pattern}", "s3://bucket/corpus") == matching


def test_a_saved_dataset_in_a_storage_is_one_on_a_disk(storage: Any, tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict({"text": ["to be", "or not"]})
    dataset.save_to_disk("s3://bucket/saved")
    dataset.save_to_disk(tmp_path / "saved")
    rows = [[row for _, row in find_sources([name])[0].rows(Columns())] for name in (
        "s3://bucket/saved", str(tmp_path / "saved"),
    )]  # fmt: skip
    assert rows[0] == rows[1] == [{"text": "to be"}, {"text": "or not"}]


def test_a_file_is_fetched_once_for_each_of_its_versions(storage: Any, tmp_path: Path) -> None:
    address = "s3://bucket/a.txt"
    copies = []
    for content in (b"one\n", b"one\n", b"two\n"):
        if not copies or content == b"two\n":
            storage.pipe_file(address, content)
        copy = (fetch(address) or {})[address]
        assert copy.read_bytes() == content
        copies.append((copy, copy.stat().st_ino))
    assert copies[0] == copies[1] != copies[2]


@pytest.mark.parametrize("most_bytes", [100, 3_000, pytest.param(60_000, marks=pytest.mark.exhaustive), 250_000])
def test_a_connection_that_is_cut_leaves_the_whole_file_or_none(
    most_bytes: int,
    s3: int,  # noqa: F811 - as above
    storage: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = random.Random(0).randbytes(200_000)
    storage.pipe_file("bucket/a.txt", content)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{Proxy(s3, most_bytes).port}")
    type(storage).clear_instance_cache()
    try:
        fetch("s3://bucket/a.txt")
    except RequestError as error:
        assert error.what == "cannot read the data s3://bucket/a.txt" and SECRET not in str(error)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3}")
    type(storage).clear_instance_cache()
    assert [copy.read_bytes() for copy in (fetch("s3://bucket/a.txt") or {}).values()] == [content]


@pytest.mark.parametrize(
    ("address", "because"),
    [
        ("s3://no-such-bucket/a.txt", "The specified bucket does not exist"),
        ("s3://bucket/no-such.txt", "FileNotFoundError: no file of the storage, that is not hidden, has this name"),
        pytest.param(
            "s3://bucket/*.parquet",
            "FileNotFoundError: no file of the storage, that is not hidden, has this name",
            marks=pytest.mark.exhaustive,
        ),
        ("nothing://bucket/a.txt", "Protocol not known: nothing"),
        ("s3://an-access-key:hunter22@bucket/a.txt", "it is kept in the run's record"),
    ],
)
def test_data_that_is_not_there_is_one_message(
    address: str, because: str, storage: Any, tmp_path: Path, capsys: Capture
) -> None:
    prepared(tmp_path)
    asked = ("--device", "cpu", "--gpus", "1", "--mem", "1G", "--model", str(tmp_path / "config.json"))
    for words in (("plan", *asked), ("train", *asked, "--out", str(tmp_path / "run"))):
        assert cli.run([*words, "--data", address]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("error: ")) == ("", 1)
        assert because in said.err and "hint: " in said.err
        assert SECRET not in said.err and "hunter22" not in said.err
        assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_run_on_data_in_a_storage_is_that_on_the_same_file(storage: Any, tmp_path: Path) -> None:
    folder = prepared(tmp_path, 1)
    storage.put(str(folder / "text.jsonl"), "bucket/text.jsonl")
    losses = []
    for data, out in (("s3://bucket/text.jsonl", "there"), ("text.jsonl", "here")):
        code, _, errors = frugal_train(folder, "--plan", "plan1.json", "--data", data, "--steps", 2, "--out", out)
        assert (code, errors) == (0, "")
        losses.append([record["loss"] for record in records(folder / out) if record["event"] == "step"])
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert json.loads((folder / "there" / "train.json").read_text())["data"] == ["s3://bucket/text.jsonl"]
    left = [path for name in ("there", "cache") for path in (folder / name).rglob("*") if path.is_file()]
    assert not [path for path in left if SECRET.encode() in path.read_bytes()]
