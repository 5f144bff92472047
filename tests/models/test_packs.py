"""Attention document by document, against each document alone and against the mask of transformers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.data.corpus import lengths_of, read_training_data
from frugal.models import packs, transformers_internals
from frugal.models.objectives import CausalLM

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES | WINDOWED,
    "gemma3_text": SIZES | WINDOWED,
    "mistral": SIZES | {"sliding_window": 8},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0},
}


def model(kind: str, *, attn_pdrop: float = 0.0) -> nn.Module:
    """A model of two layers in fp64 with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, **MODELS[kind] | ({"attn_pdrop": attn_pdrop} if kind == "gpt2" else {}), use_cache=False
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().train()


def attended_alone(query: Tensor, key: Tensor, value: Tensor, mask: packs.LazyMask, scale: float | None) -> Tensor:
    """Return what `packs.attend` computes, one document after the other, without its kernel."""
    offsets, out = mask.offsets.tolist(), torch.zeros_like(query)
    assert offsets[0] == 0 and offsets[-1] == len(query)
    assert mask.longest == max(end - start for start, end in pairwise(offsets))
    for start, end in pairwise(offsets):
        if start < end:
            one, two, three = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
            seen = torch.ones(end - start, end - start, dtype=torch.bool).tril()
            if mask.window is not None:
                seen &= ~seen.tril(-mask.window)
            attended = F.scaled_dot_product_attention(one, two, three, seen, scale=scale, enable_gqa=True)
            out = out.index_add(0, torch.arange(start, end), attended[0].transpose(0, 1))
    return out


@contextmanager
def document_by_document() -> Iterator[list[int]]:
    """Attention as on a card that has the kernel, with another one in its place; yields the calls' lengths."""
    calls: list[int] = []

    def attend(query: Tensor, *rest: Any) -> Tensor:
        calls.append(len(query))
        return attended_alone(query, *rest)

    with (
        patch.object(packs, "capability_of", lambda _: (8, 0)),
        patch.object(packs, "_takes", lambda *_: True),
        patch.object(packs, "attend", attend),
    ):
        yield calls


def gradients(trained: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The gradient of the summed loss of a batch of packs."""
    trained.zero_grad()
    CausalLM(packed=True).loss_sum(trained, batch).backward()
    return [parameter.grad.clone() for parameter in trained.parameters() if parameter.grad is not None]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    scale = max(float(each.abs().max()) for each in one)
    assert max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) <= 1e-6 * scale  # the loss is fp32


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=4), min_size=1, max_size=3), st.sampled_from([*MODELS])
)
def test_gradients_equal_those_with_a_mask(documents: list[list[int]], kind: str) -> None:
    """Draw packs of documents, padded or not, in models with and without windows and groups."""
    transformers_internals.always_use()
    generator = torch.Generator().manual_seed(sum(map(sum, documents)))
    samples = [
        {"input_ids": torch.randint(1, 96, (sum(each),), generator=generator).tolist(), "documents": each}
        for each in documents
    ]
    batch, trained = CausalLM(packed=True).collate(samples), model(kind)
    masked = gradients(trained, {name: batch[name] for name in ("input_ids", "labels", "position_ids")})
    with document_by_document() as calls:
        apart = gradients(trained, batch)
    assert_equal(masked, apart)
    length = batch["input_ids"].shape[1]
    count = sum(len(each) + (sum(each) < length) for each in documents)
    assert bool(calls) == (packs.OFFSETS in batch) == (count <= len(documents) * (length // 64 + 1))


def test_a_plan_takes_the_documents_of_a_pack_from_the_data(tmp_path: Path) -> None:
    """Packs of short documents, packs of long ones, and a mixture; a batch of any of these packs has its offsets."""
    for name, tokens in (("tiny", 20), ("short", 40), ("long", 300)):
        rows = [json.dumps({"text": "x" * (tokens - i % 7)}) for i in range(400)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    request, found = Request(model="gpt2", seq_len=1024, pack=True), {}
    for names in (("tiny",), ("short",), ("long",), ("short", "long")):
        data = tuple(f"{tmp_path / name}.jsonl" + ":1" * (len(names) > 1) for name in names)
        settings = RunSettings(data=data, tokenizer="byte")
        _, _, found[names] = lengths_of(request, settings, ("document_tokens",))
        assert lengths_of(replace(request, document_tokens=7), settings)[2] == 7, "asked for"
        _, corpus = read_training_data(request, settings)
        objective = CausalLM(packed=True, document_tokens=found[names])
        batches = [objective.collate([sample, corpus.train[0]]) for sample in corpus.train]
        assert {packs.OFFSETS in batch for batch in batches} == {found[names] > 0}
    assert found == {("tiny",): 0, ("short",): 32, ("long",): 256, ("short", "long"): 32}


@pytest.mark.parametrize(
    "way", ["dropout", "chunked", "eager", "prefix"], ids=["dropout", "chunks", "eager attention", "a mask of its own"]
)
def test_what_the_kernel_does_not_compute_takes_the_mask(way: str) -> None:
    """Dropout, chunks instead of windows, attention without an interface, a mask that is not causal."""
    transformers_internals.always_use()
    if way == "chunked":
        sizes = SIZES | {"attention_chunk_size": 8, "num_local_experts": 1, "intermediate_size_mlp": 48}
        config = AutoConfig.for_model("llama4_text", **sizes, layer_types=["chunked_attention"] * 2, use_cache=False)
        trained = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    else:
        trained = model("gpt2", attn_pdrop=0.5 if way == "dropout" else 0.0)
    if way == "eager":
        trained.set_attn_implementation("eager")
    samples = [{"input_ids": list(range(1, 71)), "documents": [30, 40]}]
    batch = CausalLM(packed=True).collate(samples)
    assert packs.OFFSETS in batch

    def run(with_offsets: bool) -> list[Tensor]:
        torch.manual_seed(0)
        names = batch if with_offsets else ("input_ids", "labels", "position_ids")
        return gradients(trained, {name: batch[name] for name in names})

    is_causal = packs._is_causal
    other = {"_is_causal": lambda *args: way != "prefix" and is_causal(*args)}
    with document_by_document() as calls, patch.multiple(packs, **other):
        if way in ("dropout", "eager"):
            assert_equal(run(with_offsets=False), run(with_offsets=True))
        else:
            run(with_offsets=True)
    assert not calls


def test_a_mask_that_others_read_is_the_whole_mask() -> None:
    """A model whose attention is its own indexes the mask, adds to it, moves it: each as with the mask itself."""
    mask = torch.rand(2, 1, 6, 6) < 0.5
    made: list[int] = []
    lazy = packs.LazyMask(lambda: made.append(1) or mask, mask.shape, torch.bool, mask.device)
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.dim()) == (mask.shape, mask.dtype, mask.device, 4)
    assert not made
    assert torch.equal(lazy[:, :, 1:], mask[:, :, 1:])
    assert torch.equal(~lazy, ~mask)
    assert torch.equal(torch.where(lazy, 0.0, -1.0), torch.where(mask, 0.0, -1.0))
    query = torch.rand(2, 3, 6, 4)
    ours, theirs = (F.scaled_dot_product_attention(query, query, query, each) for each in (lazy, mask))
    assert torch.equal(ours, theirs)
    assert made == [1]
