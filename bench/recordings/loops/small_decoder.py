"""A decoder of 4 layers that a student wrote for the course, from its creation on.

Made on the card, but for tables of rotary positions and the mask, which come from the host in every forward; the
softmax has its powers twice, and states of Adam are made with the optimizer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bench.recordings.loops.course import Peaks, lower, peaks

WIDTH, HIDDEN, HEADS, LAYERS, VOCABULARY, LONGEST = 512, 1344, 16, 4, 10_000, 256


class Weight(nn.Module):
    """A weight made on the card."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device="cuda"))


class Linear(Weight):
    """A product by name."""

    def forward(self, x: Tensor) -> Tensor:
        result = torch.einsum("...i,oi->...o", x, self.weight)
        return result


class Embedding(Weight):
    """Rows of a table."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Norm(nn.Module):
    """RMSNorm, divided and then weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        scale = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        result = x / scale * self.weight
        return result.to(given)


class Rotary(nn.Module):
    """Rotary positions with tables on the host."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(LONGEST), 10_000.0 ** -(torch.arange(0, size, 2) / size))
        self.register_buffer("sin", torch.sin(angles), persistent=False)
        self.register_buffer("cos", torch.cos(angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[-2])
        sin = self.sin[positions].to("cuda")
        cos = self.cos[positions].to("cuda")
        sin, cos = sin[..., None], cos[..., None]
        x = x.unflatten(-1, (-1, 2))
        first = cos * x[..., :1] - sin * x[..., 1:]
        second = sin * x[..., :1] + cos * x[..., 1:]
        rotated = torch.cat([first, second], dim=-1)
        rotated = rotated.flatten(-2)
        return rotated


def softmax(x: Tensor) -> Tensor:
    """Return the softmax, written by hand."""
    most, _ = torch.max(x, dim=-1, keepdim=True)
    return torch.exp(x - most) / torch.sum(torch.exp(x - most), dim=-1, keepdim=True)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return the attention's output, with the scores in memory."""
    mask = mask.to(query.device)
    size = query.shape[-1]
    product = torch.einsum("...qd,...kd->...qk", query, key)
    scores = product / torch.sqrt(torch.tensor(size, device=product.device))
    masked = scores.masked_fill_(~mask.bool(), -float("inf"))
    weights = softmax(masked)
    result = torch.einsum("...qk,...kd->...qd", weights, value)
    return result


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.query, self.key, self.value, self.out = (Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        q, k, v = self.query(x), self.key(x), self.value(x)
        q = q.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = k.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        v = v.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q = self.rotary(q)
        k = self.rotary(k)
        mask = torch.tril(torch.ones(length, length))
        o = attention(q, k, v, mask)
        o = o.transpose(1, 2).flatten(-2)
        o = self.out(o)
        return o


class FeedForward(nn.Module):
    """A feed-forward gated by SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(HIDDEN, WIDTH), Linear(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a = self.gate(x)
        b = a * torch.sigmoid(a)
        c = self.up(x)
        product = b * c
        return self.down(product)


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = Norm(), Norm()
        self.attention = Attention()
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before_attention(x)
        attended = self.attention(normed)
        between = attended + x
        normed_between = self.before_feed_forward(between)
        fed = self.feed_forward(normed_between)
        after = fed + between
        return after


class Decoder(nn.Module):
    """The decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = Linear(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        output = self.head(x)
        return output


def loss_of_last(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy over one-hot targets."""
    most, _ = torch.max(logits, dim=-1, keepdim=True)
    logs = logits - most - torch.log(torch.sum(torch.exp(logits - most), dim=-1, keepdim=True))
    wanted = torch.zeros_like(logs)
    wanted.scatter_(-1, targets.unsqueeze(-1), 1)
    loss = -torch.sum(wanted * logs) / logits.shape[0]
    return loss


class Adam(torch.optim.Optimizer):
    """Adam, parameter by parameter, with new states and new weights in every step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"m": torch.zeros_like(parameter.data), "v": torch.zeros_like(parameter.data)}

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            gradient = parameter.grad.data
            m = state["m"]
            new_m = 0.9 * m + (1 - 0.9) * gradient
            state["m"] = new_m
            v = state["v"]
            new_v = 0.999 * v + (1 - 0.999) * gradient**2
            state["v"] = new_v
            parameter.data = parameter.data - 1e-3 * (new_m / (torch.sqrt(new_v) + 1e-8))
            parameter.data = parameter.data - 1e-3 * 0.0 * parameter.data


def from_creation(length: int, mode: str, is_autocast: bool = False) -> Peaks:
    """Make the model, and run three forwards or steps of 10 samples."""
    model = Decoder()
    optimizer = Adam(model.parameters()) if mode == "step" else None
    data = torch.randint(0, VOCABULARY, (10, length)).to("cuda")
    labels = torch.randint(0, VOCABULARY, (10,)).to("cuda") if optimizer else None
    whole = lower(is_autocast)
    if optimizer is None:
        for _ in range(3):
            with whole:
                model(data)
        return peaks()
    with whole:
        for _ in range(3):
            optimizer.zero_grad()
            logits = model(data)
            predicted = torch.ops.aten.slice.Tensor(logits)[:, -1]  # a slice of all is one of its own under torch 2.6
            loss = loss_of_last(predicted, labels)
            loss.backward()
            optimizer.step()
    return peaks()
