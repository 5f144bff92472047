"""What a dry run records of single calls, against what they asked of CUDA's allocator on every kind of card."""

import lzma
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from bench.gpu.constants import peak_inside
from bench.kernels.requests import Attention, Call, Event, Operator, Requests, prepare
from frugal.config.hardware.cluster import Capability, kernel_class
from frugal.dryrun.trace.cuda_kernels import kernels_of
from frugal.dryrun.trace.kernel_memory import OUTPUTS
from frugal.dryrun.trace.recorder import Tracker
from frugal.dryrun.trace.trace import Recorder

CUDA = msgspec.json.decode(
    lzma.decompress((Path(__file__).parent / "kernel_requests.json.xz").read_bytes()), type=Requests
)
NAMES = [f"{number}-{getattr(call, 'name', 'attention')}" for number, call in enumerate(CUDA.calls)]
SMALL = 64 << 10
"""Bytes; CUB's scans take some KiB, which no dry run records."""


def recorded(call: Call, capability: Capability, kind: type[Tracker] = Tracker) -> list[Event]:
    """Blocks of a dry run as the allocator rounds them, taken and given back."""
    run = prepare(call, "meta")
    tracker = kind("cuda", capability=capability)
    tracker._building = False  # as after a model was built
    with kernels_of("cuda", capability), tracker:
        run()
    timeline = tracker.timeline()
    alive: set[int] = set()
    events = []
    for storage in timeline.events:
        size = -(-timeline.fixed[storage] // 512) * 512
        if size:
            events.append(-size if storage in alive else size)
            alive.add(storage)
    return events


def peak(events: list[Event]) -> int:
    """The most bytes at once."""
    live = most = 0
    for event in events:
        live += event
        most = max(most, live)
    return most


@pytest.mark.parametrize("name", CUDA.events)
def test_attention_asks_for_the_same_blocks_in_the_same_order(name: str) -> None:
    """Forward and backward of every kernel: every block, taken and given back, to the byte."""
    capability = kernel_class(tuple(map(int, name.split("."))))  # type: ignore[arg-type]  # two numbers
    for call, events in zip(CUDA.calls, CUDA.events[name], strict=True):
        if isinstance(call, Attention):
            ours = recorded(call, capability)
            assert ours[: len(events)] == events, call


@pytest.mark.parametrize("name", CUDA.events)
def test_operators_reach_the_same_peak(name: str) -> None:
    """Outputs and what is taken besides: all but scans of some KiB; more only for embeddings of a few rows."""
    capability = kernel_class(tuple(map(int, name.split("."))))  # type: ignore[arg-type]  # two numbers
    for call, events in zip(CUDA.calls, CUDA.events[name], strict=True):
        if not isinstance(call, Attention):
            more = peak(recorded(call, capability)) - peak(events)
            has_few_rows = call.name.startswith("embedding") and call.arguments[2] < 500
            assert -SMALL <= more <= (peak(events) * 10 if has_few_rows else SMALL), call


def test_a_trace_stands_for_larger_micro_batches() -> None:
    """Where few indices are not sorted, a trace counts what many would take, so that it holds for all sizes."""
    few = Operator("embedding_dense_backward.default", (("float32", (3, 64, 8)), ("int64", (3, 64)), 100, -1, False))
    exact, for_all = (peak(recorded(few, (8, 0), kind)) for kind in (Tracker, Recorder))
    assert for_all > exact


def test_blocks_are_counted_where_they_live_together() -> None:
    """A block that went is not added to the next."""
    assert peak_inside((100, OUTPUTS, 50, -1, 20)) == 150


def births(run: Callable[[Tensor], object], values: Tensor) -> list[int]:
    """Bytes of what is taken, on a T4, in order."""
    tracker = Tracker("cuda", capability=(7, 5))
    tracker._building = False
    with kernels_of("cuda", (7, 5)), tracker:
        run(values)
    return list(tracker.timeline().fixed)


def test_what_the_emulated_card_is_asked_for_in_masks_and_clamps_of_t5() -> None:
    """Seen in the request stream of T5 in fp16 on an emulated T4: `ge`, `le` and the result, no third mask."""
    hidden = torch.empty(16, 512, 512, dtype=torch.float16, device="meta", requires_grad=True)

    def clamp(values: Tensor) -> None:
        values.clamp(min=-1.0, max=1.0).backward(torch.ones_like(values))

    masks = [size for size in births(clamp, hidden) if size == hidden.numel()]
    assert len(masks) == 2
    assert births(torch.isinf, hidden.detach()) == [hidden.nbytes, hidden.numel()]

    def mask(values: Tensor) -> Tensor:
        rows, columns = torch.empty(16, 1, dtype=torch.int64, device="meta"), values
        return torch.empty(16, 512, dtype=torch.bool, device="meta")[rows, columns]

    columns = torch.empty(512, dtype=torch.int64, device="meta")
    assert births(mask, columns)[-3:] == [65536, 65536, 8192]
