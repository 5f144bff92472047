"""With a secondary partition (hpZ) the same numbers come out bit for bit, and what groups of ranks keep is never old.

Four ranks as two nodes: groups are the ranks 0 and 1, and 2 and 3.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm

from bench.ranks import Ranks
from frugal.training.checkpoint import loading, saving
from frugal.training.checkpoint.progress import Progress
from frugal.training.data.batches import Position
from tests.training.checkpoint.test_reshard import END, STOP, bounds, start, steps, stop
from tests.training.gradients import relative_error, with_bound
from tests.training.test_exactness import measured_gradient, reference_gradient

Losses = list[tuple[float, float]]
KEPT = {"secondary_partition": 2, "max_live_elements": 20_000, "prefetch_bucket_elements": 5000}
NOT_KEPT = {**KEPT, "secondary_partition": 1}


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def gradients(ways: list[dict[str, Any]]) -> list[Any]:
    """Gradient and loss of one step of two micro-steps, one engine after the other; on ranks."""
    return [measured_gradient(4, 16, 2, 3, **way) for way in ways]


def gathers(way: dict[str, Any]) -> list[int]:
    """Of how many ranks the gathers of a step of two micro-steps are; on ranks."""
    sizes: list[int] = []
    gather = comm.allgather_fn

    def counted(*args: Any, group: Any = None, **how: Any) -> Any:
        sizes.append(comm.get_world_size(group))
        return gather(*args, group=group, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "allgather_fn", counted)
        measured_gradient(4, 16, 2, 3, **way)
    return sizes


def run(how: dict[str, Any], folder: Path) -> Losses:
    """Losses and rates of five steps, with a checkpoint after three; on ranks."""
    engine = start(torch.distributed.get_world_size(), 3, **how)
    before, position = steps(engine, Position(), STOP)
    saving.save(engine, folder, Progress(step=STOP, position=position))
    after, _ = steps(engine, position, END - STOP)
    stop(engine)
    return before + after


def resumed(folder: Path, how: dict[str, Any]) -> Losses:
    """Losses and rates of the last steps, from a checkpoint, by a model that had other weights; on ranks."""
    engine = start(torch.distributed.get_world_size(), 3, seed=1, **how)
    progress = loading.load(engine, folder).progress
    after, _ = steps(engine, progress.position, END - progress.step)
    stop(engine)
    return after


def test_the_gradient_is_the_same_bit_for_bit_and_the_next_engine_has_none(four_ranks: Ranks) -> None:
    plain, kept, after = four_ranks.run(gradients, [NOT_KEPT, KEPT, NOT_KEPT])[0]
    for name, gradient in plain[0].items():
        assert torch.equal(gradient, kept[0][name]) and torch.equal(gradient, after[0][name])
    assert plain[1] == kept[1] == after[1]
    reference, most = with_bound(reference_gradient, 16)
    assert relative_error(kept[0], reference) < most


def test_gathers_of_a_step_are_of_a_groups_ranks(four_ranks: Ranks) -> None:
    kept, plain = four_ranks.run(gathers, KEPT)[0], four_ranks.run(gathers, NOT_KEPT)[0]
    assert set(plain) == {4}
    assert len(kept) == len(plain) and kept.count(2) > len(kept) / 2


@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_resumed_run_forgets_what_groups_kept(frozen: bool, four_ranks: Ranks, tmp_path: Path) -> None:
    how = {"strategy": {"secondary_partition": 2}, "frozen": frozen}
    kept = four_ranks.run(run, how, tmp_path / "kept")[0]
    plain = four_ranks.run(run, {"frozen": frozen}, tmp_path / "plain")[0]
    assert kept == plain
    assert four_ranks.run(resumed, tmp_path / "kept", how)[0] == plain[STOP:]
    assert four_ranks.run(resumed, tmp_path / "plain", how)[0] == plain[STOP:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("frozen", [True, False])
def test_so_it_is_beside_a_part_of_the_optimizer_on_the_host(frozen: bool, four_ranks: Ranks, tmp_path: Path) -> None:
    in_part = {"offload_optimizer": "cpu", "offload_ratio": 0.5, "sub_group_elements": 1000}
    how = {"strategy": {"secondary_partition": 2, **in_part}, "frozen": frozen}
    kept = four_ranks.run(run, how, tmp_path / "kept")[0]
    assert kept == four_ranks.run(run, {"strategy": in_part, "frozen": frozen}, tmp_path / "in part")[0]
    whole = four_ranks.run(run, {"frozen": frozen}, tmp_path / "whole")[0]
    assert [loss for loss, _ in kept] == pytest.approx([loss for loss, _ in whole], rel=bounds()[0])
    assert four_ranks.run(resumed, tmp_path / "kept", how)[0] == kept[STOP:]
