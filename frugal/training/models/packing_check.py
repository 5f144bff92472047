"""Whether a model keeps packed documents apart: a small one of its kind is run, not a list of names consulted."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from frugal.errors import RequestError
from frugal.training.data import packing
from frugal.training.models import factories
from frugal.training.models.spec import OWN, ModelSpec

DOCUMENTS = (13, 9)
"""Tokens of the two documents that are packed."""

MOST_LEAKAGE = 1e-3
"""What another document may change, of what it changes where nothing keeps them apart: rounding is far below."""

MOST_PARAMETERS = 30_000_000
"""Of a model that is run as it is, because no smaller one of its kind can be made."""

_HINT = "leave --pack out: samples of like length share a micro-batch, which pads little"
_WHY_NOT = {
    "masked-lm": "a model that reads in both directions is only told what is padding",
    "seq2seq": "each target text has a source text of its own",
    "sequence-classification": "a sample has one class",
    OWN: "its loss is Python of its own, and makes its batches itself",
}
_SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    "vocab_size": 256, "sliding_window": 4, "rotary_dim": 8,
}  # fmt: skip


def check_packing(spec: ModelSpec) -> None:
    """Refuse to pack for a model that would let documents see each other.

    Raises:
        RequestError: with the reason.
    """
    if spec.task in _WHY_NOT:
        raise RequestError(f"--pack is impossible for {spec.reference}", because=_WHY_NOT[spec.task], hint=_HINT)
    try:
        leak = leakage(_small(spec))
    except RequestError:
        raise
    except Exception as error:  # whatever a model trips over
        reason = factories.first_line(error)
        raise RequestError(
            f"--pack is impossible for {spec.reference}",
            because=f"a packed sample cannot be run: {type(error).__name__}: {reason}",
            hint=_HINT,
        ) from None
    if leak > MOST_LEAKAGE:
        raise RequestError(
            f"--pack is impossible for {spec.reference}",
            because=f"what it says of a document depends on the one before it, to {100 * leak:.1f} % of the whole",
            hint=_HINT,
        )


def leakage(model: nn.Module) -> float:
    """What a document before it changes in the logits of another that is packed with it, as a part of what it changes
    where they simply follow each other."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(5, 200, (1, number), generator=generator) for number in DOCUMENTS)
    together = torch.cat([first, second], dim=1)
    position_ids = torch.from_numpy(packing.positions(DOCUMENTS))[None]

    def logits(tokens: Tensor, **inputs: Tensor) -> Tensor:
        return model(input_ids=tokens, **inputs).logits[0].float()

    with torch.no_grad():
        alone = torch.cat([logits(first), logits(second)])
        following = logits(together)
        with packing.documents_kept_apart():
            packed = logits(together, position_ids=position_ids)
    unpacked = float((following - alone).abs().max())
    return float((packed - alone).abs().max()) / unpacked if unpacked else 0.0


def _small(spec: ModelSpec) -> nn.Module:
    """A model of the same kind, random and small."""
    reason = "it comes from a factory"
    if spec.factory is None:
        try:
            return replace(spec, config=_small_config(spec.config), weights=None).build(dtype=torch.float32)
        except Exception as error:  # each configuration checks its values in its own way
            reason = f"{type(error).__name__}: {factories.first_line(error)}"
    num_parameters = sum(parameter.numel() for parameter in spec.build(dtype=torch.float32, device="meta").parameters())
    if num_parameters > MOST_PARAMETERS:
        raise RequestError(
            f"--pack is impossible for {spec.reference}",
            because=f"no small model of its kind can be made to see whether it keeps documents apart: {reason}",
            hint=_HINT,
        )
    return replace(spec, weights=None).build(dtype=torch.float32)


def _small_config(original: Any) -> Any:
    """The configuration with few narrow layers, at least one of each type."""
    config = copy.deepcopy(original)
    text = config.get_text_config()
    for name, value in _SMALL.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, value)
    if getattr(text, "num_key_value_heads", None) == getattr(original.get_text_config(), "num_attention_heads", None):
        text.num_key_value_heads = text.num_attention_heads
    num_layers = 2
    if types := getattr(text, "layer_types", None):
        num_layers = max(num_layers, 1 + max(map(types.index, set(types))))
        text.layer_types = types[:num_layers]
    text.num_hidden_layers = min(num_layers, text.num_hidden_layers)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(text, name, None), int) and getattr(text, name) >= text.vocab_size:
            setattr(text, name, 0)
    return config
