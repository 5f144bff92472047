"""All ranks get the same answer to their question, however they reach each other."""

import os
from unittest.mock import patch

import pytest
import torch.distributed as dist

from bench.ranks import Ranks
from frugal.distributed.vote import DifferentError, Vote


def answers(rank_0: str) -> tuple[bool, list[bool]]:
    """Whether the questions go to rank 0 at address `rank_0`, and what comes back where one rank after another says
    yes, and then none; runs on ranks."""
    on_several_hosts = {"MASTER_ADDR": rank_0, "LOCAL_SIZE": "1"}
    with patch.dict(os.environ, on_several_hosts):
        vote = Vote(None)
    votes = [vote.any(dist.get_rank() == number) for number in range(dist.get_world_size() + 1)]
    is_direct = vote._peers is not None
    vote.close()
    return is_direct, votes


@pytest.mark.parametrize(("rank_0", "is_direct"), [("127.0.0.1", True), ("nobody.invalid", False)])
@pytest.mark.parametrize("ranks", ["two_ranks", "three_ranks"])
def test_one_yes_is_a_yes_on_all_ranks(
    rank_0: str, is_direct: bool, ranks: str, request: pytest.FixtureRequest
) -> None:
    pool: Ranks = request.getfixturevalue(ranks)
    expected = [True] * pool.world_size + [False]
    assert pool.run(answers, rank_0) == [(is_direct, expected)] * pool.world_size


def answers_where_one_does_not_reach_rank_0() -> tuple[bool, list[bool]]:
    return answers("nobody.invalid" if dist.get_rank() == 1 else "127.0.0.1")


def test_one_rank_that_does_not_reach_rank_0_is_enough_for_all_to_use_gloo(three_ranks: Ranks) -> None:
    assert three_ranks.run(answers_where_one_does_not_reach_rank_0) == [(False, [True] * 3 + [False])] * 3


def error_where_a_rank_is_gone(gone: int) -> str:
    """What a rank is told; runs on ranks."""
    vote = Vote(None)
    if dist.get_rank() == gone:
        vote.close()
        return ""
    try:
        vote.any(False)
    except RuntimeError as error:
        return str(error)
    finally:
        vote.close()
    return "answered"


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_gone_is_no_answer(gone: int, three_ranks: Ranks) -> None:
    errors = three_ranks.run(error_where_a_rank_is_gone, gone, timeout=30)
    assert all(errors[rank].startswith("Connection to another rank was lost: ") for rank in range(3) if rank != gone)


def outcomes_of_different_aims(rank_0: str) -> list[str]:
    """What comes of votes in which ranks are about to do the same, different things, and different ones but one has
    failed; runs on ranks."""
    with patch.dict(os.environ, {"MASTER_ADDR": rank_0, "LOCAL_SIZE": "1"}):
        vote = Vote(None)
    outcomes = []
    for mine, what in ((False, 2**61), (False, 2**61 + dist.get_rank()), (dist.get_rank() == 1, dist.get_rank())):
        try:
            outcomes.append(str(vote.any(mine, what)))
        except DifferentError:
            outcomes.append("different")
    vote.close()
    return outcomes


@pytest.mark.parametrize("rank_0", ["127.0.0.1", "nobody.invalid"])
def test_ranks_about_to_do_different_things_are_told_unless_one_failed(rank_0: str, three_ranks: Ranks) -> None:
    assert three_ranks.run(outcomes_of_different_aims, rank_0) == [["False", "different", "True"]] * 3
