"""Loops of students of the course: forwards and steps of its decoder, a few to warm up and then those recorded.

`torch.cuda.reset_peak_memory_stats` stands where each recording begins. Names of variables decide how long tensors
live, so a result that a script keeps until the next step is kept here, too.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.recordings.loops.decoder import SIZES, AdamW, Decoder, cross_entropy

Peaks = tuple[int, int]
"""The most bytes in blocks and in segments."""


def peaks() -> Peaks:
    """Return what torch counted since the recording began."""
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def lower(is_autocast: bool) -> Any:
    """Return the context of a script's precision."""
    return torch.autocast("cuda", torch.bfloat16) if is_autocast else nullcontext()


def tokens(samples: int, length: int, vocabulary: int = 10_000) -> Tensor:
    """Return random tokens, made on the card."""
    return torch.randint(0, vocabulary, (samples, length), device="cuda")


def flat(logits: Tensor, targets: Tensor) -> Tensor:
    """Return torch's cross-entropy of all tokens."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def emptied(length: int, mode: str, is_autocast: bool = False) -> Peaks:
    """Run forwards and losses of one sample by the large decoder; warm up, empty the cache, and record one.

    `mode`: without gradients, or with what backward would need, and no backward.
    """
    model = Decoder(SIZES["large"], length, 2025).to("cuda")
    x, y = (torch.randint(0, 10_000, (1, length)).to("cuda") for _ in range(2))
    precision = lower(is_autocast)
    for step in range(6):
        if step == 5:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with precision:
            if mode == "forward":
                with torch.no_grad():
                    logits = model(x)
                    loss = flat(logits, y)
            else:
                model.zero_grad()
                logits = model(x)
                loss = flat(logits, y)
    del loss
    return peaks()


def xl_of_2026(length: int, mode: str, is_autocast: bool = False, is_emptied: bool = False) -> Peaks:
    """Run steps of 4 samples by the largest decoder; five to warm up and one recorded."""
    model = Decoder(SIZES["2.7b"], length, 2026).to("cuda")
    x, y = tokens(4, length), tokens(4, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad() if mode == "forward" else nullcontext(), lower(is_autocast):
            logits = model(x)
        if mode == "forward":
            return
        loss = F.cross_entropy(logits.float().reshape(-1, 10_000), y.reshape(-1))
        loss.backward()
        optimizer.step()

    for _ in range(5):
        step()
    optimizer.zero_grad(set_to_none=True)
    if is_emptied:
        torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    return peaks()


def largest_of_2025(length: int, mode: str, is_autocast: bool = False) -> Peaks:
    """Run steps of 4 samples by the largest decoder; two to warm up and one recorded."""
    model = Decoder(SIZES["2.7b"], length, 2025).to("cuda")
    for layer in model.layers:
        layer.feed_forward.names_all = True
    x, y = tokens(4, length), tokens(4, length)
    precision = lower(is_autocast)
    optimizer = torch.optim.AdamW(model.parameters()) if mode == "step" else None
    for number in range(3):
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
        model.zero_grad(set_to_none=True)
        if optimizer is None:
            with precision, torch.no_grad():
                _ = model(x)
            continue
        with precision:
            logits = model(x)
            loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), y.reshape(-1))
        loss.backward()
        optimizer.step()
    return peaks()


def profiled_forward(length: int, keeps_gradients: bool, is_autocast: bool = False) -> Peaks:
    """Run forwards of 4 samples by the largest decoder; five to warm up and one recorded."""
    model = Decoder(SIZES["2.7b"], length, 2026).to("cuda")
    x = torch.randint(0, 10_000, (4, length)).to("cuda")
    y = torch.randint(0, 10_000, (4, length)).to("cuda")

    def forward() -> None:
        with nullcontext() if keeps_gradients else torch.no_grad(), lower(is_autocast):
            _ = model(x)

    for _ in range(5):
        forward()
    torch.cuda.reset_peak_memory_stats()
    forward()
    del y
    return peaks()


def inference(size: str, length: int, is_autocast: bool = False) -> Peaks:
    """Run forwards of 4 samples in inference mode; five to warm up and one recorded."""
    model = Decoder(SIZES[size], length, 2026).to("cuda")
    model.eval()
    optimizer = AdamW(model.parameters(), 2026)
    warm = torch.randint(0, 10_000, (5, 4, length), device="cuda")
    x = torch.randint(0, 10_000, (1, 4, length), device="cuda")
    with torch.inference_mode():
        for batch in range(5):
            with lower(is_autocast):
                model(warm[batch])
        torch.cuda.reset_peak_memory_stats()
        with lower(is_autocast):
            model(x[0])
    del optimizer
    return peaks()


def training(size: str, length: int, is_autocast: bool = False) -> Peaks:
    """Run steps of 4 samples with a loss and an AdamW by hand; five to warm up and one recorded."""
    model = Decoder(SIZES[size], length, 2026).to("cuda")
    optimizer = AdamW(model.parameters(), 2026)
    warm = torch.randint(0, 10_000, (5, 4, length), device="cuda")
    x = torch.randint(0, 10_000, (1, 4, length), device="cuda")
    warm_targets = torch.randint(0, 10_000, (5, 4, length), device="cuda")
    targets = torch.randint(0, 10_000, (1, 4, length), device="cuda")
    for batch in range(5):
        with lower(is_autocast):
            output = model(warm[batch])
            loss = cross_entropy(output, warm_targets[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del output, loss
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    with lower(is_autocast):
        output = model(x[0])
        loss = cross_entropy(output, targets[0])
    loss.backward()
    optimizer.step()
    return peaks()


def kept_forwards(length: int) -> Peaks:
    """Run forwards of 4 samples by the small decoder, each beside the graph before; 5 to warm up and 10 recorded."""
    model = Decoder(SIZES["small"], length, 2025).to("cuda")
    x, y = (torch.randint(0, 10_000, (4, length)).to("cuda") for _ in range(2))
    for number in range(15):
        if number == 5:
            torch.cuda.reset_peak_memory_stats()
        logits = model(x)
    del logits, y
    return peaks()


def kept_gradients(samples: int, length: int) -> Peaks:
    """Run forwards and backwards of the small decoder, gradients never cleared; five to warm up and one recorded."""
    model = Decoder(SIZES["small"], length, 2026).to("cuda")
    x, y = (torch.randint(0, 10_000, (samples, length)).to("cuda") for _ in range(2))
    for number in range(6):
        if number == 5:
            torch.cuda.reset_peak_memory_stats()
        logits = model(x)
        loss = cross_entropy(logits, y)
        loss.backward()
    return peaks()
