"""Inputs of the decoder of an encoder-decoder: its targets, shifted as the model's own authors shift them.

The engine, the dry run and exported scripts all use `decoder_inputs`; `frugal export` writes its source into them.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def decoder_inputs(model: Any, labels: Any) -> Any:
    """Return decoder inputs of `labels`, both `(samples, positions)`, as the model's own loss makes them.

    mBART and PLBart move a sample's last token to its front, the others put the start token there.
    """
    labels = labels.clone()  # some replace -100 in place
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    shift = sys.modules[type(model).__module__].shift_tokens_right
    return shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)


def complete(config: Any) -> None:
    """Give a configuration the special tokens that decoder inputs need and it lacks: 0 pads, and the first or the
    padding token starts."""
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "decoder_start_token_id", None) is None:
        first = getattr(config, "bos_token_id", None)
        config.decoder_start_token_id = config.pad_token_id if first is None else first


def source() -> str:
    """Return Python that defines `decoder_inputs` and `complete` in an exported script, which imports `sys`."""
    text = "\n\n".join(inspect.getsource(function) for function in (decoder_inputs, complete))
    return text.replace(": Any", "").replace(" -> Any", "").replace(" -> None", "")


def of_class(model_class: type[nn.Module], config: Any) -> Callable[[Tensor], Tensor] | None:
    """Return `decoder_inputs` for a class and configuration, without making a model; None: it has no way of its own.

    A model's way reads its configuration alone: no weights are needed.
    """
    module = sys.modules[model_class.__module__]
    if not (hasattr(model_class, "prepare_decoder_input_ids_from_labels") or hasattr(module, "shift_tokens_right")):
        return None
    model: Any = model_class.__new__(model_class)
    nn.Module.__init__(model)
    model.config = config
    return functools.partial(decoder_inputs, model)
