"""What this machine does in a second: `python -m frugal.training.probe --kind cpu --out FILE`, on every rank.

Each rank measures while the others do the same, since they share memory, links and, on a CPU, the cores. A figure is
the best of a few tries: what else ran meanwhile only ever makes it worse.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from frugal.errors import RequestError
from frugal.planning.calibration import MOST_CONTEXT_BYTES, Probe
from frugal.planning.cards import DeviceKind
from frugal.planning.request import Precision
from frugal.training import failure, group
from frugal.training.precision import DTYPES
from frugal.units import MIB, format_bytes

NUM_TRIES = 4
NUM_OPERATORS = 200
PRECISIONS: dict[str, tuple[Precision, ...]] = {"cuda": ("bf16", "fp16", "fp32"), "cpu": ("bf16", "fp32")}
COPIED_BYTES = {"cuda": 1024 * MIB, "cpu": 128 * MIB}  # far beyond any cache
SENT_BYTES = {"cuda": 256 * MIB, "cpu": 16 * MIB}
SHAPES = {"cuda": (4, 1024, 4096), "cpu": (1, 128, 256)}  # samples, tokens, width


class _Layer(nn.Module):
    """A transformer's layer as most are: attention and a four times wider MLP, each with norm and shortcut."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(samples, tokens, width)` -> the same."""
        query, key, value = self.attention(self.first(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(mixed)
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


def probe(device: torch.device) -> Probe:
    """What this rank finds. Collective."""
    kind = device.type
    return Probe(
        matrix_flops={name: matrix_flops(DTYPES[name], device) for name in PRECISIONS[kind]},
        memory_bandwidth=memory_bandwidth(COPIED_BYTES[kind], device),
        link_bandwidth=link_bandwidth(SENT_BYTES[kind], device) if dist.get_world_size() > 1 else None,
        operator_seconds=operator_seconds(device),
        context_bytes=_context_bytes(device) if kind == "cuda" else None,
    )


def matrix_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a transformer's layer, forward and backward."""
    samples, tokens, width = SHAPES[device.type]
    layer = _Layer(width, num_heads=width // 64).to(device, dtype)
    x = torch.randn(samples, tokens, width, device=device, dtype=dtype, requires_grad=True)

    def step() -> None:
        layer(x).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / best_seconds(step, device)


def memory_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Bytes/s of a copy, read and written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / best_seconds(lambda: target.copy_(source), device)


def link_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Bytes/s that each rank sends in a ring: an all-reduce sends 2 (W-1)/W of what it sums."""
    summed = torch.ones(num_bytes // 4, device=device)
    world_size = dist.get_world_size()
    return 2 * (world_size - 1) / world_size * num_bytes / best_seconds(lambda: dist.all_reduce(summed), device)


def operator_seconds(device: torch.device) -> float:
    """Seconds of one operator on a single element, forward and backward together, divided by the operators seen."""
    x = torch.ones(1, device=device, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(NUM_OPERATORS):
            y = y * 1.0
        y.backward()

    with _Counter() as counter:
        step()
    return best_seconds(step, device) / counter.number


class _Counter(TorchDispatchMode):
    """How many operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Count it and run it."""
        self.number += 1
        return func(*args, **(kwargs or {}))


def _context_bytes(device: torch.device) -> int:
    """What the driver counts beyond the allocator's segments, after all of the above, and cuBLAS's workspaces."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    context = outside + before - torch.cuda.memory_allocated(device)
    if context > MOST_CONTEXT_BYTES:
        raise RequestError(
            f"{torch.cuda.get_device_name(device)} is in use by others",
            because=f"{format_bytes(context)} are taken besides our own tensors, more than any context",
            hint="calibrate when nothing else runs on it; `nvidia-smi` names what does",
        )
    return context


def best_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Of a few tries, after one that does not count. All ranks begin each together."""
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


@click.command("probe")
@click.option("--kind", type=click.Choice(["cuda", "cpu"]), required=True, help="Of device.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where rank 0 writes what was found.")
@click.option("--local_rank", "--local-rank", "_local_rank", type=int, hidden=True)  # DeepSpeed's launcher adds it
def command(kind: DeviceKind, out: Path, _local_rank: int | None) -> None:
    """Measure what this machine does in a second, on one rank of a launcher."""
    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    from frugal.training.log import quiet

    quiet()
    group.form()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, probe(device))
    if dist.get_rank() == 0:
        out.write_bytes(msgspec.json.encode(Probe.slowest(found)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """The rank's whole life."""
    group.end_with_starter()
    try:
        command(sys.argv[1:], standalone_mode=False)
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        failure.end(error)


if __name__ == "__main__":
    main()
