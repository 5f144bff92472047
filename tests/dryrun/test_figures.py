"""The choice of ranks to dry-run, and the figures of several: each the largest of any of them."""

from frugal.dryrun.client import likely_fullest, touched_elements
from frugal.dryrun.compare import fullest, predicted
from frugal.dryrun.messages import DryRun
from frugal.planning.cost import Counts
from frugal.planning.memory import breakdown
from frugal.planning.memory.timeline import ACTIVATIONS, PARAMETERS, Timeline
from frugal.units import MIB
from tests.dryrun.test_client import cluster


def dry_run(held: int, step: int, host: int = 0) -> DryRun:
    """`held` bytes live throughout; `step` more for a moment of the second phase."""
    timeline = Timeline(
        fixed=(held, step), per_sample=(0, 0), categories=(PARAMETERS, ACTIVATIONS), operators=(0, 1), modules=(2, 2),
        names=("make", "use", "layer"), events=(0, 1, 1), phases=(("forward", 0), ("optimizer step", 1)),
    )  # fmt: skip
    return DryRun(timeline=timeline, micro_batch=1, host_bytes=host, counts=Counts(num_operators=2))


def test_each_phase_is_that_of_the_rank_fullest_then() -> None:
    ranks = [dry_run(100, 10), dry_run(80, 60)]
    found = predicted(ranks, cluster(kind="cpu"))
    assert found.phases == {"forward": 100, "optimizer step": 140}
    assert found.peak_allocated_bytes == found.peak_reserved_bytes == found.smallest_capacity_bytes == 140
    assert (found.categories["parameters"], found.categories["activations"]) == (80, 60)
    assert (found.phase, found.operator, found.host_bytes_per_node) == ("optimizer step", "use", 0)
    assert fullest(ranks, "cpu") is ranks[1]
    assert fullest(ranks, "cpu").explain("activations") == [("layer", 60)]


def test_on_cuda_blocks_and_segments_count() -> None:
    found = predicted([dry_run(700, 3 * MIB, host=5), dry_run(700, 3 * MIB, host=MIB)], cluster())
    assert found.phases == {"forward": 1024, "optimizer step": 3 * MIB + 1024}
    assert found.categories["rounding"] == 1024 - 700
    assert found.peak_reserved_bytes == 2 * MIB + 20 * MIB  # a small segment and a large one
    assert found.host_bytes_per_node == 2 * breakdown.rank_host_bytes(MIB, "cuda")


def test_a_rank_keeps_every_gradient_that_its_part_of_the_row_touches() -> None:
    assert touched_elements([4, 4, 4], 2) == [8, 8]
    assert touched_elements([10, 1, 1], 3) == [10, 10, 12]
    assert touched_elements([6, 6], 2) == [6, 6]
    assert touched_elements([2], 4) == [2, 2, 0, 0], "a row shorter than the world leaves ranks empty"


def test_the_fullest_may_be_in_the_middle_and_the_first_and_last_are_among_them_where_there_is_room() -> None:
    parameters = [10, 30, 30, 10]  # cut at 27 and 54
    assert touched_elements(parameters, 3) == [40, 60, 40]
    assert likely_fullest(parameters, 3, 2) == (1, 2)
    parameters = [100, 60, 60, 4]  # 28 each: rank 3 reaches into the first two, rank 5 into the two after
    assert touched_elements(parameters, 8) == [100, 100, 100, 160, 60, 120, 60, 64]
    assert likely_fullest(parameters, 8, 4) == (0, 3, 5, 7)
