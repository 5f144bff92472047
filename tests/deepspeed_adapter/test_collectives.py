"""Every collective of DeepSpeed's backend is under guard, and one guard follows another."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend

from bench.ranks import Ranks
from frugal.deepspeed_adapter import collectives
from frugal.deepspeed_adapter.collectives import DIRECT, Collective, collectives_of
from frugal.distributed.connections.listeners import closed_afterwards
from frugal.engine.oom_retry import Guard, RanksDifferError

IN_STEPS = {
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast",
    "all_gather", "all_gather_into_tensor", "all_gather_base", "all_gather_coalesced", "all_to_all",
    "all_to_all_single",
}  # fmt: skip
"""Methods that training calls on all ranks at once."""

NOT_CALLED = {
    "inference_all_reduce",  # of tensor parallelism
    "send", "recv", "isend", "irecv", "batch_isend_irecv",  # of pipelines
    "gather", "scatter", "broadcast_object_list", "all_gather_object",  # of checkpoints and reports
    "barrier", "monitored_barrier",
}  # fmt: skip
"""Methods that ranks meet in, and that no micro-step and no optimizer step calls."""

NO_COLLECTIVES = {
    "destroy_process_group", "enable_symm_mem_for_group", "get_all_gather_function", "get_backend", "get_global_rank",
    "get_rank", "get_reduce_scatter_function", "get_world_group", "get_world_size", "has_all_gather_into_tensor",
    "has_reduce_scatter_tensor", "init_device_mesh", "init_process_group", "is_initialized", "new_group",
}  # fmt: skip


def test_the_backend_has_no_collective_that_ranks_do_not_vote_on() -> None:
    public = {name for name, value in vars(TorchBackend).items() if not name.startswith("_")}
    assert public - NO_COLLECTIVES - NOT_CALLED == set(collectives_of(TorchBackend)) == IN_STEPS


def guarded_twice() -> tuple[list[tuple[str, str]], bool]:
    """Return what the guards of a backend note of one collective, and whether its own calls are still there; on a
    rank."""
    noted: list[tuple[str, str]] = []

    def guard(who: str) -> Callable[[str, Collective], Collective]:
        def guarded(name: str, collective: Collective) -> Collective:
            def call(*args: Any, **kwargs: Any) -> Any:
                noted.append((who, name))
                return collective(*args, **kwargs)

            return call

        return guarded

    for who in ("first", "second"):
        collectives.guard(guard(who))
    collectives.backend().all_reduce(torch.ones(1))
    return noted, all(callable(getattr(collectives.backend(), name)) for name in DIRECT)


def test_a_guard_takes_the_place_of_the_one_before(two_ranks: Ranks) -> None:
    assert two_ranks.run(guarded_twice) == [([("second", "all_reduce")], True)] * 2


def exchanged_in_groups_of_their_own() -> bool:
    """Exchange another length on each rank, alone in its group; return whether that was done. Runs on ranks."""
    with closed_afterwards():
        exchange, sent = collectives.exchange_within(1), torch.arange(1.0, 2 + dist.get_rank())
    received = torch.zeros_like(sent)
    Guard(None).attempt(lambda: exchange(received, sent))
    return received.equal(sent)


def test_groups_of_ranks_exchange_other_lengths_at_once(two_ranks: Ranks) -> None:
    assert two_ranks.run(exchanged_in_groups_of_their_own) == [True, True]


def said_of_two_collectives() -> str:
    """Return what is said where rank 0 is about to enter another collective of as many elements. Runs on ranks."""
    tensor, backend = torch.ones(1), collectives.backend()
    guard = Guard(None)
    try:
        guard.attempt(lambda: backend.broadcast(tensor, 0) if dist.get_rank() else backend.all_reduce(tensor))
    except RanksDifferError as error:
        return str(error)
    return "nothing"


def test_ranks_that_are_about_to_enter_different_collectives_name_them(two_ranks: Ranks) -> None:
    for said in two_ranks.run(said_of_two_collectives):
        assert "rank 0 calls all_reduce" in said and "rank 1 calls broadcast" in said
