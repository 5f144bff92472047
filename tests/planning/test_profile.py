"""What a strategy takes is that of its fullest rank, after the allocator, at the micro-batch that was asked for."""

from frugal.config.hardware.cluster import Device
from frugal.planning.cost import Line, ModelCosts, Work
from frugal.planning.memory.profile import MemoryProfile, RankMemory
from frugal.planning.memory.timeline import ACTIVATIONS, PARAMETERS, Timeline
from frugal.planning.strategy import Strategy
from frugal.units import MIB
from tests.planning.synthetic import facts

NO_WORK = Work(
    flops_per_sample=0.0, recompute_flops_per_sample=0.0, traffic=Line(), recompute_traffic=Line(),
    num_operators=0, num_forward=0, num_recomputed=0, moved_per_sample=0.0,
)  # fmt: skip


def rank(*storages: tuple[int, int], number: int = 0, host_bytes: int = 0) -> RankMemory:
    """A rank whose storages, `(MiB, MiB a sample)`, all live at once; those that grow are activations."""
    timeline = Timeline(
        fixed=tuple(fixed * MIB for fixed, _ in storages),
        per_sample=tuple(each * MIB for _, each in storages),
        categories=tuple(ACTIVATIONS if each else PARAMETERS for _, each in storages),
        operators=(1,) * len(storages),
        modules=(0,) * len(storages),
        names=("", "mm"),
        events=tuple(range(len(storages))),
        phases=(("forward", 0),),
    )
    return RankMemory(rank=number, timeline=timeline, host_bytes=host_bytes)


def profile(*ranks: RankMemory, sampled: tuple[int, ...] = (), expandable_segments: bool = False) -> MemoryProfile:
    return MemoryProfile(
        strategy=Strategy(zero_stage=2, expandable_segments=expandable_segments), ranks_per_node=2, kind="cuda",
        costs=ModelCosts(facts=facts(1), work=NO_WORK), ranks=ranks, sampled=sampled,
    )  # fmt: skip


def card(usable_mib: int, context_mib: int = 100) -> Device:
    return Device(
        name="card", kind="cuda", memory_bytes=(usable_mib + context_mib) * MIB, context_bytes=context_mib * MIB,
        margin_bytes=0, matrix_flops=1e12, memory_bandwidth=1e12,
    )  # fmt: skip


ONE_BLOCK = rank((30, 0))
"""30 MiB in a segment of their own."""

FOUR_BLOCKS = rank((6, 0), (6, 0), (6, 0), (6, 0), number=1)
"""24 MiB; three blocks of 6 MiB fit into a segment of 20 MiB, so the fourth takes another: 40 MiB."""


def test_what_the_allocator_cannot_use_is_slack() -> None:
    memory = profile(FOUR_BLOCKS).memory(1, card(1000))
    assert (memory.parameters, memory.slack, memory.context) == (24 * MIB, 16 * MIB, 100 * MIB)
    assert memory.total_bytes == 140 * MIB


def test_expandable_segments_grow_by_pages() -> None:
    eleven = rank((11, 0), (11, 0))  # segments of 12 MiB each, or two pages of 20 MiB for both together
    plain, expandable = (profile(eleven, expandable_segments=each) for each in (False, True))
    assert plain.memory(1, card(1000)).slack == 2 * MIB
    assert expandable.memory(1, card(1000)).slack == 18 * MIB


def test_what_fits_is_what_the_strategys_own_segments_leave_room_for() -> None:
    many = rank(*((11, 0) for _ in range(10)), (0, 11))  # eleven blocks: 132 MiB of segments, or 140 MiB of pages
    plain, expandable = (profile(many, expandable_segments=each) for each in (False, True))
    assert plain.fits(1, card(135))
    assert not expandable.fits(1, card(135))
    assert (plain.largest_micro_batch(card(135), 1), expandable.largest_micro_batch(card(135), 1)) == (1, 0)


def test_a_draft_leaves_the_allocator_out() -> None:
    assert profile(FOUR_BLOCKS).draft.memory(1, card(1000)).total_bytes == 124 * MIB


def test_the_fullest_rank_is_the_one_that_needs_most_not_the_one_with_most_live_bytes() -> None:
    for ranks in ((ONE_BLOCK, FOUR_BLOCKS), (FOUR_BLOCKS, ONE_BLOCK)):
        memory = profile(*ranks).memory(1, card(1000))
        assert (memory.live_bytes, memory.slack) == (24 * MIB, 16 * MIB)


def test_a_step_fits_where_every_rank_gets_through_it() -> None:
    assert profile(ONE_BLOCK).fits(1, card(30))
    assert not profile(ONE_BLOCK, FOUR_BLOCKS).fits(1, card(39))
    assert profile(ONE_BLOCK, FOUR_BLOCKS).fits(1, card(40))


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    grows = profile(rank((10, 0), (0, 20)))  # 10 + 20 n MiB, each block a segment
    assert [grows.largest_micro_batch(card(usable), 100) for usable in (29, 30, 69, 70, 71)] == [0, 1, 2, 3, 3]
    assert grows.largest_micro_batch(card(10_000), 7) == 7


def test_the_largest_micro_batch_is_smaller_where_the_allocator_wastes() -> None:
    # Four blocks of 3 n MiB: one sample takes one segment of 20 MiB, two or three take two of them, 40 MiB.
    grows = profile(rank((0, 3), (0, 3), (0, 3), (0, 3)))
    assert grows.draft.largest_micro_batch(card(39), 100) == 3
    assert grows.largest_micro_batch(card(39), 100) == 1
    assert grows.largest_micro_batch(card(40), 100) == 3


def test_where_some_micro_batches_were_dry_run_the_next_larger_one_stands_for_those_between() -> None:
    sampled = profile(rank((20, 0)), rank((40, 0)), rank((80, 0)), sampled=(1, 2, 4))
    taken = [sampled.memory(micro_batch, card(1000)).live_bytes // MIB for micro_batch in (1, 2, 3, 4)]
    assert taken == [20, 40, 80, 80]
    assert sampled.largest_micro_batch(card(1000), 100) == 4, "more than 4 was never dry-run"
    assert sampled.largest_micro_batch(card(79), 100) == 2


def test_the_host_of_a_node_holds_all_its_ranks_as_large_as_the_fullest() -> None:
    ranks = rank((30, 0), host_bytes=100 * MIB), rank((30, 0), number=1, host_bytes=300 * MIB)
    memory = profile(*ranks).memory(1, card(1000))
    # Two processes that take 2 GiB without a tensor; 3 % of the tensors are lost by the heap.
    assert memory.host_bytes_per_node == 2 * (2048 * MIB + int(300 * MIB * 1.03))
