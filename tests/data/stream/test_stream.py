"""A stream has the samples that data on disk has, in the order of `datasets`, and goes on where it stopped."""

import copy
import json
import pickle
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.data import corpus
from frugal.data import tokenizer as tokenizing
from frugal.data.batches import GlobalBatch, Position
from frugal.data.chat.template import CHATML
from frugal.data.stream import samples as shards
from frugal.data.stream.samples import SampleStream, StreamBatches
from frugal.data.tokenizer import byte_tokenizer
from frugal.models.spec import ModelSpec
from tests.engine.corpora import Load, refusal, write, write_jsonl

NUM_ROWS = 50


def tokenizer() -> Any:
    made = copy.deepcopy(byte_tokenizer())
    made.chat_template = CHATML
    return made


def chats(number: int, word: str = "row") -> list[dict[str, Any]]:
    """Chats of different lengths, some with what others lack: `datasets` gives all rows the same fields."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{word} {n}" + " and more" * (n % 4)},
                {"role": "assistant", "content": f"the answer to {n}", **({"weight": 1} if n % 3 else {})},
            ]
        }
        for n in range(number)
    ]


def stream_of(*data: str, pack: bool = False, seq_len: int = 256, task: str = "causal-lm", **more: Any) -> SampleStream:
    settings = RunSettings(**{"data": data, "stream": True, "steps": 1, "validation_data": ("0%",), **more})
    spec = ModelSpec(reference="test", kind_of_reference="preset", task=task, max_positions=None, vocab_size=None)
    how = corpus.sample_settings(spec, Request(seq_len=seq_len, pack=pack), settings)
    return corpus.open_stream(spec, tokenizer(), how, settings)[0]


def samples(stream: SampleStream, num_epochs: int = 1) -> list[dict[str, Any]]:
    return [sample for sample, _ in takewhile(lambda each: each[1].epoch < num_epochs, stream.iterate(Position()))]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [byte_tokenizer().decode(sample["input_ids"], skip_special_tokens=True) for sample in rows]


def by_template(rows: Any) -> list[str]:
    """Return rows of `datasets` as their template writes them."""
    made = tokenizer()
    return [made.apply_chat_template(row["messages"], tokenize=False) for row in rows]


@pytest.fixture
def folder(tmp_path: Path, offline: None) -> Path:
    write_jsonl(tmp_path / "chats.jsonl", chats(NUM_ROWS))
    write_jsonl(tmp_path / "more.jsonl", chats(20, "other"))
    return tmp_path


def test_unshuffled_the_samples_are_those_that_datasets_streams_or_interleaves(folder: Path) -> None:
    one, other = (datasets.load_dataset("json", data_files=name, split="train", streaming=True)
                  for name in ("chats.jsonl", "more.jsonl"))  # fmt: skip
    streamed = samples(stream_of("chats.jsonl", "more.jsonl", shuffle_buffer=1))
    assert texts(streamed) == by_template(datasets.concatenate_datasets([one, other]))
    expected = by_template(datasets.interleave_datasets(
        [one, other], probabilities=[0.7, 0.3], seed=3, stopping_strategy="all_exhausted"
    ))  # fmt: skip
    assert texts(samples(stream_of("chats.jsonl:0.7", "more.jsonl:0.3", shuffle_buffer=1, seed=3))) == expected
    assert len(set(expected)) == NUM_ROWS + 20


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "saved", "text", "glob"])
def test_each_kind_of_source_gives_the_samples_that_are_stored_of_it(kind: str, load: Load, tmp_path: Path) -> None:
    where = write(kind, tmp_path) if kind != "text" else "long.txt"
    if kind == "text":
        (tmp_path / where).write_text("".join(f"line {n} ü of a long text\n" for n in range(9000)))
    stored = load(where, seq_len=64).train
    streamed = samples(stream_of(where, seq_len=64, shuffle_buffer=1))
    assert len(streamed) == len(stored)
    assert all(same(one, stored[number]) for number, one in enumerate(streamed))


@pytest.mark.parametrize(("pack", "too_long"), [(False, "error"), (True, "error"), (False, "truncate")])
def test_masks_packs_and_cuts_are_those_of_stored_samples(pack: bool, too_long: Any, load: Load, folder: Path) -> None:
    seq_len = 256 if too_long == "error" else 96
    stored = load("chats.jsonl", seq_len=seq_len, pack=pack, too_long=too_long, tokenizer=tokenizer()).train
    asked = {"seq_len": seq_len, "pack": pack, "too_long": too_long, "shuffle_buffer": NUM_ROWS}
    streamed = samples(stream_of("chats.jsonl", **asked))
    if pack:  # the order decides which documents share a sample
        assert sum(len(sample["input_ids"]) for sample in streamed) == stored.lengths.sum()
        assert all("documents" in sample and (sample["labels"] == -100).any() for sample in streamed)
        return
    keys = [(sample["input_ids"].tobytes(), sample["labels"].tobytes()) for sample in streamed]
    assert sorted(keys) == sorted((each["input_ids"].tobytes(), each["labels"].tobytes()) for each in stored[:])


def test_shards_within_a_file_give_every_row_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = texts(samples(stream_of("chats.jsonl", shuffle_buffer=1)))
    for width in (1, 137):
        monkeypatch.setattr(shards, "SHARD_BYTES", width)
        stream = stream_of("chats.jsonl", shuffle_buffer=1)
        assert len(stream.sources[0].shards) > 3
        assert texts(samples(stream)) == whole
    shuffled = texts(samples(stream_of("chats.jsonl", shuffle_buffer=2)))
    assert sorted(shuffled) == sorted(whole) and sorted(shuffled[:20]) != sorted(whole[:20])


def test_each_file_of_a_source_has_rows_of_its_own_format(folder: Path) -> None:
    inside = folder / "inside"
    inside.mkdir()
    write_jsonl(inside / "chats.jsonl", chats(5))
    (inside / "empty.jsonl").write_text("")
    write_jsonl(inside / "texts.jsonl", [{"text": f"text {n}"} for n in range(5)])
    (folder / "list").write_text("inside/chats.jsonl\ninside/texts.jsonl\n")
    for name in ("inside", "@list", "inside/*.jsonl"):
        streamed = texts(samples(stream_of(name, shuffle_buffer=4)))
        assert sorted(streamed) == sorted([*by_template(chats(5)), *(f"text {n}" for n in range(5))])
    refused = refusal(lambda: stream_of("inside", columns="text=words"))
    assert refused.splitlines()[0] == "inside/texts.jsonl has no column `words`"


def batches_of(stream: SampleStream, **size: int) -> StreamBatches:
    return StreamBatches(stream, "causal-lm", **size)


def told(batch: GlobalBatch) -> Any:
    return batch.draw, batch.indices.tolist(), [sample["input_ids"].tolist() for sample in batch[:]]


def test_nothing_behind_a_full_batch_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, iterate = stream_of("chats.jsonl"), SampleStream.iterate

    def four(self: SampleStream, start: Position) -> Any:
        yield from islice(iterate(self, start), 4)
        raise AssertionError("a fifth is read")

    monkeypatch.setattr(SampleStream, "iterate", four)
    assert len(next(iter(batches_of(stream, global_batch=4).iterate(Position()))).indices) == 4


_WEIGHTED = ("chats.jsonl:0.7", "more.jsonl:0.3")


@pytest.mark.parametrize(
    ("size", "pack", "data"),
    [
        ({"global_batch": 7}, False, ("chats.jsonl", "more.jsonl")),
        ({"global_tokens": 900}, True, _WEIGHTED),
        pytest.param({"global_tokens": 900}, False, _WEIGHTED, marks=pytest.mark.exhaustive),
        pytest.param({"global_batch": 7}, True, ("chats.jsonl",), marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_goes_on_with_the_batches_that_would_have_come(
    size: dict[str, int], pack: bool, data: tuple[str, ...], folder: Path
) -> None:
    def batches(start: Position, number: int) -> list[GlobalBatch]:
        return list(islice(batches_of(stream_of(*data, pack=pack, shuffle_buffer=8), **size).iterate(start), number))

    whole = batches(Position(), 30)
    assert whole[-1].end.epoch >= 1, "the end of an epoch is among them"
    for number in (1, 11, 19):
        state = json.loads(json.dumps([whole[number - 1].end.epoch, whole[number - 1].end.offset]))
        place = whole[number - 1].end.stream
        resumed = batches(Position(*state, place), 30 - number)
        assert list(map(told, resumed)) == list(map(told, whole[number:]))


def test_going_on_reads_one_block_again_and_no_shard_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 200)
    stream = stream_of("chats.jsonl", shuffle_buffer=4)
    *_, last = islice(batches_of(stream, global_batch=5).iterate(Position()), 8)
    read: list[str] = []
    loads = pickle.loads
    monkeypatch.setattr(shards.pickle, "loads", lambda row: read.append(row) or loads(row))
    next(batches_of(stream, global_batch=5).iterate(last.end))
    assert len(read) <= 5 + 2 * 4


def test_a_batch_of_tokens_holds_whole_samples_and_no_more(folder: Path) -> None:
    for batch in islice(batches_of(stream_of("chats.jsonl"), global_tokens=900).iterate(Position()), 10):
        tokens = sum(len(sample["input_ids"]) for sample in batch[:])
        assert 900 - 256 < tokens <= 900 and batch.lengths is not None and batch.lengths.sum() == tokens
    refused = refusal(lambda: next(batches_of(stream_of("chats.jsonl"), global_tokens=20).iterate(Position())))
    assert "a sample does not fit into a global batch of 20 tokens" in refused


def test_long_rows_are_not_tokenised_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": "ab" * 300_000}) + "\n" for _ in range(4)))
    sizes: list[int] = []
    encode = tokenizing.encode

    def noted(tokenizer: Any, texts: Any, **how: Any) -> Any:
        sizes.append(sum(map(len, texts)))
        return encode(tokenizer, texts, **how)

    monkeypatch.setattr(tokenizing, "encode", noted)
    assert len(list(islice(stream_of(str(tmp_path / "long.jsonl")).iterate(Position()), 10))) == 10
    assert max(sizes) <= 1_200_000


def test_held_out_rows_are_never_trained_on(folder: Path) -> None:
    stream = stream_of("chats.jsonl", validation_data=("20%",), validation_samples=4, shuffle_buffer=1)
    held = texts(list(stream.held_out()))
    trained = texts(samples(stream, 2))
    everything = by_template(chats(NUM_ROWS))
    assert held == everything[0:20:5]
    assert sorted(trained) == sorted(2 * [text for text in everything if text not in held])


def test_a_bad_row_ends_the_run_when_it_comes_or_is_left_out(folder: Path) -> None:
    rows = chats(NUM_ROWS)
    write_jsonl(folder / "bad.jsonl", [*rows[:30], {"messages": "none"}, *rows[30:]])
    stream = stream_of("bad.jsonl", shuffle_buffer=1)
    coming = stream.iterate(Position())
    assert "bad.jsonl:31: `messages`: Expected `array`, got `str`" in refusal(lambda: list(islice(coming, 40)))
    stream = stream_of("bad.jsonl", shuffle_buffer=1, skip_bad_rows=True)
    assert len(samples(stream)) == NUM_ROWS


def test_what_cannot_be_streamed_is_refused(folder: Path) -> None:
    assert "how many classes there are" in refusal(lambda: stream_of("chats.jsonl", task="sequence-classification"))
    assert "there is no data to stream at gone" in refusal(lambda: stream_of("gone"))
    (folder / "empty.jsonl").write_text("")
    assert "there is no text in empty.jsonl" in refusal(lambda: stream_of("empty.jsonl"))
    assert "--stream was given without --steps" in refusal(lambda: RunSettings(stream=True).check_length())


@pytest.mark.parametrize(
    ("num_rows", "row", "more", "because"),
    [
        (1, {"text": "some words"}, {"validation_data": ("5%",)}, "all of its rows are kept for validation"),
        (1, {"text": ""}, {}, "1 row without text left out"),
        (3, {"text": ""}, {}, "3 rows without text left out"),
        (3, {"text": 5}, {"skip_bad_rows": True}, "3 rows that cannot be read left out"),
        (2, chats(1, "x" * 300)[0], {"too_long": "skip"}, "2 rows longer than --seq-len left out"),
    ],
)
def test_a_stream_without_a_sample_is_refused(
    num_rows: int, row: dict[str, Any], more: dict[str, Any], because: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [row] * num_rows)
    said = refusal(lambda: stream_of(str(tmp_path / "rows.jsonl"), **more).first(corpus.FIRST_ROWS))
    assert said.startswith("the stream has no sample to train on\n  because ") and because in said
