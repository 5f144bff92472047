"""`python -m bench.gpu.allocator`: random requests through torch's own caching allocator, and through the replay.

Needs a CUDA device, a real one or an emulated one. Each sequence of requests, releases and emptied caches runs once
without a limit and then capped, by `set_per_process_memory_fraction`, at several sizes between what is allocated at the
peak and what is reserved, of which one is what `Replays.smallest_capacity` promises. What must be equal: the peaks of
allocated and reserved bytes, and whether memory was enough. With expandable segments:

    PYTORCH_ALLOC_CONF=expandable_segments:True python -m bench.gpu.allocator

What the replay cannot know is where a driver puts segments: it takes the lowest address with room. Where several free
blocks are of one size, the one at the lowest address is taken, so on a card whose driver does otherwise sequences may
differ.
"""

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass

import torch

from frugal.planning.memory.allocator import Replays
from frugal.planning.memory.caching_allocator import segment_bytes
from frugal.units import KIB, MIB

KEPT = (512, 2 * MIB)
"""Bytes of two storages that live on from sequence to sequence, at the beginning of a small and of a large segment:
without them every sequence would reserve new address space for expandable segments."""
FRACTIONS = (0.2, 0.4, 0.6, 0.8, 0.95)  # of the way from what is allocated to what is reserved


@dataclass(frozen=True)
class Requests:
    """Storages of `sizes` bytes; `events`, `empties` as of `Replays`."""

    sizes: list[int]
    events: list[int]
    empties: list[int]


@dataclass(frozen=True)
class Outcome:
    """Bytes at the peaks, and whether memory was enough."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    survived: bool


def requests(generator: random.Random, length: int) -> Requests:
    """Random ones: sizes that come again, as a model's do, and others; storages that die in any order or as a stack."""
    known = [_size(generator) for _ in range(generator.randrange(1, 40))]
    repeats, births, stack = generator.random(), generator.uniform(0.5, 0.65), generator.random()
    sizes = list(KEPT)
    events = list(range(len(KEPT)))
    empties: list[int] = []
    live: list[int] = []
    while len(events) < length:
        if live and generator.random() > births:
            index = -1 if generator.random() < stack else generator.randrange(len(live))
            events.append(live.pop(index))
        else:
            live.append(len(sizes))
            events.append(len(sizes))
            sizes.append(generator.choice(known) if generator.random() < repeats else _size(generator))
        if generator.random() < 0.005:
            empties.append(len(events))
        if generator.random() < 0.01:  # as at the end of a backward
            generator.shuffle(live)
            events += live[len(live) // 4 :]
            del live[len(live) // 4 :]
    return Requests(sizes, events, empties)


def _size(generator: random.Random) -> int:
    """Bytes: evenly over the powers of two, so that every kind of segment is met."""
    most = generator.choice((64 * KIB, MIB, 2 * MIB, 10 * MIB, 100 * MIB, 300 * MIB))
    return max(1, int(2 ** generator.uniform(8, most.bit_length() - 1)))


def on_device(asked: Requests, cap_bytes: int | None, kept: list[torch.Tensor]) -> Outcome:
    """Return what torch's allocator does with them, of which the first are `kept` already."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if cap_bytes is None else (cap_bytes + 0.5) / total, 0)
    torch.cuda.reset_peak_memory_stats()
    live: dict[int, torch.Tensor] = {}
    empties = set(asked.empties)
    survived = True
    try:
        for number, storage in enumerate(asked.events[len(kept) :], len(kept)):
            if number in empties:
                torch.cuda.empty_cache()
            if storage in live:
                del live[storage]
            else:
                live[storage] = torch.empty(asked.sizes[storage], dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        survived = False
    return Outcome(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), survived)


def replayed(replays: Replays, cap_bytes: int | None) -> Outcome:
    """Return what the replay says of them."""
    replay = replays.under() if cap_bytes is None else replays.under(cap_bytes)
    return Outcome(replay.peak_allocated_bytes, replay.peak_reserved_bytes, replay.survived)


def main() -> int:
    """Compare sequence by sequence; 1 if any differed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.allocator", description="The replay against torch.")
    parser.add_argument("--sequences", type=int, default=1000, help="how many  [default: 1000]")
    parser.add_argument("--length", type=int, default=600, help="requests and releases of each  [default: 600]")
    parser.add_argument("--seed", type=int, default=0, help="of the first sequence  [default: 0]")
    chosen = parser.parse_args()
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
    torch.cuda.init()
    kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in KEPT]
    least = sum(map(segment_bytes, KEPT))
    start = time.perf_counter()
    num_runs = num_different = num_refused = 0
    for seed in range(chosen.seed, chosen.seed + chosen.sequences):
        asked = requests(random.Random(seed), chosen.length)
        replays = Replays(asked.sizes, asked.events, asked.empties, expandable_segments=expandable)
        free = replays.under()
        between = free.needed_bytes - free.peak_allocated_bytes
        caps = [max(least, free.peak_allocated_bytes + int(share * between)) for share in FRACTIONS]
        for cap_bytes in (None, *caps, replays.smallest_capacity()):
            real, ours = on_device(asked, cap_bytes, kept), replayed(replays, cap_bytes)
            num_runs += 1
            num_refused += not real.survived
            if real != ours:
                num_different += 1
                print(f"sequence {seed}, cap {cap_bytes}: torch {real}, replay {ours}", flush=True)
    kind = "expandable segments" if expandable else "segments"
    print(
        f"{kind} on {torch.cuda.get_device_name(0)}, torch {torch.__version__}: {chosen.sequences} sequences, "
        f"{num_runs} runs, {num_refused} out of memory, {num_different} differ, {time.perf_counter() - start:.0f} s"
    )
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
