"""Documents that share a sample train as if each had one of its own."""

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.data.corpus import lengths_of
from frugal.data.store import packing
from frugal.data.store.packing import Packer
from frugal.data.tokenizer import byte_tokenizer
from frugal.engine.engine import initialize
from frugal.errors import RequestError
from frugal.models.objectives import CausalLM
from frugal.models.resolve import resolve
from frugal.models.tiled_loss import IGNORED
from frugal.models.trials import text_checks
from tests.corpora import load_corpus
from tests.engine.gradients import SGD, Gradient, applied, relative_error, weights, with_bound
from tests.engine.small_models import tiny

SEQ_LEN = 64


def documents() -> list[np.ndarray]:
    """Of 2 to 60 tokens."""
    random = np.random.default_rng(0)
    return [random.integers(5, 256, size).astype(np.int32) for size in random.integers(2, 61, 24)]


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


def gradient(family: str, zero_stage: int, loss: str, micro_batch: int) -> tuple[Gradient, float]:
    """What DeepSpeed made of packed documents, read off one step of SGD, and the loss. Runs on ranks."""
    samples = packed(documents())
    plan = plan_by_hand(
        world_size=torch.distributed.get_world_size(), global_batch=len(samples), micro_batch=micro_batch,
        zero_stage=zero_stage, strategy={"loss": loss},
        request=SGD,
    )  # fmt: skip
    before = weights(tiny("causal-lm", family))
    engine = initialize(tiny("causal-lm", family), plan, CausalLM(packed=True))
    result = engine.train_step(samples)
    gradients = applied(engine, before)
    engine.destroy()
    del engine
    gc.collect()
    return gradients, result.loss


def alone(family: str, dtype: torch.dtype) -> tuple[Gradient, float]:
    """Plain PyTorch, one process, every document by itself."""
    model, total = tiny("causal-lm", family).to(dtype), 0.0
    targets = sum(len(document) - 1 for document in documents())
    for document in documents():
        tokens = torch.from_numpy(document).long()[None]
        loss = torch.nn.functional.cross_entropy(model(input_ids=tokens).logits[0, :-1], tokens[0, 1:], reduction="sum")
        (loss / targets).backward()
        total += float(loss) / targets
    return {name: parameter.grad for name, parameter in model.named_parameters()}, total


@pytest.mark.parametrize(
    ("family", "fixture", "zero_stage", "loss", "micro_batch"),
    [
        ("gpt2", "one_rank", 0, "plain", 8),
        ("llama", "two_ranks", 2, "tiled", 2),
        pytest.param("llama", "three_ranks", 3, "plain", 1, marks=pytest.mark.exhaustive),
        pytest.param("gpt2", "three_ranks", 3, "tiled", 2, marks=pytest.mark.exhaustive),
        pytest.param("gpt2", "two_ranks", 1, "plain", 1, marks=pytest.mark.exhaustive),
        pytest.param("llama", "one_rank", 3, "plain", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_the_gradient_is_that_of_the_documents_alone(
    family: str, fixture: str, zero_stage: int, loss: str, micro_batch: int, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    (expected, expected_loss), bound = with_bound(alone, family)
    for gradients, mean_loss in ranks.run(gradient, family, zero_stage, loss, micro_batch):
        assert relative_error(gradients, expected) < bound
        assert mean_loss == pytest.approx(expected_loss, rel=bound)


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-70b", "mistral", "gemma3_text", "mixtral"])
def test_models_that_keep_documents_apart_may_pack(name: str) -> None:
    text_checks.check_packing(resolve(name))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bert-base", "a model that reads in both directions knows padding only, not documents"),
        ("t5-small", "each target text has a source text of its own"),
        ("bloom", "what it says of a document depends on the one before it, to 100.0 % of the whole"),
        ("opt", "what it says of a document depends on the one before it, to 98.0 % of the whole"),
    ],
)
def test_other_models_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        text_checks.check_packing(resolve(name))
    assert str(caught.value) == (
        f"--pack is impossible for {name}\n  because {reason}\n\n"
        "hint: leave --pack out: samples of like length share a micro-batch, which pads little"
    )


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
    lengths, _ = lengths_of(
        Request(model="gpt2", seq_len=SEQ_LEN, pack=True), RunSettings(data=(str(path),), validation_fraction=0)
    )
    assert lengths.num_samples == len(pack.train) and lengths.longest == SEQ_LEN
