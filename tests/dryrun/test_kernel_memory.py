"""What a dry run records of single calls, against what they asked of CUDA's allocator on every kind of card."""

import lzma
from pathlib import Path

import msgspec
import pytest

from bench.kernels.requests import Attention, Call, Event, Operator, Requests, prepare
from frugal.config.hardware.cluster import Capability, kernel_class
from frugal.dryrun.trace.cuda_kernels import kernels_of
from frugal.dryrun.trace.kernel_memory import OUTPUTS, peak_inside
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
