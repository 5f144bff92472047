"""A text of many MB is read in pieces: the same samples, and little more memory than its bytes."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frugal.training.data import long_text, rows, tokenizer
from frugal.training.data.long_text import LongText, cut_for
from frugal.training.data.rows import Columns
from tests.training.corpora import Load, refusal, write_jsonl

PARTS = ("a", "é", "中", "🚀", "\\", '"', "\n", " ", "u", "d83d", "\\u", "\\ud83d", "0")  # awkward beside each other
MOST = 3  # times its size, for a line


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of more than 64 bytes are long."""
    for module in (long_text, rows):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)


def awkward(seed: int, number: int) -> str:
    return "".join(random.Random(seed).choices(PARTS, k=number))


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_no_character_and_no_escape_is_cut(ensure_ascii: bool, short_pieces: None) -> None:
    for seed in range(500):
        text = awkward(seed, seed % 200)
        raw = json.dumps(text, ensure_ascii=ensure_ascii).encode()[1:-1]
        assert "".join(LongText(raw, is_json=True).take()) == text
        assert "".join(LongText(text.encode(), is_json=False).take()) == text


def test_a_text_that_was_taken_holds_no_memory() -> None:
    text = LongText(b"x" * 100, is_json=False)
    assert (len(text), list(text.take()), len(text)) == (100, ["x" * 100], 0)


def trained(kind: str) -> Any:
    """A tokenizer that has learnt some words of Python's library."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model, trainer = {
        "bytes": (models.BPE(), trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)),
        "word pieces": (
            models.WordPiece(unk_token="<unk>"),
            trainers.WordPieceTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False),
        ),
        "unigram": (
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=600, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
        ),
    }[kind]
    made = Tokenizer(model)
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    elif kind == "word pieces":
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator([Path(random.__file__).read_text()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.mark.parametrize("kind", ["bytes", "word pieces", "unigram"])
def test_the_tokens_of_the_pieces_are_those_of_the_whole(kind: str) -> None:
    made, whole = trained(kind), Path(subprocess.__file__).read_text()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(made, [text])[0].tolist()
        return ids

    pieces = list(cut_for(encode, (whole[start : start + 3000] for start in range(0, len(whole), 3000))))
    assert len(pieces) > 20
    assert [token for piece in pieces for token in encode(piece)] == encode(whole)


def test_a_text_that_cannot_be_cut_stays_whole() -> None:
    def encode(text: str) -> list[int]:
        return [len(text), hash(text)]

    assert list(cut_for(encode, iter(["a b " * 1000, "c d " * 1000]))) == ["a b " * 1000 + "c d " * 1000]


TASKS = {
    "causal-lm": {},
    "masked-lm": {},
    "seq2seq": {"too_long": "truncate"},
    "sequence-classification": {"too_long": "truncate"},
}


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_the_same_as_of_a_text_that_is_decoded_at_once(
    task: str, load: Load, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    data = [
        {"text": text, "source": text, "target": text[::-1], "label": number % 2, "other": [number]}
        for number, text in enumerate([awkward(1, 3000), "short", awkward(2, 500)])
    ]
    write_jsonl(tmp_path / "a.jsonl", data)
    (tmp_path / "a.txt").write_text(f"{awkward(3, 2000)}\nshort\n")
    names = ("a.jsonl", "a.txt") if task.endswith("lm") else ("a.jsonl",)
    whole = load(*names, task=task, seq_len=20, **TASKS[task])
    request.getfixturevalue("short_pieces")
    pieces = load(*names, task=task, seq_len=20, cache_dir=tmp_path / "other", **TASKS[task])
    assert whole.fingerprint == pieces.fingerprint
    assert (tmp_path / "other").exists()
    assert [repr(sample) for sample in pieces.train] == [repr(sample) for sample in whole.train]
    assert pieces.report == whole.report


def test_a_long_text_that_is_wrong_is_named_by_its_line(load: Load, tmp_path: Path, short_pieces: None) -> None:
    for name, content, said in (
        ("a.txt", b"good\n" + b"x" * 200 + b"\n" + b"y" * 300 + b"\xff\n", "a.txt:3: not UTF-8 text"),
        ("b.jsonl", b'{"text": "good"}\n{"text": "' + b"x" * 200 + b'\xff"}\n', "b.jsonl:2: "),
        ("c.jsonl", b'{"text": "good"}\n{"text": "' + b"x" * 200 + b'\\ud83d"}\n', "c.jsonl:2: "),
        ("d.jsonl", b'{"text": "good"}\n["' + b"x" * 200 + b'"]\n', "d.jsonl:2: not an object"),
        ("e.jsonl", b'{"text": "good"}\n{"text": "' + b"x" * 200 + b'"\n', "e.jsonl:2: Input data was truncated"),
    ):
        (tmp_path / name).write_bytes(content)
        assert f"  because {said}" in refusal(lambda name=name: load(name, columns=Columns()))


MEASURE = """
import json, sys
from pathlib import Path
from frugal.config.hardware.local_host import forget_peak_rss, peak_rss
from frugal.training.data.corpus import load_corpus
from frugal.training.data.tokenizer import load_tokenizer

folder, kind, tokenizer = Path(sys.argv[1]), sys.argv[2], load_tokenizer(sys.argv[4])
words = "to be or not to be, that is — the question 🚀 "
text = words * (int(sys.argv[3]) // len(words.encode()))
(folder / "warm.jsonl").write_text(json.dumps({"text": words * 60000}) + "\\n")  # imports, and buffers of usual size
with (folder / f"a.{kind}").open("w") as file:
    for _ in range(2):
        file.write(json.dumps({"text": text}, ensure_ascii="ascii" in kind) if "jsonl" in kind else text)
        file.write("\\n")
size = (folder / f"a.{kind}").stat().st_size // 2
del text
options = {"tokenizer": tokenizer, "task": "causal-lm", "seq_len": 1024, "cache_dir": folder / "cache"}
load_corpus([str(folder / "warm.jsonl")], **options)
before = forget_peak_rss()
corpus = load_corpus([str(folder / f"a.{kind}")], **options)
assert corpus.report.documents == 2
print(json.dumps([size, peak_rss() - before, corpus.report.tokens]))
"""


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("jsonl", 10),
        pytest.param("ascii.jsonl", 10, marks=pytest.mark.exhaustive),
        pytest.param("txt", 10, marks=pytest.mark.exhaustive),
        *(pytest.param(kind, 100, marks=pytest.mark.exhaustive) for kind in ("jsonl", "ascii.jsonl", "txt")),
    ],
)
@pytest.mark.parametrize("made", ["byte", pytest.param("trained", marks=pytest.mark.exhaustive)])
def test_a_long_line_takes_at_most_three_times_its_size(kind: str, size: int, made: str, tmp_path: Path) -> None:
    if made == "trained":
        trained("bytes").save_pretrained(tmp_path / "made")
        made = str(tmp_path / "made")
    words = [sys.executable, "-c", MEASURE, str(tmp_path), kind, str(size * 10**6), made]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    num_bytes, taken, _ = json.loads(done.stdout.splitlines()[-1])
    assert num_bytes >= 0.99 * size * 10**6
    assert taken <= MOST * num_bytes, f"{taken / num_bytes:.2f} times"
