"""Sequence parallelism where nothing fits without: the fewest ranks that must share each sample.

Ranks that share samples pay with all-to-alls in every layer, and leave fewer samples for each other, so it is tried
only where not one sample fits into a device and splitting what depends on it could help.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.errors import RequestError
from frugal.planning.search.candidate import Infeasible, OpenSource, SearchResult
from frugal.planning.search.search import Search
from frugal.units import format_bytes, plural

MOST_SHARING = 64
"""Ranks that share a sample at most where nobody asked: a model rarely has more attention heads that could be split."""


def fewest_sharing(
    request: Request,
    cluster: Cluster,
    alone: Infeasible,
    sources: ExitStack,
    open_source: OpenSource,
    on_draft: Callable[[Search], Callable[[SearchResult], None]],
) -> tuple[Search, SearchResult] | str | None:
    """The search that found something where ranks share samples, with its result; why not, or None: it cannot help.

    `alone`: the proof that nothing fits without. `sources` keeps what is opened.
    """
    for number in _numbers(request, cluster, alone):
        shared = replace(request, sequence_parallel=number)
        try:
            source = sources.enter_context(open_source(shared, cluster))
            source.facts()  # has a small model of this kind tried
            search = Search(shared, cluster, source)
            result = search.run(on_draft(search))
        except RequestError as error:
            return f"ranks cannot share samples: {(*error.because, error.what)[0]}"
        if isinstance(result, SearchResult):
            return search, replace(result, shared_because=_why(shared, cluster, alone))
    return None


def _numbers(request: Request, cluster: Cluster, alone: Infeasible) -> Iterator[int]:
    """How many ranks may share a sample, the fewest first; those that would not shrink enough are left out."""
    memory, shortfall = alone.nearest.memory, -(alone.nearest.headroom_bytes or 0)
    is_of_device = not (alone.nearest.host_shortfall_bytes or alone.nearest.disk_shortfall_bytes)
    if request.sequence_parallel is not None or len(cluster.kinds) > 1 or memory is None or not is_of_device:
        return
    per_sample = memory.activations + memory.logits + memory.temporary + memory.slack
    for number in range(2, min(cluster.world_size, MOST_SHARING, request.seq_len) + 1):
        if cluster.world_size % number == 0 and per_sample - per_sample // number > shortfall:
            yield number


def _why(request: Request, cluster: Cluster, alone: Infeasible) -> str:
    """The sentence of `Plan.why`."""
    assert request.sequence_parallel is not None
    lacking = format_bytes(-(alone.nearest.headroom_bytes or 0))
    return (
        f"each sample is shared by {plural(request.sequence_parallel, cluster.rank_noun)}, a part of its tokens each: "
        f"{plural(alone.nearest.micro_batch, 'sample')} of {request.seq_len} tokens lacks {lacking} on one at best"
    )
