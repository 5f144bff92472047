"""Checks of a model that its sequences can be split, before it runs; `trials/sequence_check.py` runs a small one."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from frugal.errors import RequestError

KERNEL = "sdpa"
"""transformers' name of the attention that can be split."""

HINT = "leave --sequence-parallel out"

_ROPE_OF_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest position of a forward, which differs from part to part."""


def refuse(model: nn.Module, size: int) -> None:
    """Refuse a model whose attention cannot be split over `size` ranks.

    Raises:
        RequestError: with the reason.
    """
    if (reason := _obstacle(model, size)) is not None:
        raise refusal(type(model).__name__, size, reason)


def refusal(name: str, size: int, reason: str) -> RequestError:
    """Return the error that `size` ranks cannot share samples of the model `name`."""
    return RequestError(f"--sequence-parallel {size} is impossible for {name}", because=reason, hint=HINT)


def _obstacle(model: nn.Module, size: int) -> str | None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return "it is no model of transformers, whose attention functions alone can be replaced"
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder, which have sequences of their own"
    kernel = getattr(text, "_attn_implementation", None)
    if kernel != KERNEL:
        return f"its attention is {kernel!r}, and only {KERNEL!r} is known to be split right"
    if kinds := sorted(set(_rope_types(text)) & set(_ROPE_OF_LENGTH)):
        return f"its rotary embedding ({kinds[0]}) depends on the length of what it reads, and a part is shorter"
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or heads % size:
        return f"its {heads} attention heads do not divide by {size}"
    return None


def _rope_types(text: Any) -> Iterator[str]:
    """Yield the rope types of a configuration: one for all layers, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(text, name, None)
        for each in (given, *given.values()) if isinstance(given, dict) else ():
            if isinstance(each, dict):
                yield str(each.get("rope_type", each.get("type", "default")))
