"""Which samples of a global batch a rank takes in each micro-step.

Where all samples are as long, or nobody knows how long they are, these are the plan's micro-batches, in the batch's
order. Otherwise samples of like length are together (`frugal.planning.length_bucketing`): the same global batch, hence
the same gradient, with less padding.

They are collated by a thread that works one item ahead. Not `torch.utils.data.DataLoader` with workers: samples
come tokenised from a memory map, so an item takes milliseconds; on CPU ranks there is no core left for a worker;
and a global batch is cut again when memory runs out, which a worker would have to be told.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from frugal.planning.batch import BatchPlan
from frugal.planning.length_bucketing import TokenBudget, grouped
from frugal.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimits:
    """What a micro-batch may take: what the plan says, until memory has run out under it.

    `max_samples` are samples of `seq_len` tokens, one cap a rank. A shorter sample counts as its own tokens, and at
    least as `shortest`. `overhead`: see `frugal.planning.length_bucketing`.
    """

    max_samples: tuple[int, ...]
    seq_len: int
    shortest: int
    overhead: int | None

    @classmethod
    def of(cls, plan: Plan) -> "MicroBatchLimits":
        """Those of a plan. One that knows no lengths may have no memory for gradients of more than one micro-step, so
        it gets the fewest."""
        batch, seq_len = plan.batch, plan.request.seq_len
        return cls(
            max_samples=batch.micro_batch,
            seq_len=seq_len,
            shortest=batch.shortest or seq_len,
            overhead=batch.overhead_tokens,
        )

    def halved(self, largest: int) -> "MicroBatchLimits | None":
        """Those under which what has taken as much as `largest` samples of full length is cut in two; None: nothing is.

        Where one sample of full length is the limit, several short ones may have taken its place: they do no more.
        """
        if largest > 1:
            return replace(self, max_samples=tuple(max(1, min(cap, largest) // 2) for cap in self.max_samples))
        return replace(self, shortest=self.seq_len) if self.shortest < self.seq_len else None


@dataclass(frozen=True)
class Share:
    """What one rank takes: `places[micro_step]` in the global batch, none for an empty micro-batch.

    `largest`: what the largest micro-batch of all ranks takes, in samples of full length.
    """

    places: tuple[Sequence[int], ...]
    largest: int


def share(samples: Sequence[Any], limits: MicroBatchLimits, rank: int, planned: BatchPlan | None = None) -> Share:
    """The micro-batches of `rank`, for `samples` given whole: those `planned`, where limits and number are its own."""
    lengths = getattr(samples, "lengths", None)
    if lengths is None or _are_alike(lengths, limits):
        if planned is not None and planned.micro_batch == limits.max_samples:
            batch = planned.resized(len(samples))
        else:
            batch = BatchPlan.of(len(samples), limits.max_samples)
        stretches = zip(batch.starts_of(rank), batch.sizes_of(rank), strict=True)
        return Share(tuple(range(start, start + size) for start, size in stretches), batch.largest_micro_batch)
    order = np.argsort(-np.asarray(lengths), kind="stable")
    longest_first = np.asarray(lengths)[order].tolist()
    budget = TokenBudget(tokens=tuple(cap * limits.seq_len for cap in limits.max_samples), shortest=limits.shortest)
    steps = grouped(longest_first, budget, limits.overhead)
    most_tokens = max(
        len(places) * max(longest_first[places.start], limits.shortest) for step in steps for places in step if places
    )
    own = tuple(order[step[rank].start : step[rank].stop].tolist() for step in steps)
    return Share(own, -(-most_tokens // limits.seq_len))


def _are_alike(lengths: Any, limits: MicroBatchLimits) -> bool:
    """Whether grouping could change nothing."""
    shortest, longest = int(np.min(lengths)), int(np.max(lengths))
    return shortest == longest and (longest >= limits.seq_len or limits.shortest >= limits.seq_len)


Item = TypeVar("Item")


def prefetch(items: Iterable[Item], device: torch.device | None = None) -> Generator[Item, None, None]:
    """The same items in the same order, each prepared on a thread while the caller works on the one before it.

    Never more than one waits. What making an item raises is raised where that item would have come. When the iterator
    is closed, an item in the making is finished first and thrown away. With a CUDA `device` the thread works there,
    and not on GPU 0, where it would open a context of its own.

    Making an item must not draw from the global random generators: the caller may do so at the same time.
    """
    source, end = iter(items), object()
    begin: Callable[[], None] | None = None
    if device is not None and device.type == "cuda":
        begin = partial(torch.cuda.set_device, device)
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch", initializer=begin) as thread:
        coming = thread.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, source, end)
            yield item  # type: ignore[misc]  # mypy does not see that it is not `end`


def pin(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch whose copy to `device` need not be waited for; where the device is no GPU, as it is."""
    if device.type != "cuda":
        return dict(batch)
    return {name: tensor.pin_memory() for name, tensor in batch.items()}
