"""A decoder of torch's own layers with norms after each part, and forwards of it without gradients."""

import torch
from torch import Tensor, nn

from bench.recordings.loops.course import Peaks, flat, peaks
from bench.recordings.loops.decoder import SIZES, Sizes

VOCABULARY = 50_000


class Block(nn.Module):
    """A layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(sizes.width, sizes.heads, batch_first=True)
        self.norm1 = nn.LayerNorm(sizes.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(sizes.width, sizes.hidden), nn.GELU(), nn.Linear(sizes.hidden, sizes.width)
        )
        self.norm2 = nn.LayerNorm(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x)
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
