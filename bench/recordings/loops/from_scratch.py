"""An epoch of a GPT written from scratch (rasbt/LLMs-from-scratch at 908dd2f7, its `ch05/10_llm-training-speed`).

The modifications of its README come one after the other: `stage` counts them. Evaluations of two batches come in
between, and a text of 50 tokens at the end.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.recordings.loops.course import Peaks

WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY, SAMPLES, DROPOUT = 768, 12, 12, 1024, 50_257, 8, 0.1
MASK_ON_THE_FLY, FUSED, BF16, OF_TORCH, KERNEL = 1, 3, 5, 6, 7
STEPS, BETWEEN_EVALUATIONS = 52, 15


class Attention(nn.Module):
    """Causal attention by hand, with its mask as a buffer or made anew."""

    def __init__(self, is_mask_kept: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.is_mask_kept = is_mask_kept
        if is_mask_kept:
            self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        keys = self.key(x)
        queries = self.query(x)
        values = self.value(x)
        keys = keys.view(samples, length, HEADS, -1)
        values = values.view(samples, length, HEADS, -1)
        queries = queries.view(samples, length, HEADS, -1)
        keys = keys.transpose(1, 2)
        queries = queries.transpose(1, 2)
        values = values.transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        if self.is_mask_kept:
            mask = self.mask.bool()[:length, :length]
        else:
            mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ values).transpose(1, 2)
        context = context.reshape(samples, length, width)
        return self.out(context)


class KernelAttention(nn.Module):
    """Causal attention by torch's kernel, with one product for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        both = self.all(x)
        both = both.view(samples, length, 3, HEADS, -1)
        both = both.permute(2, 0, 3, 1, 4)
        queries, keys, values = both
        dropout = DROPOUT if self.training else 0.0
        context = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        context = context.transpose(1, 2).contiguous().view(samples, length, width)
        return self.out(context)


class Norm(nn.Module):
    """LayerNorm by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class Gelu(nn.Module):
    """GELU by its approximation, by hand."""

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    """A pre-norm layer."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.attention = KernelAttention() if stage >= KERNEL else Attention(stage < MASK_ON_THE_FLY)
        gelu = nn.GELU(approximate="tanh") if stage >= OF_TORCH else Gelu()
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.first, self.second = norm(stage), norm(stage)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.first(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.second(x)
        x = self.feed_forward(x)
        x = self.dropout(x)
        return x + shortcut


def norm(stage: int) -> nn.Module:
    """Return the norm of a stage."""
    return nn.LayerNorm(WIDTH) if stage >= OF_TORCH else Norm()


class Gpt(nn.Module):
    """GPT-2's smallest size, head and embedding not tied."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.layers = nn.Sequential(*(Block(stage) for _ in range(LAYERS)))
        self.norm, self.head = norm(stage), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        positions = self.positions(torch.arange(tokens.size(1), device=tokens.device))
        x = embedded + positions
        x = self.dropout(x)
        x = self.layers(x)
        x = self.norm(x)
        return self.head(x)


def epoch(stage: int) -> Peaks:
    """Train steps with evaluations, write a text, and return the bytes in blocks and in segments at the end."""
    model = Gpt(stage)
    model.to("cuda")
    if stage >= BF16:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=stage >= FUSED or None)

    def loss_of_batch(tokens: Tensor, targets: Tensor) -> Tensor:
        tokens, targets = tokens.to("cuda"), targets.to("cuda")
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def batch() -> Any:
        return torch.zeros(SAMPLES, LENGTH, dtype=torch.int64), torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)

    model.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of_batch(*batch())
        loss.backward()
        optimizer.step()
        if step % BETWEEN_EVALUATIONS == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    of_evaluation = loss_of_batch(*batch())
                    del of_evaluation
            model.train()
    _write(model)
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _write(model: nn.Module) -> None:
    model.eval()
    tokens = torch.zeros(1, 4, dtype=torch.int64).to("cuda")
    for _ in range(50):
        context = tokens[:, -LENGTH:]
        with torch.no_grad():
            logits = model(context)
        logits = logits[:, -1, :]
        following = torch.argmax(logits, dim=-1, keepdim=True)
        tokens = torch.cat((tokens, following), dim=1)
