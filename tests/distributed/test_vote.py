"""All ranks get the same answer to their question."""

from contextlib import closing

import pytest
import torch.distributed as dist

from bench.ranks import Ranks
from frugal.distributed.vote import DifferentError, Vote


def answers() -> list[bool]:
    """Return the answers when one rank after another says yes, and then none; runs on ranks."""
    with closing(Vote(None)) as vote:
        return [vote.any(dist.get_rank() == number) for number in range(dist.get_world_size() + 1)]


def test_one_yes_is_a_yes_on_all_ranks(three_ranks: Ranks) -> None:
    assert three_ranks.run(answers) == [[True, True, True, False]] * 3


def error_where_a_rank_is_gone(gone: int) -> str:
    """Return what a rank is told; runs on ranks."""
    with closing(Vote(None)) as vote:
        if dist.get_rank() == gone:
            return ""
        with pytest.raises(RuntimeError) as error:
            vote.any(False)
        return str(error.value)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_gone_is_no_answer(gone: int, three_ranks: Ranks) -> None:
    errors = three_ranks.run(error_where_a_rank_is_gone, gone, timeout=30)
    assert all(errors[rank].startswith("Connection to another rank was lost: ") for rank in range(3) if rank != gone)


def outcomes_of_different_aims() -> list[str]:
    """Return what comes of votes in which ranks are about to do the same, different things, and different ones but one
    has failed; runs on ranks."""
    outcomes, rank = [], dist.get_rank()
    with closing(Vote(None)) as vote:
        for mine, what in ((False, 2**61), (False, 2**61 + rank), (rank == 1, rank)):
            try:
                outcomes.append(str(vote.any(mine, what)))
            except DifferentError:
                outcomes.append("different")
    return outcomes


def test_ranks_about_to_do_different_things_are_told_unless_one_failed(three_ranks: Ranks) -> None:
    assert three_ranks.run(outcomes_of_different_aims) == [["False", "different", "True"]] * 3
