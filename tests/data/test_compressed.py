"""Data in compressed files and archives: the same samples as of the plain files, and damage that is named."""

import bz2
import gzip
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frugal.data.corpus import Corpus
from frugal.data.rows import Columns
from frugal.data.stream.samples import find_streams
from tests.engine.corpora import ROWS, Load, refusal, texts, write


def zstd_frames(data: bytes) -> bytes:
    """Two frames, as parallel compressors write: readers that stop after the first lose rows without a word."""
    half = len(data) // 2
    return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (data[:half], data[half:]))


PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]),
    ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd_frames,
}  # fmt: skip


def stored(corpus: Corpus) -> list[dict[str, Any]]:
    return [{name: value.tolist() for name, value in corpus.train[i].items()} for i in range(len(corpus.train))]


def put_into_archive(path: Path, contents: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_a_compressed_file_gives_the_samples_of_the_plain_one_from_its_cache(
    kind: str, load: Load, tmp_path: Path
) -> None:
    name = write(kind, tmp_path)
    data, plain = Path(name).read_bytes(), load(name)
    for suffix, pack in PACKED.items():
        Path(name + suffix).write_bytes(pack(data))
        packed = load(name + suffix)
        assert (stored(packed), packed.report) == (stored(plain), plain.report)
        assert packed.folder == plain.folder, "content decides, so a run may be resumed on data that was compressed"
    put_into_archive(tmp_path / "a.zip", {f"inner/{name}": data, "__MACOSX/x": b"\xff", "inner/.hidden": b"\xff"})
    assert load("a.zip").folder == plain.folder


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ANY_TEXT, min_size=1, max_size=30), suffix=st.sampled_from(list(PACKED)), is_text=st.booleans())
def test_rows_and_their_order_do_not_depend_on_compression(
    rows: list[str], suffix: str, is_text: bool, tmp_path: Path, load: Load
) -> None:
    lines = [text if is_text else json.dumps({"text": text}) for text in rows]
    name = "a.txt" if is_text else "a.jsonl"
    (tmp_path / name).write_text("\n".join(lines), newline="")
    packed = tmp_path / f"packed-{name}{suffix}"
    packed.write_bytes(PACKED[suffix]((tmp_path / name).read_bytes()))
    streams = [find_streams([str(path)], Columns())[0] for path in (tmp_path / name, packed)]
    plain, other = ([row for shard in stream.shards for _, row in shard.rows()] for stream in streams)
    assert plain == other and (is_text or [row["text"] for row in other] == rows)


def test_an_archive_is_read_like_the_folder_that_was_packed(load: Load, tmp_path: Path) -> None:
    name = write("folder", tmp_path)
    contents = {
        str(p.relative_to(name)): p.read_bytes() for p in sorted(Path(name).rglob("*"), reverse=True) if p.is_file()
    }
    put_into_archive(tmp_path / "a.zip", contents)
    assert texts(load("a.zip")) == texts(load(name)) == [row["text"] for row in ROWS]


def test_a_bad_row_is_named_by_archive_file_and_line(load: Load, tmp_path: Path) -> None:
    bad = b'{"text": "ok"}\n{"text": 5}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(bad))
    put_into_archive(tmp_path / "b.zip", {"in/c.jsonl": bad, "in/d.jsonl.xz": lzma.compress(bad)})
    said = refusal(lambda: load("a.jsonl.gz", "b.zip"))
    assert said.startswith(
        "3 rows of the data cannot be read\n"
        "  because a.jsonl.gz:2: `text` is a number, not text\n"
        "  because b.zip/in/c.jsonl:2: `text` is a number, not text\n"
        "  because b.zip/in/d.jsonl.xz:2: `text` is a number, not text\n"
    )


DAMAGES = [(suffix, damage) for suffix in PACKED for damage in ("cut off", "another byte", "no such content")]
DAMAGES.remove((".zst", "another byte"))  # pyarrow's zstd writes no checksum


@pytest.mark.parametrize(("suffix", "damage"), DAMAGES)
def test_a_damaged_file_is_refused_and_never_read_in_part(suffix: str, damage: str, load: Load, tmp_path: Path) -> None:
    data = bytearray(PACKED[suffix](b"".join(b'{"text": "line %d"}\n' % n for n in range(2000))))
    if damage == "cut off":
        del data[-5:]
    elif damage == "another byte":
        data[len(data) // 2] ^= 0x55
    else:
        data[:] = b'{"text": "it is plain"}\n'
    (tmp_path / f"a.jsonl{suffix}").write_bytes(data)
    assert refusal(lambda: load(f"a.jsonl{suffix}")).startswith(f"a.jsonl{suffix} cannot be decompressed\n  because ")


def test_archives_that_cannot_be_read_are_named(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"nonsense")
    put_into_archive(tmp_path / "b.zip", {".hidden": b"x"})
    put_into_archive(tmp_path / "c.zip", {"a.txt": b"some text"})
    data = bytearray((tmp_path / "c.zip").read_bytes())
    for begin in (data.index(b"PK\x03\x04") + 6, data.index(b"PK\x01\x02") + 8):
        data[begin] |= 1  # encrypted
    (tmp_path / "c.zip").write_bytes(data)
    assert refusal(lambda: load("a.zip")).startswith("a.zip cannot be decompressed\n")
    assert refusal(lambda: load("b.zip")) == "the archive b.zip is empty\n  because it has no file that is not hidden"
    assert refusal(lambda: load("c.zip")).startswith("c.zip/a.txt cannot be decompressed\n") and "password" in refusal(
        lambda: load("c.zip")
    )


def test_all_problems_of_a_folder_come_in_one_error(load: Load, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a.jsonl").write_text('{"text": "good"}\n{"text": 5}\n')
    (tmp_path / "d/b.csv").write_text("id,body\n1,some words\n")
    (tmp_path / "d/c.jsonl").write_text('{"number": 3, "words": "some words here"}\n')
    said = refusal(lambda: load("d"))
    assert said == (
        "the data has 3 problems\n"
        "  because d/b.csv has no column `text` (its columns are id, body)\n"
        "  because d/c.jsonl has no column `text` (its columns are number, words)\n"
        "  because d/a.jsonl:2: `text` is a number, not text\n"
        "\n"
        "hint: if another one has it: --columns text=NAME, or of a question and its answer: --columns "
        "prompt=NAME,response=NAME; there is text in body\n"
        "hint: if another one has it: --columns text=NAME, or of a question and its answer: --columns "
        "prompt=NAME,response=NAME; there is text in words\n"
        "hint: of rows: repair them, or leave them out with --skip-bad-rows"
    )
    (tmp_path / "d/e.jsonl").write_text('{"text": "good"}\n{"text": "good"\n')
    said = refusal(lambda: load("d"))
    assert "the data has 4 problems" in said and "d/e.jsonl:2: " in said
    for number in range(3):
        (tmp_path / f"d/{number}.txt.gz").write_bytes(b"plain")
    said = refusal(lambda: load("d", "gone.jsonl"))
    assert said.startswith("there is no data at gone.jsonl\n")
    said = refusal(lambda: load("d", "gone.jsonl", "lost.jsonl"))
    assert said.startswith(
        "the data has 2 problems\n  because there is no data at gone.jsonl (no such file or folder)\n"
    )
    said = refusal(lambda: load("d"))
    assert said.startswith("the data has 6 problems\n  because d/0.txt.gz cannot be decompressed (")
    assert "  because d/b.csv has no column `text`" in said
