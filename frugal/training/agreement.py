"""What ranks do together: each does its part, then all know whether all could.

So a full disk on one rank is an error on all of them and a hang on none.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RanksFailed(Exception):  # noqa: N818  # never leaves the training room; named for what happened
    """Some rank could not do its part; raised on every rank with all ranks' reasons."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's value, in rank order. Collective over `group`; None: all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def together(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Run `action` on each rank, then vote: its results from all ranks, or `RanksFailed` on all."""
    result, problem, rank = None, None, dist.get_rank()
    try:
        result = action()
    except OSError as error:
        problem = f"rank {rank}: {error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    answers = gather((result, problem), group)
    reasons = [reason for _, reason in answers if reason is not None]
    if reasons:
        raise RanksFailed(reasons)
    return [value for value, _ in answers]  # type: ignore[misc]  # no problem means a result
