"""The decoder of Stanford's course CS336, as its handouts of 2025 and 2026 describe it, and what trains it.

A pre-norm decoder: RMSNorm in fp32, rotary positions on halves of a head, attention by hand with a softmax by hand, a
gated feed-forward, no biases, embedding and head not tied. In 2025 the cosines and sines were gathered by positions, in
2026 the first of them are taken, and a head's halves are unbound.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder."""

    width: int
    hidden: int
    layers: int
    heads: int
    vocabulary: int = 10_000


SIZES = {
    "small": Sizes(768, 3072, 12, 12),
    "medium": Sizes(1024, 4096, 24, 16),
    "large": Sizes(1280, 5120, 36, 20),
    "2.7b": Sizes(2560, 10240, 32, 32),  # called xl in 2026
}


class Linear(nn.Module):
    """A product with a weight of `(outputs, inputs)`, as a sum of products by name."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """Rows of a table."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class Norm(nn.Module):
    """RMSNorm, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(given)


class Rotary(nn.Module):
    """Rotary positions; `year` is that of the handout."""

    def __init__(self, length: int, size: int, year: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(length), 10_000.0 ** -(torch.arange(0, size, 2) / size))
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.year = year

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.table[:, positions] if positions is not None else self.table[:, : x.size(-2)].unbind(0)
        first = cos * even - sin * odd
        second = sin * even + cos * odd
        return torch.cat((first, second), dim=-1)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return the softmax, written by hand."""
    shifted = x - torch.max(x, dim=dim, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=dim, keepdim=True)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return the attention's output, with the scores in memory."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores, dim=-1)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, sizes: Sizes, rotary: Rotary) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query, self.key, self.value, self.out = (Linear(sizes.width, sizes.width) for _ in range(4))
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        length, positions = x.size(1), None  # named in this order, tensors are freed in this order
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (query, key, value))
        if self.rotary.year == 2025:
            positions = torch.arange(length, device=x.device)[None, None]
        query = self.rotary(query, positions)
        key = self.rotary(key, positions)
        order = torch.arange(length, device=x.device)
        mask = (order[:, None] >= order)[None, None]
        out = attention(query, key, value, mask)
        out = out.transpose(1, 2).flatten(-2).contiguous()
        return self.out(out)


class FeedForward(nn.Module):
    """A feed-forward gated by SiLU; with `names_all` its parts live until its end."""

    names_all = False

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(width, hidden), Linear(hidden, width), Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.names_all:  # a student's ranges for a profiler
            gate = self.gate(x)
            up = self.up(x)
            gated = silu(gate) * up
            return self.down(gated)
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x: Tensor) -> Tensor:
    """Return SiLU, written by hand."""
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """A layer."""

    def __init__(self, sizes: Sizes, rotary: Rotary) -> None:
        super().__init__()
        self.attention = Attention(sizes, rotary)
        self.feed_forward = FeedForward(sizes.width, sizes.hidden)
        self.before_attention, self.before_feed_forward = Norm(sizes.width), Norm(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.before_attention(x))
        between = x + attended
        fed = self.feed_forward(self.before_feed_forward(between))
        return between + fed


class Decoder(nn.Module):
    """The decoder; made on the host."""

    def __init__(self, sizes: Sizes, length: int, year: int) -> None:
        super().__init__()
        self.year = year
        self.embedding = Embedding(sizes.vocabulary, sizes.width)
        rotary = Rotary(length, sizes.width // sizes.heads, year)
        self.layers = nn.ModuleList(Block(sizes, rotary) for _ in range(sizes.layers))
        self.norm = Norm(sizes.width)
        self.head = Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        x = embedded
        if self.year == 2025:
            del embedded  # in 2026 it has a name of its own
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, written by hand."""
    negative = -_log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def _log_softmax(x: Tensor) -> Tensor:
    most = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - most
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class AdamW(torch.optim.Optimizer):
    """AdamW, written by hand, parameter by parameter; `year`: whether weights decay after the update or before."""

    def __init__(self, params: Iterable[nn.Parameter], year: int) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.year = year

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.data
            state = self.state[parameter]
            first = state.get("first", torch.zeros_like(gradient))
            second = state.get("second", torch.zeros_like(gradient))
            if self.year == 2026:
                parameter.data -= 1e-5 * parameter.data
            new_first = 0.9 * first + 0.1 * gradient
            new_second = 0.999 * second + 0.001 * torch.square(gradient)
            if self.year == 2025:
                parameter.data -= 1e-3 * new_first / (torch.sqrt(new_second) + 1e-8)
                parameter.data -= 1e-5 * parameter.data
            else:
                parameter.data -= 1e-3 * new_first / (torch.sqrt(new_second) + 1e-8)
            state["first"], state["second"] = new_first, new_second
