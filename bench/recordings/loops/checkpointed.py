"""Layers checkpointed in groups, and attention by hand (BraveBeter/assignment2-systems, its `student_scripts/a2k`).

The decoder is the course's of 2026, under autocast, with torch's AdamW; each figure is of a process of its own.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench.recordings.loops.course import Peaks, peaks, tokens
from bench.recordings.loops.decoder import SIZES, Decoder, attention, cross_entropy


def in_groups(length: int, group: int | None) -> Peaks:
    """Run steps of a sample by the medium decoder, `group` layers checkpointed at a time; 3 to warm up, 5 counted."""
    model = Decoder(SIZES["medium"], length, 2026).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    x, y = tokens(1, length), tokens(1, length)

    def forward() -> Tensor:
        hidden = model.embedding(x)
        if group is None:
            for layer in model.layers:
                hidden = layer(hidden)
        else:
            for start in range(0, len(model.layers), group):
                hidden = checkpoint(_together(model.layers[start : start + group]), hidden, use_reentrant=False)
        return model.head(model.norm(hidden))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = cross_entropy(forward(), y)
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    found = []
    for _ in range(5):
        torch.cuda.reset_peak_memory_stats()
        step()
        found.append(peaks())
    return max(each[0] for each in found), max(each[1] for each in found)


def _together(layers: Any) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return run


FLUSHED_BYTES = 256 * 2**20
"""What Triton's benchmark writes to before each call, to empty the card's cache."""


def by_hand(length: int, size: int) -> Peaks:
    """Run attention of one head in bf16 and its gradients, after benchmarks of both and an emptied cache."""
    query, key, value = (
        torch.randn((1, length, size), device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    mask = torch.ones((length, length), device="cuda", dtype=torch.bool).tril_()
    gradient = torch.randn_like(query)
    inputs = query, key, value

    def forward() -> Tensor:
        return attention(query, key, value, mask)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), inputs, gradient)

    _benchmark(forward)
    output = forward()
    _benchmark(partial(torch.autograd.grad, output, inputs, gradient, retain_graph=True))
    del output
    gc.collect()
    _benchmark(both)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    both()
    return peaks()


def _benchmark(call: Callable[[], Any]) -> None:
    call()
    flushed = torch.empty(FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")
    for _ in range(3):
        flushed.zero_()
        call()
