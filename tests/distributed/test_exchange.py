"""Ranks exchange typed values, and nothing that arrives is unpickled."""

import pickle
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import frugal
from bench.ranks import Ranks
from frugal.distributed import rendezvous
from frugal.distributed.exchange import RanksFailed, from_rank_0, gather, together


@dataclass(frozen=True)
class Sample:
    """A message that ranks exchange."""

    rank: int
    words: dict[str, list[float | None]]


def exchanged() -> bool:
    """Messages of another length on each rank, one of them empty; runs on ranks."""
    rank, world = dist.get_rank(), range(dist.get_world_size())
    samples = gather(Sample(rank, {"x" * rank: [None, 0.5] * 1000 * rank}), Sample)
    assert samples == [Sample(other, {"x" * other: [None, 0.5] * 1000 * other}) for other in world]
    assert gather(None if rank else "only rank 0", str | None) == ["only rank 0", *[None for _ in world][1:]]
    return from_rank_0(rank, int) == 0


def test_every_rank_gets_every_ranks_value(three_ranks: Ranks) -> None:
    assert three_ranks.run(exchanged) == [True] * 3


def waited() -> bool:
    """Return whether this rank went on only after the last one, which comes late, longer than its sockets wait
    otherwise."""
    rank, store = dist.get_rank(), rendezvous.joined
    assert store is not None
    store.set_timeout(timedelta(seconds=0.1))
    if rank == 2:
        time.sleep(1)
        store.set("rank 2 is done", "")
    rendezvous.wait_for_all("a rank that tokenises")
    return store.check(["rank 2 is done"])


def test_ranks_wait_for_the_last_one_longer_than_a_collective_would(three_ranks: Ranks) -> None:
    assert three_ranks.run(waited) == [True] * 3


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def error_where_rank_1_sends(message: bytes) -> str:
    """Return what a rank says of a message of rank 1's which `gather` did not make; runs on ranks."""
    if dist.get_rank() == 1:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor([len(message)]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(padded) for _ in sizes], padded)
        return ""
    with pytest.raises(RuntimeError) as error:
        gather("text", str)
    return str(error.value)


def test_a_pickle_from_a_rank_is_an_error_and_runs_nothing(two_ranks: Ranks, tmp_path: Path) -> None:
    message = pickle.dumps(Payload(tmp_path / "ran"))
    said, _ = two_ranks.run(error_where_rank_1_sends, message)
    assert said.startswith("rank 1 sent something else than was asked for: ")
    assert not (tmp_path / "ran").exists()


def reasons_where_rank_1_fails() -> list[str]:
    """Runs on ranks."""

    def act() -> str:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device", "a/file")
        return "done"

    with pytest.raises(RanksFailed) as failed:
        together(act, None, str | None)
    return failed.value.reasons


def test_what_fails_on_one_rank_fails_on_all(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(reasons_where_rank_1_fails)
    assert first == second
    assert [line.partition(" (")[0] for line in first] == ["rank 1: a/file: No space left on device"]


def test_no_module_has_torch_pickle_for_it() -> None:
    sources = {path.name: path.read_text() for path in Path(frugal.__file__).parent.rglob("*.py")}
    del sources["exchange.py"]  # which says why
    del sources["fake_device.py"]  # of a rank that is alone, in a dry run: nothing arrives
    names = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    assert [name for name, text in sources.items() if any(each in text for each in names)] == []
