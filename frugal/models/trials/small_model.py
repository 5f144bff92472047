"""Small, random models of a kind, to be run where a question is answered by trying."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from frugal.errors import RequestError, first_line
from frugal.models.spec import ModelSpec, max_positions_of

T = TypeVar("T")

MOST_PARAMETERS = 30_000_000
"""The largest model that is run."""

VOCABULARY = 256

_SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    "vocab_size": VOCABULARY, "decoder_vocab_size": VOCABULARY, "sliding_window": 4, "rotary_dim": 8,
    "expert_capacity": 4,
}  # fmt: skip
_SMALLER = {
    "d_ff": 64, "d_kv": 16, "ffn_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32,
    "kv_lora_rank": 32, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 16,
    "num_local_experts": 16, "n_routed_experts": 16, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "chunk_size": 16, "mamba_chunk_size": 16,
    "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_ssm": 128,
    "mamba_d_state": 16, "num_heads": 8, "expand": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "pooler_hidden_size": 64,
}  # fmt: skip
"""Sizes for configurations that have more. Not every model can be made so small: then `_SMALL` alone is used."""

_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
_NUM_LAYERS = (2, 4, 8)
_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "mask_token_id")


class NoSmallModelError(Exception):
    """There is no small model of a kind; its text is the reason."""


def small_models(spec: ModelSpec) -> Iterator[tuple[ModelSpec, nn.Module]]:
    """Yield models of the same kind in training mode, fp32, the smallest first; the last is the model itself, if small.

    Raises:
        NoSmallModelError: there is none. Raised when the first is asked for, with the reason.
    """
    reason, is_found = "it is large, and has no configuration to make it smaller by", False
    whole = spec.build(dtype=torch.float32, device="meta")
    for sizes in (_SMALL | _SMALLER, _SMALL) if spec.config is not None else ():
        try:
            small = _smallest(spec, sizes, whole)
            if small is not None:
                is_found = True
                yield small, _amplified(small.build(dtype=torch.float32))
        except Exception as error:  # each configuration checks its values in its own way
            because = error.because if isinstance(error, RequestError) else ()
            reason = because[0] if because else first_line(error)
    if is_small(whole):
        itself = replace(spec, weights=None)
        yield itself, itself.build(dtype=torch.float32)
    elif not is_found:
        raise NoSmallModelError(reason)


def tried(spec: ModelSpec, run: Callable[[ModelSpec, nn.Module], T]) -> T:
    """Return what `run` returns of the smallest model of the kind of `spec` that it does not fail on.

    Raises:
        NoSmallModelError: there is none, or `run` fails on all of them.
    """
    reason = ""
    for small, model in small_models(spec):
        try:
            return run(small, model)
        except Exception as error:  # whatever a model trips over
            reason = first_line(error)
    raise NoSmallModelError(f"a small one fails: {reason}")


def _smallest(spec: ModelSpec, sizes: dict[str, int], whole: Any) -> ModelSpec | None:
    """Return the spec with the fewest layers that have all kinds of modules of the `whole`; None: that is too large."""
    kinds, smallest = set(map(type, whole.modules())), None
    kind: Any = type(whole.get_base_model() if hasattr(whole, "get_base_model") else whole)  # without peft's wrapper
    for num_layers in _NUM_LAYERS:
        config = _small_config(spec.config, sizes, num_layers)
        small = replace(
            spec, config=config, weights=None, vocab_size=getattr(config.get_text_config(), "vocab_size", None),
            max_positions=max_positions_of(config), factory=spec.factory and partial(kind, config),
        )  # fmt: skip
        on_meta = small.build(dtype=torch.float32, device="meta")
        if not is_small(on_meta):
            break
        smallest = small
        if kinds <= set(map(type, on_meta.modules())):
            break
    return smallest


def is_small(model: nn.Module) -> bool:
    """Tell whether it can be tried as it is."""
    return sum(parameter.numel() for parameter in model.parameters()) <= MOST_PARAMETERS


def _amplified(model: nn.Module) -> nn.Module:
    """Scale matrices up so that outputs of layers are about as large as inputs; in a narrow model they are not."""
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 2 and not isinstance(module, nn.Embedding):
                    parameter.mul_(max(1.0, 1 / (float(parameter.std()) * min(parameter.shape) ** 0.5 + 1e-9)))
    return model


_LACKING = AttributeError, NotImplementedError
"""Errors of a configuration that lacks a value, or derives it from others."""


def _small_config(original: Any, sizes: dict[str, int], num_layers: int) -> Any:
    """Return the configuration with few narrow layers, at least one of each type; also in its other encoders."""
    config = copy.deepcopy(original)
    text, whole = config.get_text_config(), original.get_text_config()
    others = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    for part in {id(part): part for part in (text, *others) if part is not None}.values():
        for name, size in sizes.items():
            with suppress(*_LACKING):
                present = getattr(part, name)
                is_other_vocabulary = part is not text and name.endswith("vocab_size")
                if isinstance(present, int) and (name in _SMALL or present > size) and not is_other_vocabulary:
                    setattr(part, name, size)
        _set_layers(part, num_layers)
    with suppress(*_LACKING):
        if whole.num_key_value_heads == whole.num_attention_heads:
            text.num_key_value_heads = text.num_attention_heads
    for name in _SPECIAL_IDS:
        if isinstance(getattr(text, name, None), int) and getattr(text, name) >= getattr(text, "vocab_size", 0):
            setattr(text, name, 0)
    return config


def _set_layers(config: Any, num_layers: int) -> None:
    """Cut it to `num_layers`, or to as many more as have all types."""
    number = getattr(config, "num_hidden_layers", None)
    if types := getattr(config, "layer_types", None):
        num_layers = max(num_layers, 1 + max(map(types.index, set(types))))
    lists = [name for name, value in vars(config).items() if isinstance(value, list)]
    for name in ("layer_types", *lists, *_LAYERS):
        with suppress(*_LACKING):
            value = getattr(config, name)
            if isinstance(value, list) and len(value) == number:
                setattr(config, name, value[:num_layers])
            elif isinstance(value, int):
                setattr(config, name, min(num_layers, value))
