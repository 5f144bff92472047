"""The whole of torch-preflight's script on a T4, in its order: what comes before a row decides which segments it finds.

Layers of its own in five sizes, GPT-2, DistilBERT, BERT and ResNet-50, each in two; the cache is emptied around each.
Two steps of AdamW under autocast, of which the second counts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, GPT2Config, GPT2LMHeadModel

from bench.recordings.loops.course import Peaks, peaks

BLOCKS = (
    (4, 512, 8, 2048, 4, 256, 0.0, False),
    (6, 768, 12, 3072, 8, 512, 0.1, False),
    (6, 768, 12, 3072, 4, 1024, 0.0, True),
    (12, 768, 12, 3072, 2, 512, 0.0, False),
    (4, 1024, 16, 4096, 2, 1024, 0.0, True),
)
"""Layers, width, heads, hidden width, samples, tokens, dropout, and whether a kernel attends."""
SMALL: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config()),
    "distilbert-base": lambda: DistilBertModel(DistilBertConfig()),
    "bert-base": lambda: BertModel(BertConfig()),
}
TEXTS, IMAGES = ((4, 128), (8, 256)), ((16, 224), (32, 224))


class Block(nn.Module):
    """A pre-norm layer; biases go with dropout."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        has_bias = dropout > 0
        self.first = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=has_bias) for _ in range(4))
        self.second = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden, bias=has_bias), nn.Linear(hidden, width, bias=has_bias)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, is_fused: bool) -> Tensor:
        samples, length, width = x.shape
        size = width // self.heads
        normed = self.first(x)
        query = self.query(normed).view(samples, length, self.heads, size).transpose(1, 2)
        key = self.key(normed).view(samples, length, self.heads, size).transpose(1, 2)
        value = self.value(normed).view(samples, length, self.heads, size).transpose(1, 2)
        if is_fused:
            attended = F.scaled_dot_product_attention(query, key, value)
        else:
            attended = self.dropout(((query @ key.transpose(-2, -1)) / size**0.5).softmax(-1)) @ value
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(samples, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, the stride in the second; ReLU in place."""

    def __init__(self, inputs: int, width: int, stride: int, *, has_shortcut: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
        ) if has_shortcut else None  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.bn3(out)
        if self.shortcut is not None:
            identity = self.shortcut(x)
        out += identity
        return self.relu(out)


def resnet50() -> nn.Sequential:
    """Return ResNet-50 as torchvision has it: 25,557,032 parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]  # fmt: skip
    inputs = 64
    for width, number in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(number):
            stride = 2 if index == 0 and width > 64 else 1
            layers.append(Bottleneck(inputs, width, stride, has_shortcut=index == 0))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(2048, 1000))


def second_step(model: nn.Module, rate: float, loss_of: Callable[[], tuple[Tensor, Any]]) -> Peaks:
    """Run two steps and return the peaks of the second. `loss_of` returns the loss, and what lives as long."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss, _out = loss_of()
        loss.backward()
        optimizer.step()

    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return peaks()


def of_blocks(
    layers: int, width: int, heads: int, hidden: int, samples: int, length: int, dropout: float, is_fused: bool
) -> Peaks:
    """Run steps of layers without embedding or head."""
    model = nn.ModuleList(Block(width, heads, hidden, dropout) for _ in range(layers)).cuda()
    x = torch.randn(samples, length, width, device="cuda")

    def loss() -> tuple[Tensor, Any]:
        out = x
        for block in model:
            out = block(out, is_fused)
        return out.float().pow(2).mean(), None

    return second_step(model, 1e-4, loss)


def of_text(name: str, samples: int, length: int) -> Peaks:
    """Run steps of a model of transformers, by its head's loss or the mean square of what an encoder returns."""
    model: Any = SMALL[name]().cuda()
    model.train()
    tokens = torch.randint(0, model.config.vocab_size - 1, (samples, length), device="cuda")

    def loss() -> tuple[Tensor, Any]:
        if name == "gpt2":
            out = model(input_ids=tokens, labels=tokens)
            return out.loss, out
        out = model(input_ids=tokens)
        return out.last_hidden_state.float().pow(2).mean(), out

    return second_step(model, 1e-5, loss)


def of_images(samples: int, size: int) -> Peaks:
    """Run steps of ResNet-50."""
    model = resnet50().cuda()
    x = torch.randn(samples, 3, size, size, device="cuda")
    target = torch.randint(0, 1000, (samples,), device="cuda")
    return second_step(model, 1e-4, lambda: (F.cross_entropy(model(x), target), None))


def whole() -> dict[tuple[Any, ...], Peaks]:
    """Run the script and return the peaks of its rows, by model, samples, and tokens or pixels."""
    a = torch.randn(256, 256, device="cuda")
    (a @ a).sum()
    convolution = nn.Conv2d(3, 16, 3, padding=1).cuda()
    convolution(torch.randn(1, 3, 64, 64, device="cuda")).sum().backward()
    del a, convolution
    torch.cuda.empty_cache()
    found: dict[tuple[Any, ...], Peaks] = {}
    for sizes in BLOCKS:
        torch.cuda.empty_cache()
        found["blocks", *sizes] = of_blocks(*sizes)
        torch.cuda.empty_cache()
    for name in SMALL:
        for samples, length in TEXTS:
            torch.cuda.empty_cache()
            found[name, samples, length] = of_text(name, samples, length)
            torch.cuda.empty_cache()
    for samples, size in IMAGES:
        torch.cuda.empty_cache()
        found["resnet50", samples, size] = of_images(samples, size)
        torch.cuda.empty_cache()
    return found
