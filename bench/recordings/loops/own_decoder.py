"""A decoder and an AdamW that a student wrote for the course in 2025, and what was recorded of them.

Unlike the course's own: the weight stands first in products, the norm goes over a vector norm and a product by name,
rotated halves are written into a tensor of zeros, positions are gathered by samples, and the mask is as wide as the
scores.
"""

import gc
import math
from typing import Any

import torch
from torch import Tensor, nn

from bench.recordings.loops.course import Peaks, lower, peaks
from bench.recordings.loops.decoder import SIZES, Embedding, Sizes


class Linear(nn.Module):
    """A product by name with the weight in front."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("oi,bsi->bso", self.weight, x)


class Norm(nn.Module):
    """RMSNorm over a vector norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(width, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.sqrt(length**2 / self.width + 1e-5)
        divided = x / scale
        result = torch.einsum("d,bsd->bsd", self.weight, divided)
        return result.to(given)


class Rotary(nn.Module):
    """Rotary positions of one layer, with a table of its own."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        places = torch.arange(length, device="cuda")
        order = torch.arange(0, size, 2, device="cuda")
        speed = 1.0 / (10_000 ** (order.float() / size))
        angles = torch.outer(places, speed)
        table = torch.zeros(length, size // 2, 2, device="cuda")
        table[:, :, 0] = torch.cos(angles)
        table[:, :, 1] = torch.sin(angles)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2))
        cos, sin = self.table[positions, :, 0], self.table[positions, :, 1]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        rotated = torch.zeros_like(pairs)
        rotated[..., 0] = cos * pairs[..., 0] - sin * pairs[..., 1]
        rotated[..., 1] = sin * pairs[..., 0] + cos * pairs[..., 1]
        result = rotated.reshape(x.shape)
        return result


def softmax(x: Tensor, dim: int) -> Tensor:
    """Return the softmax, written by hand."""
    most = torch.max(x, dim=dim, keepdim=True)[0]
    powers = torch.exp(x - most)
    total = torch.sum(powers, dim=dim, keepdim=True)
    result = powers / total
    return result


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return the attention's output, with the scores in memory."""
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712  # makes a tensor, as there
    weights = softmax(scores, dim=-1)
    out = torch.einsum("...qk,...kd->...qd", weights, value)
    return out


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query, self.key, self.value, self.out = (Linear(sizes.width, sizes.width) for _ in range(4))
        self.rotary = Rotary(length, sizes.width // sizes.heads)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        wide = self.query(x), self.key(x), self.value(x)
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in wide)
        positions = torch.arange(length, device=x.device).unsqueeze(0).expand(samples, -1)
        query = self.rotary(query, positions)
        key = self.rotary(key, positions)
        mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).to(torch.bool)
        mask = ~mask
        mask = mask.unsqueeze(0).unsqueeze(0).expand(samples, self.heads, -1, -1)
        result = attention(query, key, value, mask)
        result = result.transpose(1, 2).flatten(-2)
        result = self.out(result)
        return result


class FeedForward(nn.Module):
    """A feed-forward gated by SiLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(width, hidden), Linear(hidden, width), Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        up = self.up(x)
        opened = torch.sigmoid(gate) * gate
        product = opened * up
        result = self.down(product)
        return result


class Block(nn.Module):
    """A layer."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        super().__init__()
        self.before_attention = Norm(sizes.width)
        self.attention = Attention(sizes, length)
        self.before_feed_forward = Norm(sizes.width)
        self.feed_forward = FeedForward(sizes.width, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before_attention(x)
        h = self.attention(h)
        x = x + h
        h = self.before_feed_forward(x)
        h = self.feed_forward(h)
        x = x + h
        return x


class Decoder(nn.Module):
    """The decoder; embedding, norms and tables are made on the card, other weights on the host."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        super().__init__()
        self.embedding = Embedding(sizes.vocabulary, sizes.width).to("cuda")
        self.layers = nn.ModuleList(Block(sizes, length) for _ in range(sizes.layers))
        self.norm = Norm(sizes.width)
        self.head = Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        x = self.head(x)
        return x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, written by hand."""
    inputs, targets = logits.reshape(-1, logits.size(-1)), targets.reshape(-1)
    most = torch.max(inputs, dim=-1, keepdim=True).values
    inputs = inputs - most
    powers = torch.exp(inputs)
    total = powers.sum(dim=-1)
    rows = torch.arange(inputs.shape[0])
    wanted = inputs[rows, targets]
    losses = torch.log(total) - wanted
    return losses.mean()


class AdamW(torch.optim.Optimizer):
    """AdamW, parameter by parameter and mostly in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.data
            state = self.state[parameter]
            if not state:
                state["first"], state["second"] = torch.zeros_like(parameter.data), torch.zeros_like(parameter.data)
            first, second = state["first"], state["second"]
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
            divisor = (second.sqrt() / math.sqrt(0.05)).add_(1e-8)
            parameter.data.addcdiv_(first, divisor, value=-1e-3)
            parameter.data.add_(parameter.data, alpha=-1e-6)


def in_one_process(wanted: tuple[str, int], is_autocast: bool = False) -> Peaks:
    """Run the forwards of three lengths and then the steps, one after another, and return the peaks of one of them."""
    for mode in ("forward", "step"):
        for length in (128, 256, 512):
            found = _first(length, mode, is_autocast)
            gc.collect()
            if (mode, length) == wanted:
                return found
    raise AssertionError(wanted)


def _first(length: int, mode: str, is_autocast: bool) -> Peaks:
    """Run the first forward or step of 4 samples, right after the model was made."""
    model = Decoder(SIZES["2.7b"], length)
    model.to("cuda")
    optimizer = AdamW(model.parameters())
    batch = torch.randint(0, 10_000, (4, length))
    batch = batch.to("cuda")
    with lower(is_autocast):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        if mode == "forward":
            logits = model(batch)
        else:
            optimizer.zero_grad()
            logits = model(batch)
            loss = cross_entropy(logits, batch)
            loss.backward()
            optimizer.step()
        result = peaks()
    return result
