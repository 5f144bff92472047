"""Sequence parallelism where nothing fits without it: the fewest ranks that must share each sample.

Ranks that share samples pay with all-to-alls in every layer, and leave fewer samples for each other, so it is tried
only where not one sample fits into a device and splitting what depends on it could help.
"""

from collections.abc import Iterator

from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.planning.search.candidate import Candidate, Infeasible
from frugal.units import format_bytes, plural

MOST_SHARING = 64
"""Ranks that share a sample at most where nobody asked: a model rarely has more attention heads that could be split."""


def numbers(request: Request, cluster: Cluster, alone: Infeasible) -> Iterator[int]:
    """Yield how many ranks may share a sample, the fewest first; numbers that would not save enough are left out."""
    if request.sequence_parallel is not None or len(cluster.kinds) > 1:
        return
    for number in range(2, min(cluster.world_size, MOST_SHARING, request.seq_len) + 1):
        if cluster.world_size % number == 0 and any(could_help(each, number) for each in alone.nearest_first):
            yield number


def could_help(candidate: Candidate, number: int) -> bool:
    """Return whether a candidate that lacks device memory might fit if `number` ranks shared each sample."""
    memory = candidate.memory
    if memory is None or candidate.host_shortfall_bytes or candidate.disk_shortfall_bytes:
        return False
    per_sample = memory.activations + memory.logits + memory.temporary + memory.slack
    return per_sample - per_sample // number > -(candidate.headroom_bytes or 0)


def why(request: Request, cluster: Cluster, alone: Infeasible) -> str:
    """Return the sentence of `Plan.why`."""
    assert request.sequence_parallel is not None
    lacking = format_bytes(-(alone.nearest.headroom_bytes or 0))
    where = f"on one {cluster.rank_noun}"
    if alone.nearest.host_shortfall_bytes or alone.nearest.disk_shortfall_bytes:
        where = "in a node's host memory" if alone.nearest.host_shortfall_bytes else "on a node's disk"
    return (
        f"each sample is shared by {plural(request.sequence_parallel, cluster.rank_noun)}, a part of its tokens each: "
        f"{plural(alone.nearest.micro_batch, 'sample')} of {request.seq_len} tokens lacks {lacking} {where} otherwise"
    )
