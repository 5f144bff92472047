"""A model's own loss, where it is more than the cross entropy of its logits.

Mixtures of experts may add losses of their routers (`output_router_logits` in their configuration), ProphetNet predicts
several tokens at each position. The model's own loss is the mean over the targets of the micro-batch, plus what it
adds; times the targets it is a sum that adds up over micro-batches. What a router adds is no mean over samples but a
product of means over the tokens of the micro-batch (https://arxiv.org/abs/2101.03961, section 2.2): each micro-batch's
is weighted by its part of the targets, as in transformers' Trainer, so it depends on how the global batch is split.
"""

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from frugal.errors import refuse
from frugal.models import tiled_loss
from frugal.models.losses import predictions
from frugal.planning.report import ADDED_LOSS
from frugal.units import IGNORED

_ROUTER_LOSS = "load_balancing_loss_func"
"""The name of the routers' loss in transformers' modules."""

ROUTERS = f"{ADDED_LOSS}: its routers add (output_router_logits) what is computed of each micro-batch, by its targets"
Z_LOSS = (
    f"{ADDED_LOSS}: a z-loss (z_loss_coefficient) is computed of each micro-batch with its padding, weighted by its"
    " targets"
)
"""Notes of a plan on losses that are no sum over samples."""


def depends_on_split(config: Any) -> str | None:
    """Describe what a model of this configuration adds to the loss that is no sum over targets; None: nothing."""
    parts = (config, config.get_text_config())
    if any(getattr(part, "output_router_logits", None) for part in parts):
        return ROUTERS
    return Z_LOSS if any(getattr(part, "z_loss_coefficient", None) for part in parts) else None


def loss_sum(
    model: nn.Module, inputs: dict[str, Tensor], *, labels: Tensor, targets: Tensor, real: Tensor | None = None
) -> Tensor:
    """Return the model's own mean loss, times the number of `targets`: fp32, shape `()`; 0 where there is none.

    `labels` are what the model takes by that name, `targets` what each position is to predict, `IGNORED` for none.
    `real` is 1 where a position is no padding, for routers of models that get no attention mask. All of them are of
    shape `(samples, positions)`.

    Raises:
        RequestError: the loss is to be tiled, and the model has no place for that.
    """
    count = (targets != IGNORED).sum()
    labels = labels.masked_fill(count == 0, 0)  # a mean over no target would be NaN
    inner: Any = getattr(model, "module", model)
    with _routers_see(real, inner):
        if tiled_loss.is_applied(model):
            loss = _around_tiles(model, inner, inputs | {"labels": labels}, targets, count)
        else:
            outputs = model(**inputs, labels=labels)
            predictions.show(outputs.logits, targets)
            loss = outputs.loss
    return loss.float() * count


def _around_tiles(model: nn.Module, inner: Any, inputs: dict[str, Tensor], targets: Tensor, count: Tensor) -> Tensor:
    """Return the model's own mean loss, with the cross entropy in it tiled."""
    refuse(
        (
            "self.loss_function(" not in inspect.getsource(type(inner).forward),
            f"{type(inner).__name__} cannot take the tiled loss",
            "it computes its own loss inside its forward, from whole logits",
            "plan with the plain loss",
        )
    )
    original = inner.loss_function
    tiled: Any = tiled_loss.applied_to(model)
    inner.loss_function = lambda *_, **__: tiled.loss / count.clamp_min(1)
    try:
        return tiled_loss.outputs_with_sum(model, inputs, targets).loss
    finally:
        inner.loss_function = original


def _routers_see(real: Tensor | None, inner: nn.Module) -> AbstractContextManager[Any]:
    """Have the loss of the routers leave padding out."""
    module = sys.modules[type(inner).__module__]
    original: Any = getattr(module, _ROUTER_LOSS, None)
    if real is None or original is None:
        return nullcontext()

    def over_real_tokens(logits: Any, num_experts: Any = None, top_k: Any = 2, mask: Any = None) -> Any:
        return original(logits, num_experts, top_k, real if mask is None else mask)

    return patch.object(module, _ROUTER_LOSS, over_real_tokens)
