"""Typed messages between ranks over their group, and actions that succeed on all ranks or fail on all.

torch's `all_gather_object` and `broadcast_object_list` pickle, and reading a pickle can run any code. Here a value goes
as msgspec's bytes, and what arrives is of the type that was asked for or an error.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from frugal import file_errors

MOST_BYTES = 256 * 2**20
"""The limit of one rank's message. The largest are the checksums of a checkpoint's files."""

T = TypeVar("T")


def gather(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, each of type `kind`, in rank order. Collective over `group`; None: all ranks.

    Raises:
        RuntimeError: what a rank sent is something else.
    """
    world_size = dist.get_world_size(group)
    if dist.get_backend(group) == "fake":  # of a dry run, whose ranks are all like this one, or of one rank
        return [value] * world_size
    message = msgspec.msgpack.encode(value)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    own_size = torch.tensor([len(message)], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own_size) for _ in range(world_size)]
    dist.all_gather(gathered, own_size, group=group)
    sizes = [int(size.item()) for size in gathered]
    for rank, size in enumerate(sizes):
        if not 0 < size <= MOST_BYTES:
            raise RuntimeError(f"rank {rank} announced a message of {size} bytes")
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    padded = padded.to(device)
    messages = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(messages, padded, group=group)
    values = []
    for rank, (tensor, size) in enumerate(zip(messages, sizes, strict=True)):
        try:
            values.append(msgspec.msgpack.decode(tensor[:size].cpu().numpy().tobytes(), type=kind))
        except msgspec.DecodeError as error:
            raise RuntimeError(f"rank {rank} sent something else than was asked for: {error}") from None
    return values


def from_rank_0(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value on all ranks. Collective, and raises, as `gather`."""
    return gather(value, kind, group)[0]


class RanksFailed(Exception):  # noqa: N818  # never leaves the package; named for what happened
    """An action failed on some rank; raised on every rank with all ranks' reasons, and what helps against the first."""

    def __init__(self, reasons: list[str], remedy: str) -> None:
        self.reasons, self.remedy = reasons, remedy
        super().__init__("; ".join(reasons))


def together(action: Callable[[], T], group: dist.ProcessGroup | None, kind: Any = None) -> list[T]:
    """Run `action` on each rank: its results from all ranks, or `RanksFailed` on all of them. Collective.

    `kind`: the type of the results or None. So a full disk on one rank is an error on all of them and a hang on none.
    """
    result, problem, rank = None, None, dist.get_rank()
    try:
        result = action()
    except OSError as error:
        because, remedy = file_errors.explain(error)
        problem = (f"rank {rank}: {because}", remedy)
    answers = gather((result, problem), tuple[kind, tuple[str, str] | None], group)
    problems = [problem for _, problem in answers if problem is not None]
    if problems:
        raise RanksFailed([because for because, _ in problems], problems[0][1])
    return [value for value, _ in answers]  # type: ignore[misc]  # no problem means a result
