"""A decoder of torch's own layers with norms after each part, and forwards of it without gradients."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.recordings.loops.course import Peaks, flat, peaks
from bench.recordings.loops.decoder import SIZES, Sizes

VOCABULARY = 50_000


class Attention(nn.MultiheadAttention):
    """torch's attention with weights, with the lifetimes that it has in 2.9: 2.13 frees scaled queries early."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return what the layer attends to, (samples, length, width), and the weights averaged over heads."""
        x = x.transpose(0, 1)
        length, samples, width = x.shape
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        projected = projected.unflatten(-1, (3, width)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        q, k, v = (each.view(length, samples * self.num_heads, -1).transpose(0, 1) for each in projected)
        del projected
        scaled = q * math.sqrt(1 / q.shape[-1])
        weights = torch.bmm(scaled, k.transpose(-2, -1))
        weights = weights.softmax(dim=-1)
        attended = torch.bmm(weights, v)
        attended = attended.transpose(0, 1).reshape(length * samples, width)
        attended = self.out_proj(attended)
        attended = attended.view(length, samples, width)
        weights = weights.view(samples, self.num_heads, length, length)
        weights = weights.mean(dim=1)
        return attended.transpose(0, 1), weights


class Block(nn.Module):
    """A layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes.width, sizes.heads, batch_first=True)
        self.norm1 = nn.LayerNorm(sizes.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(sizes.width, sizes.hidden), nn.GELU(), nn.Linear(sizes.hidden, sizes.width)
        )
        self.norm2 = nn.LayerNorm(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x)
        x = self.norm1(x + attended)
        fed = self.feed_forward(x)
        x = self.norm2(x + fed)
        return x


class Decoder(nn.Module):
    """The decoder, without a mask."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x)
        return logits


def forwards(length: int) -> Peaks:
    """Make the small model and run 25 forwards and losses of 32 samples."""
    inputs = torch.randint(0, VOCABULARY, (32, length)).to("cuda")
    targets = torch.randint(0, VOCABULARY, (32, length)).to("cuda")
    model = Decoder(SIZES["small"]).to("cuda")
    for _ in range(25):
        with torch.no_grad():
            logits = model(inputs)
            loss = flat(logits, targets)
    del loss
    return peaks()


def after_shorter(length: int) -> Peaks:
    """Run the forwards after those of 128 tokens: the recording begins with what is left of a run before."""
    forwards(128)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return forwards(length)


def linear(keeps_gradients: bool) -> Peaks:
    """Run three forwards of 5000 samples by a layer of 10000 x 50000, made on the card."""
    layer = nn.Linear(10_000, 50_000, device="cuda")
    with torch.set_grad_enabled(keeps_gradients):
        for _ in range(3):
            inputs = torch.randn(5_000, 10_000, device="cuda")
            outputs = layer(inputs)
    del outputs
    return peaks()
