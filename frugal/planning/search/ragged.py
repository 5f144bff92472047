"""The memory of runs whose micro-batches differ in length.

A caching allocator keeps segments that fitted one micro-step and are too small for the next. Where segments are not
expandable, it reserves up to twice as much as for equal micro-steps while the card has room, and needs some per cent
more where it has none: blocks that live on split what could be given back. So short runs are drawn from the data and
replayed, through a simulated optimizer and the allocator.
"""

from frugal.planning import length_bucketing
from frugal.planning.batch import BatchPlan
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.search.search import Search
from frugal.planning.strategy import Strategy


def with_lengths(search: Search, strategy: Strategy, batch: BatchPlan, memory: MemoryBreakdown) -> MemoryBreakdown:
    """Return the memory of a batch on the data, given that of equal micro-steps of full length; the same where the
    data's lengths are not known, or change nothing that arithmetic could tell.
    """
    request, device = search.request, memory.device_in(search.cluster)
    if request.lengths is None or device.kind == "cpu":
        return memory
    runs = length_bucketing.drawn_runs(request.lengths, batch, request.seq_len)
    micro_batch = next(micro for kind, micro in search.evaluation.fitting.loads(batch) if kind == device)
    more = search.source.of_lengths(strategy, micro_batch, runs, device)
    return memory if more is None else memory.with_lengths(*more, device.usable_bytes + device.margin_bytes)
