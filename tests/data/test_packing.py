"""Documents share samples: each is whole, in one of them, and known from the others."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.data.corpus import lengths_of
from frugal.data.store import packing
from frugal.data.store.packing import Packer
from frugal.data.tokenizer import byte_tokenizer
from frugal.errors import RequestError
from frugal.models.objectives import CausalLM
from frugal.models.resolve import resolve
from frugal.models.trials import model_check
from frugal.units import IGNORED
from tests.corpora import load_corpus

SEQ_LEN = 64


def packed(pieces: list[np.ndarray], seq_len: int = SEQ_LEN) -> list[dict[str, Any]]:
    packer = Packer(seq_len)
    return [pack for piece in pieces for pack in packer.add(piece)] + list(packer.flush())


def pieces_of(pack: dict[str, Any]) -> list[bytes]:
    ends = np.cumsum(pack["documents"])[:-1]
    return [piece.tobytes() for piece in np.split(pack["input_ids"], ends)]


@given(st.lists(st.integers(2, 64), min_size=1, max_size=400), st.integers(2, 300))
def test_every_piece_is_in_one_pack_and_none_is_too_full(sizes: list[int], most_open: int) -> None:
    pieces = [np.full(size, number, dtype=np.int32) for number, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packing, "MOST_OPEN", most_open)
        packs = packed(pieces)
    assert sorted(piece for pack in packs for piece in pieces_of(pack)) == sorted(piece.tobytes() for piece in pieces)
    assert all(pack["length"] == len(pack["input_ids"]) == sum(pack["documents"]) <= SEQ_LEN for pack in packs)


def test_packs_of_many_lengths_are_nearly_full() -> None:
    random = np.random.default_rng(1)
    packs = packed([np.zeros(size, dtype=np.int32) for size in random.integers(2, 400, 5000)], 1024)
    assert np.mean([pack["length"] for pack in packs]) > 0.99 * 1024


def test_a_document_begins_with_no_target_and_at_position_0() -> None:
    sample = {"input_ids": [11, 12, 13, 21, 22], "documents": [3, 2]}
    batch = CausalLM(packed=True).collate([sample, {"input_ids": [31, 32, 33, 34, 35, 36]}])
    assert batch["labels"].tolist() == [[IGNORED, 12, 13, IGNORED, 22, IGNORED], [IGNORED, 32, 33, 34, 35, 36]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert CausalLM(packed=True).count(batch) == 2 + 1 + 5


MIXES = "what it says of a document depends on the one before it, to {} % of the whole"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "") for name in ("gpt2", "llama-3.1-70b", "mistral", "gemma3_text", "mixtral")),
        ("bert-base", "a model that reads in both directions knows padding only, not documents"),
        ("t5-small", "each target text has a source text of its own"),
        ("bloom", MIXES.format("100.0")),
        ("opt", MIXES.format("98.0")),
    ],
)
def test_models_that_keep_documents_apart_may_pack_and_others_are_refused(name: str, reason: str) -> None:
    with pytest.raises(RequestError) if reason else nullcontext() as caught:
        model_check.check_packing(resolve(name))
    if caught:
        assert caught.value.what == f"--pack is impossible for {name}" and caught.value.because == (reason,)
        assert "hint: leave --pack out" in str(caught.value)


def test_text_on_disk_is_packed_once_and_a_plan_is_told_how_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in (10, 200, 30, 40, 5)))
    load = {"tokenizer": byte_tokenizer(), "task": "causal-lm", "seq_len": SEQ_LEN, "cache_dir": tmp_path}
    plain, pack = (load_corpus([str(path)], pack=pack, **load) for pack in (False, True))
    windows = sorted(plain.train[i]["input_ids"].tobytes() for i in range(len(plain.train)))
    assert sorted(piece for sample in pack.train for piece in pieces_of(sample)) == windows
    assert pack.report.tokens == plain.report.tokens and len(pack.train) < len(plain.train)
    assert pack.provenance.fingerprint != plain.provenance.fingerprint
    lengths, *_ = lengths_of(
        Request(model="gpt2", seq_len=SEQ_LEN, pack=True), RunSettings(data=(str(path),), validation_data=("0%",))
    )
    assert lengths.num_samples == len(pack.train) and lengths.longest == SEQ_LEN
