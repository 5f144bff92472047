"""One layer of six families as transformers has it, in bf16 on this process's card, plain, with Liger's own patch,
with frugal's replacements or compiled."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frugal.models.fused import replacement

Way = Literal["plain", "liger", "frugal", "compile"]


@dataclass(frozen=True)
class Family:
    """A model, and the micro-batch that its layer is measured at.

    `settings`: its config's, but for the number of layers. `liger`: the name of Liger's function for it, if it has one.
    `num_active`: the share of a layer's weights that a token meets.
    """

    name: str
    model_type: str
    settings: dict[str, Any] = field(hash=False)
    samples: int
    positions: int
    num_layers: int
    vocabulary: int
    width: int
    heads: tuple[int, int]
    liger: str | None = None
    is_causal: bool = True
    num_active: float = 1.0


def _decoder(width: int, inner: int, heads: int, key_heads: int, head_size: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "head_dim": head_size, "num_hidden_layers": 1,
    }  # fmt: skip


FAMILIES = {
    each.name: each
    for each in (
        Family(
            "Llama-3.1-8B", "llama", _decoder(4096, 14336, 32, 8, 128), 4, 2048, 32, 128256, 4096, (32, 128), "llama"
        ),
        Family("Qwen3-8B", "qwen3", _decoder(4096, 12288, 32, 8, 128), 4, 2048, 36, 151936, 4096, (32, 128), "qwen3"),
        Family("Gemma-7B", "gemma", _decoder(3072, 24576, 16, 16, 256), 4, 2048, 28, 256000, 3072, (16, 256), "gemma"),
        Family("GPT-2", "gpt2", {"n_layer": 1, "n_positions": 1024}, 4, 1024, 12, 50257, 768, (12, 64)),
        Family("BERT", "bert", {"num_hidden_layers": 1}, 16, 512, 12, 30522, 768, (12, 64), is_causal=False),
        Family(
            "Mixtral-8x7B",
            "mixtral",
            _decoder(4096, 14336, 32, 8, 128) | {"num_local_experts": 8, "num_experts_per_tok": 2},
            4,
            2048,
            32,
            32000,
            4096,
            (32, 128),
            "mixtral",
            num_active=0.27,  # two of eight experts, and attention
        ),
    )
}

LIGER_OPTIONS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def layer(family: Family, way: Way) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The layer in training mode, and what runs it on `hidden (samples, positions, width)`."""
    from transformers import CONFIG_MAPPING, AutoModel

    config = CONFIG_MAPPING[family.model_type](**family.settings, vocab_size=256)
    config._attn_implementation = "sdpa"
    if family.num_active < 1:
        config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda").train()
    if way == "liger":
        patching = importlib.import_module("liger_kernel.transformers.monkey_patch")
        getattr(patching, f"apply_liger_kernel_to_{family.liger}")(model=model, **LIGER_OPTIONS)
    if way == "frugal":
        replacement.apply(model)
    inputs = _inputs(model, family)
    own = _layers(model)[0]
    if way == "compile":
        own.compile(dynamic=False)

    def run(hidden: Tensor) -> Tensor:
        out = own(hidden, **inputs)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return own, run


def _layers(model: Any) -> nn.ModuleList:
    for path in ("layers", "h", "encoder.layer"):
        try:
            return model.get_submodule(path)
        except AttributeError:
            continue
    raise ValueError(f"no layers in {type(model).__name__}")


def _inputs(model: Any, family: Family) -> dict[str, Any]:
    """Return what the model gives each layer beside hidden states: positions as rotations, no mask."""
    if not hasattr(model, "rotary_emb"):
        return {}
    # an emulated card computes no rotations: their frequencies only have to have the right shape
    positions = torch.zeros((1, family.positions), dtype=torch.int64, device="cuda")
    hidden = torch.empty((1, 1, family.width), dtype=torch.bfloat16, device="cuda")
    rotations = model.rotary_emb(hidden, positions)
    return {"position_embeddings": rotations, "position_ids": positions, "attention_mask": None}
