"""Probe this machine's speed on every rank: FLOP/s, bytes/s of memory and links, latencies.

As a program: `python -m frugal.engine.measure.hardware_probe --kind cpu --out FILE`.

All ranks measure at once, since they share memory, links and, on a CPU, the cores. A figure is the best of a few
tries: other load only ever makes it worse.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F

from frugal import torch_internals
from frugal.config.hardware.calibration import MOST_CONTEXT_BYTES, Probe
from frugal.config.request import Precision
from frugal.config.schema import parse
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.distributed import env, first_failure, process_group
from frugal.distributed.exchange import gather
from frugal.errors import refuse
from frugal.memory_watch import cpu_pace, outside_bytes, traffic
from frugal.units import MIB, format_bytes

NUM_TRIES = 4
NUM_OPERATORS = 200
PRECISIONS: dict[str, tuple[Precision, ...]] = {"cuda": ("bf16", "fp16", "fp32"), "cpu": ("bf16", "fp32")}
SENT_BYTES = {"cuda": 256 * MIB, "cpu": 16 * MIB}
TINY_ELEMENTS, TINY_COLLECTIVES = 16, 20
ROWS, WIDTH = {"cuda": 8192, "cpu": 512}, {"cuda": 4096, "cpu": 512}
PRODUCT_WIDTH = {"cuda": 4096, "cpu": 256}
HOST_ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 22}
HOST_COPY_BYTES = 256 * MIB


def probe(device: torch.device) -> Probe:
    """Measure this rank's figures. Collective.

    Raises:
        RequestError: another process uses the GPU.
    """
    kind = device.type
    has_links = dist.get_world_size() > 1
    measured = Probe(
        matrix_flops={name: matrix_flops(DTYPES[name], device) for name in PRECISIONS[kind]},
        memory_bandwidth=memory_bandwidth(torch.float32 if kind == "cpu" else torch.bfloat16, device),
        link_bandwidth=link_bandwidth(SENT_BYTES[kind], device) if has_links else None,
        hop_seconds=hop_seconds(device) if has_links else None,
        operator_seconds=operator_seconds(device),
        host_bandwidth=host_bandwidth(HOST_ELEMENTS[kind]),
        host_link_bandwidth=host_link_bandwidth(HOST_COPY_BYTES, device) if kind == "cuda" else None,
        context_bytes=None,
    )
    if kind != "cuda":
        return measured
    context = outside_bytes(device)  # in use beyond the allocator's segments
    refuse(
        (
            context > MOST_CONTEXT_BYTES,
            f"{torch.cuda.get_device_name(device)} is in use by others",
            f"{format_bytes(context)} are in use besides our own tensors, more than any context",
            "calibrate when nothing else runs on it; `nvidia-smi` names what does",
        )
    )
    return replace(measured, context_bytes=context)


def matrix_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of a matrix product of a layer's size, and of the two products of its backward."""
    width = PRODUCT_WIDTH[device.type]
    x = torch.randn(ROWS[device.type], width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(4 * width, width, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(ROWS[device.type], 4 * width, device=device, dtype=dtype)

    def step() -> None:
        x.grad = weight.grad = None
        F.linear(x, weight).backward(gradient)

    return 3 * 2 * x.numel() * 4 * width / best_seconds(step, device)


def memory_bandwidth(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the bytes/s of operators between products, forward and backward, counted as in a dry run.

    A GPU's memory is the limit. On a CPU the arithmetic is one, too.
    """
    rows, width = ROWS[device.type], WIDTH[device.type]
    x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    scale, shift = (torch.ones(width, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    gradient = torch.randn_like(x)

    def step() -> None:
        x.grad = scale.grad = shift.grad = None
        normalised = F.layer_norm(x, (width,), scale, shift)
        (x + F.gelu(normalised) * x.softmax(-1)).backward(gradient)

    return _counted(step, device).traffic / best_seconds(step, device)


def host_bandwidth(num_elements: int) -> float:
    """Measure the bytes/s of AdamW on the host, of all ranks of this node together, counted as in `planning.cost`."""
    weights, gradient = torch.zeros(num_elements), torch.ones(num_elements)
    weights.grad = gradient
    seconds = best_seconds(torch.optim.AdamW([weights], fused=True).step, torch.device("cpu"))
    return (env.ranks_on_node() or dist.get_world_size()) * 32 * num_elements / seconds


def host_link_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Measure the bytes/s of copies to pinned host memory and back."""
    here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    there = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def step() -> None:
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)

    return 2 * num_bytes / best_seconds(step, device)


def link_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Measure the bytes/s that each rank sends in a ring: an all-reduce sends 2 (W-1)/W of its tensor."""
    summed = torch.ones(num_bytes // 4, device=device)
    world_size = dist.get_world_size()
    return 2 * (world_size - 1) / world_size * num_bytes / best_seconds(lambda: dist.all_reduce(summed), device)


def hop_seconds(device: torch.device) -> float:
    """Measure the seconds of a tiny all-reduce, divided by log2 of the number of ranks."""
    tiny = torch.ones(TINY_ELEMENTS, device=device)

    def step() -> None:
        for _ in range(TINY_COLLECTIVES):
            dist.all_reduce(tiny)

    return best_seconds(step, device) / TINY_COLLECTIVES / log2(dist.get_world_size())


def operator_seconds(device: torch.device) -> float:
    """Measure the seconds of an operator on a single element, the mean of forward and backward."""
    x = torch.ones(1, device=device, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(NUM_OPERATORS):
            y = y * 1.0
        y.backward()

    return best_seconds(step, device) / _counted(step, device).number


class _Counter(torch_internals.DispatchMode):
    """A count of operators and of the bytes they read and write, as in a dry run."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.number, self.traffic = 0, 0.0
        self._on_cpu = device.type == "cpu"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run it and count."""
        out = func(*args, **(kwargs or {}))
        self.number += 1
        self.traffic += traffic(func, args, kwargs or {}, out) * (cpu_pace(func) if self._on_cpu else 1.0)
        return out


def _counted(step: Callable[[], object], device: torch.device) -> _Counter:
    with _Counter(device) as counter:
        step()
    return counter


def best_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the best of a few tries, after a warm-up. All ranks begin each try together."""
    best = float("inf")
    for number in range(NUM_TRIES + 1):
        dist.barrier()
        _finish(device)
        start = time.perf_counter()
        step()
        _finish(device)
        if number:
            best = min(best, time.perf_counter() - start)
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def command(words: Sequence[str]) -> None:
    """Probe this machine, on one rank of a launcher.

    `--kind`: `cuda` or `cpu`. `--out`: the file in which rank 0 writes the slowest rank's figures.
    """
    given = parse(words, {"kind": str, "out": Path}, needed=["kind", "out"])
    device = process_group.use_device(given["kind"])
    env.silence_libraries()
    process_group.form()
    probes = gather(probe(device), Probe)
    if dist.get_rank() == 0:
        given["out"].write_bytes(msgspec.json.encode(Probe.slowest(probes)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    first_failure.run_command(command)
