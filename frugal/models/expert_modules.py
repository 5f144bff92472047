"""Modules that run for some samples only run in every micro-batch: experts that are modules, and LED's padding.

Switch Transformers and NLLB-MoE run only the experts that some token has chosen. Then the graph of a micro-batch
depends on its data: ranks would reduce other gradients than each other, and ZeRO-3 would wait for parameters that
another rank never fetches. Here the rest run on no token, which adds a gradient of zero. What comes out is the same.

Other mixtures hold all experts of a layer in one parameter, and need nothing.

LED fills a micro-batch up to a multiple of its window, and embeds that padding in a second call of its embedding,
unless there is nothing to fill up. Here it embeds no token then.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "SwitchTransformersExperts": (
        "forward",
        lambda experts, hidden, chosen, weights: _run(experts, hidden, chosen.permute(2, 1, 0), weights),
    ),
    "NllbMoeExperts": (
        "forward",
        lambda experts, hidden, chosen, weights: _run(
            experts, hidden, nn.functional.one_hot(chosen, num_classes=experts.num_experts).permute(2, 1, 0), weights
        ),
    ),
    "LEDEncoder": (
        "_pad_to_window_size",
        lambda encoder, input_ids, attention_mask, inputs_embeds, pad_token_id: _fill_up(
            encoder, input_ids, attention_mask, inputs_embeds, pad_token_id
        ),
    ),
}
"""Classes, and what they run instead of a method."""


def always_run(model: nn.Module) -> None:
    """Have such modules of `model` always run; their classes keep that for all models of this process."""
    for kind in {type(module) for module in model.modules()}:
        if kind.__name__ in METHODS and kind.__module__.startswith("transformers."):
            setattr(kind, *METHODS[kind.__name__])


def _fill_up(
    encoder: Any, input_ids: Tensor | None, attention_mask: Tensor, inputs_embeds: Tensor, pad_token_id: int
) -> tuple[int, Tensor | None, Tensor, Tensor]:
    """Return how many positions are added to a multiple of the window, and tokens, mask and embeddings with them."""
    windows = encoder.config.attention_window
    samples, length = inputs_embeds.shape[:2]
    added = -length % (windows if isinstance(windows, int) else max(windows))
    padding = inputs_embeds.new_full((samples, added), pad_token_id, dtype=torch.long)
    if input_ids is not None:
        input_ids = torch.cat([input_ids, padding], dim=1)
    filled = torch.cat([inputs_embeds, encoder.embed_tokens(padding)], dim=1)
    return added, input_ids, nn.functional.pad(attention_mask, (0, added), value=False), filled


def _run(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the experts' outputs for `hidden (tokens, width)`; `weights (tokens, choices)`.

    `chosen (experts, choices, tokens)` is 1 where an expert runs on a token, at most once for each choice and token.
    """
    num_experts, _, num_tokens = chosen.shape
    expert = torch.where(chosen.any(0), chosen.argmax(0), num_experts)  # those that no expert has room for come last
    by_expert = expert.flatten().argsort(stable=True)
    sizes = (
        list(map(len, torch.tensor_split(torch.arange(len(by_expert), device="cpu"), num_experts)))
        if hidden.is_meta  # together as many rows, whichever they choose
        else chosen.sum((1, 2)).tolist()
    )
    result, dropped = torch.zeros_like(hidden), getattr(experts, "moe_token_dropout", 0)
    for number, places in enumerate(by_expert[: sum(sizes)].split(sizes)):
        choice, token = places // num_tokens, places % num_tokens
        rows = experts[f"expert_{number}"](hidden[token]) * weights[token, choice, None]
        if dropped > 0:  # NLLB-MoE drops whole tokens in training, and scales them otherwise
            rows = experts.token_dropout(rows) if experts.training else rows * (1 - dropped)
        result.index_add_(0, token, rows.to(hidden.dtype))
    return result
