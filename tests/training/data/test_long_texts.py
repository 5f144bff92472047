"""A long text is tokenised in pieces: the same tokens, and memory that fits into what is free."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frugal.training.data import rows, tokenizer


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
def test_the_tokens_of_the_pieces_are_those_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, texts = trained(kind), ["short", Path(subprocess.__file__).read_text(), "é 中 🚀" * 3000]
    whole = tokenizer.encode(made, texts)
    monkeypatch.setattr(tokenizer, "LONG", 10_000)
    monkeypatch.setattr(tokenizer, "_PIECE", 3000)
    pieces: list[str] = []
    cut = tokenizer.cut
    monkeypatch.setattr(tokenizer, "cut", lambda encode, text: pieces.extend(cut(encode, text)) or cut(encode, text))
    assert all(map(np.array_equal, tokenizer.encode(made, texts), whole))
    assert len(pieces) > 20


def test_a_text_that_cannot_be_cut_stays_whole() -> None:
    text = "a b " * (tokenizer.LONG // 2)
    assert list(tokenizer.cut(lambda texts: [np.array([len(each), hash(each)]) for each in texts], text)) == [text]


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
        file.write(json.dumps({"text": text}, ensure_ascii=False) if "jsonl" in kind else text)
        file.write("\\n")
size = (folder / f"a.{kind}").stat().st_size // 2
del text
options = {"tokenizer": tokenizer, "task": "causal-lm", "seq_len": 1024, "cache_dir": folder / "cache"}
load_corpus([str(folder / "warm.jsonl")], **options)
before = forget_peak_rss()
corpus = load_corpus([str(folder / f"a.{kind}")], **options)
assert corpus.report.documents == 2
print(json.dumps([size, peak_rss() - before]))
"""


@pytest.mark.parametrize(
    ("kind", "megabytes", "made"),
    [
        ("jsonl", 10, "byte"),
        *(pytest.param(kind, 100, made, marks=pytest.mark.exhaustive)
          for kind in ("jsonl", "txt") for made in ("byte", "trained")),
    ],
)  # fmt: skip
def test_the_longest_line_that_is_read_fits_into_the_memory(
    kind: str, megabytes: int, made: str, tmp_path: Path
) -> None:
    if made == "trained":
        trained("bytes").save_pretrained(tmp_path / "made")
        made = str(tmp_path / "made")
    words = [sys.executable, "-c", MEASURE, str(tmp_path), kind, str(megabytes * 10**6), made]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    num_bytes, taken = json.loads(done.stdout.splitlines()[-1])
    assert taken <= rows._PART_OF_MEMORY * num_bytes, f"{taken / num_bytes:.2f} times"
