"""Experts that are modules of their own run in every micro-batch, also where no token chose them.

Switch Transformers and NLLB-MoE run only the experts that some token has chosen. Then the graph of a micro-batch
depends on its data: ranks would reduce other gradients than each other, and ZeRO-3 would wait for parameters that
another rank never fetches. Here the rest run on no token, which adds a gradient of zero. What comes out is the same.

Other mixtures hold all experts of a layer in one parameter, and need nothing.
"""

from typing import Any

import torch
from torch import Tensor, nn

FORWARDS = {
    "SwitchTransformersExperts": lambda experts, hidden, chosen, weights: _run(
        experts, hidden, chosen.permute(2, 1, 0), weights
    ),
    "NllbMoeExperts": lambda experts, hidden, chosen, weights: _run(
        experts, hidden, nn.functional.one_hot(chosen, num_classes=experts.num_experts).permute(2, 1, 0), weights
    ),
}
"""Classes of experts, and what they run instead."""


def always_run(model: nn.Module) -> None:
    """Have the experts of `model` all run, if it has such; its class keeps that for all models of this process."""
    for kind in {type(module) for module in model.modules()}:
        if kind.__name__ in FORWARDS and kind.__module__.startswith("transformers."):
            kind.forward = FORWARDS[kind.__name__]


def _run(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what the experts say of `hidden (tokens, width)`; `weights (tokens, choices)`.

    `chosen (experts, choices, tokens)` is 1 where an expert runs on a token, at most once for each choice and token.
    """
    num_experts, _, num_tokens = chosen.shape
    expert = torch.where(chosen.any(0), chosen.argmax(0), num_experts)  # those that no expert has room for come last
    by_expert = expert.flatten().argsort(stable=True)
    if hidden.is_meta:  # together as many rows, whichever they choose
        sizes = [len(part) for part in torch.tensor_split(torch.arange(len(by_expert), device="cpu"), num_experts)]
    else:
        sizes = chosen.sum((1, 2)).tolist()
    result = torch.zeros_like(hidden)
    for number, places in enumerate(by_expert[: sum(sizes)].split(sizes)):
        choice, token = places // num_tokens, places % num_tokens
        rows = experts[f"expert_{number}"](hidden[token]) * weights[token, choice, None]
        result.index_add_(0, token, _dropped_out(experts, rows).to(hidden.dtype))
    return result


def _dropped_out(experts: Any, rows: Tensor) -> Tensor:
    """NLLB-MoE leaves out whole tokens in training, and scales them otherwise."""
    share = getattr(experts, "moe_token_dropout", 0)
    if share > 0:
        return experts.token_dropout(rows) if experts.training else rows * (1 - share)
    return rows
