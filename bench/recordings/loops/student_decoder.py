"""Steps of a decoder and an AdamW of a student's own (notHanmin/assignment2-systems at 33be88e, its `cs336_systems`).

RMSNorm, rotary positions and attention by hand; cosines, positions and masks are made anew in each layer, and turned
halves are written into an empty tensor.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from bench.recordings.loops.course import Peaks, peaks, tokens
from bench.recordings.loops.decoder import SIZES, Embedding, Sizes, silu, softmax


def weight(outputs: int, inputs: int) -> nn.Parameter:
    """Return a weight, made on the host."""
    return nn.Parameter(torch.empty(outputs, inputs))


def product(matrix: Tensor, x: Tensor) -> Tensor:
    """Return a product by name."""
    return torch.einsum("oi,...i->...o", matrix, x)


class Norm(nn.Module):
    """RMSNorm in the type of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean_square = (x**2).mean(-1, keepdim=True)
        root = torch.sqrt(mean_square + 1e-5)
        return (x / root) * self.weight


class Rotary:
    """Cosines and sines of all positions, made on the card."""

    def __init__(self, size: int, length: int) -> None:
        multiples = torch.arange(0, size, 2, device="cuda", dtype=torch.float32)
        exponents = multiples / size
        frequencies = 1.0 / (10_000**exponents)
        positions = torch.arange(length, device="cuda", dtype=torch.float32)
        angles = torch.einsum("p,f->pf", positions, frequencies)
        self.cos, self.sin = torch.cos(angles), torch.sin(angles)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return turned vectors of `(samples, heads, tokens, size)`."""
        cos = self.cos[positions]
        sin = self.sin[positions]
        even = x[..., 0::2]
        odd = x[..., 1::2]
        cos_of_heads, sin_of_heads = cos.unsqueeze(1), sin.unsqueeze(1)
        first = even * cos_of_heads - odd * sin_of_heads
        second = even * sin_of_heads + odd * cos_of_heads
        out = torch.empty_like(x)
        out[..., 0::2] = first
        out[..., 1::2] = second
        return out


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return the attention's output, with the scores in memory."""
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    masked = torch.where(mask, scores, -torch.inf)
    weights = softmax(masked / math.sqrt(query.shape[-1]), -1)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query, self.key, self.value, self.out = (weight(sizes.width, sizes.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query = product(self.query, x)
        key = product(self.key, x)
        value = product(self.value, x)
        queries, keys, values = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (query, key, value))
        length = x.shape[-2]
        positions = torch.arange(length, device=x.device)
        of_samples = positions.repeat(x.size(0), 1)
        rotary = Rotary(x.size(-1) // self.heads, length)
        turned_queries = rotary.turned(queries, of_samples)
        turned_keys = rotary.turned(keys, of_samples)
        mask = torch.tril(torch.ones((length, length), device=x.device, dtype=torch.bool))
        attended = attention(turned_queries, turned_keys, values, mask)
        combined = attended.transpose(1, 2).flatten(-2)
        return product(self.out, combined)


class FeedForward(nn.Module):
    """A feed-forward gated by SiLU, whose parts live until its end."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = weight(hidden, width), weight(width, hidden), weight(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = product(self.gate, x)
        up = product(self.up, x)
        activated = silu(gate)
        gated = activated * up
        return product(self.down, gated)


class Layer(nn.Module):
    """A pre-norm layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.first, self.attention = Norm(sizes.width), Attention(sizes)
        self.second, self.feed_forward = Norm(sizes.width), FeedForward(sizes.width, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        x = x + self.feed_forward(self.second(x))
        return x  # the name frees what it held


class Decoder(nn.Module):
    """The decoder."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = Norm(sizes.width), weight(sizes.vocabulary, sizes.width)

    def forward(self, given: Tensor) -> Tensor:
        x = self.embedding(given)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return product(self.head, x)


class AdamW(torch.optim.Optimizer):
    """AdamW by hand, in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            first, second = state["first"], state["second"]
            gradient = parameter.grad.data
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            root = second.sqrt().add_(1e-8)
            parameter.data.addcdiv_(first, root, value=-1e-3)
            parameter.data.add_(parameter.data, alpha=-1e-5)


def last_step(size: str, length: int) -> Peaks:
    """Run four rounds of a benchmark, each of some warm-up steps without an update and three with one, and return the
    last step's peaks."""
    model = Decoder(SIZES[size])
    optimizer = AdamW(model.parameters())
    for warm_up in (0, 1, 2, 5):
        model.to("cuda")
        x = tokens(4, length)
        for number in range(warm_up + 3):
            torch.cuda.reset_peak_memory_stats()
            logits = model(x)
            loss = logits.sum()
            optimizer.zero_grad()
            loss.backward()
            if number >= warm_up:
                optimizer.step()
        del logits, loss
    return peaks()
