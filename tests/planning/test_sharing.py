"""Ranks share samples where not one fits on a device, and no more of them than are needed."""

from typing import Any

import pytest

from frugal.config.hardware.cluster import Cluster
from frugal.errors import NothingFitsError, RequestError
from frugal.planning.batch import BatchPlan
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import grid, parse_axes, predicted_with_sharing, what_if_table
from tests.planning import test_cost
from tests.planning.synthetic import dry_running, planned

LONG: dict[str, Any] = {"model": {"can_be_split": True}, "gpus": 4, "mem": "24G", "global_batch": 6}
"""5 % of 1 MB a token stay on the device at best, and the states are split over all ranks."""


@pytest.mark.parametrize(("seq_len", "number"), [(100_000, 1), (600_000, 2), (1_000_000, 4)])
def test_as_few_ranks_share_a_sample_as_are_enough(seq_len: int, number: int) -> None:
    plan = planned(**LONG, seq_len=seq_len)
    assert plan.strategy.sequence_parallel == plan.batch.sequence_parallel == number
    assert plan.batch.world_size == 4
    assert sum(map(sum, plan.batch.sizes)) == 6, "the global batch stays"
    told = [why for why in plan.why if "is shared by" in why]
    assert [why.partition(",")[0] for why in told] == (
        [] if number == 1 else [f"each sample is shared by {number} GPUs"]
    )


def test_the_batch_counts_groups_of_ranks() -> None:
    plan = planned(**LONG, seq_len=600_000)
    assert plan.arithmetic == "6 samples = 2 groups of 2 GPUs x micro-batch 1 x 3 accumulation steps"
    assert plan.batch.cap_of_rank == (1, 1, 1, 1)
    assert [plan.batch.group_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert plan.batch.resized(5).world_size == 4


def test_where_only_the_host_lacks_memory_ranks_share_samples_too() -> None:
    model = {"can_be_split": True, "parameters": 4 * 10**9}
    wide: dict[str, Any] = {"model": model, "gpus": 4, "mem": "24G", "global_batch": 4, "seq_len": 200_000}
    assert planned(**wide).strategy.offload_optimizer == "cpu"
    plan = planned(**wide, host_mem="1G")
    assert (plan.strategy.sequence_parallel, plan.strategy.offload_optimizer) == (2, "none")
    assert "lacks" in plan.why[0]


def test_the_table_says_which_samples_fit_on_how_many_devices() -> None:
    plan = planned(**LONG, seq_len=1_000_000)
    axes = parse_axes(["gpus=1,2,4", "mem=24G", "seq-len=250000,600000,1000000"])
    cases = grid(plan, axes)
    open_source = dry_running(**LONG["model"], drafts=True)
    entries = dict(zip(cases, predicted_with_sharing(list(cases.values()), open_source), strict=True))
    shared = {key[0::2]: each.strategy.sequence_parallel for key, each in entries.items() if each and each.fits}
    assert shared == {
        (1, 250_000): 1, (2, 250_000): 1, (2, 600_000): 2, (4, 250_000): 1, (4, 600_000): 2, (4, 1_000_000): 4,
    }  # fmt: skip
    lines = what_if_table(plan, axes, entries)
    assert "u samples shared by GPUs" in " ".join(line.strip() for line in lines)


def test_where_the_model_cannot_be_split_the_proof_says_so() -> None:
    with pytest.raises(NothingFitsError) as caught:
        planned(**{**LONG, "model": {}}, seq_len=600_000)
    assert "because ranks cannot share samples: it counts positions" in str(caught.value)


def test_a_number_that_is_asked_for_is_taken() -> None:
    plan = planned(**LONG, seq_len=1000, sequence_parallel=4)
    assert plan.strategy.sequence_parallel == 4
    assert plan.why[0] == "each sample is shared by 4 GPUs, as asked"
    with pytest.raises(RequestError, match="does not divide 4 GPUs\n\nhint: use --sequence-parallel 2, --sequence-par"):
        planned(**LONG, seq_len=1000, sequence_parallel=3)
    with pytest.raises(RequestError, match="impossible on devices that differ"):
        planned(**(LONG | {"gpus": 2, "mem": ["24G", "16G"]}), sequence_parallel=2, seq_len=1000)


def test_a_pinned_micro_batch_never_makes_ranks_share_samples() -> None:
    wanted = LONG | {"model": {"can_be_split": True, "drafts": True}, "global_batch": 48, "seq_len": 100_000}
    with pytest.raises(NothingFitsError) as caught:
        planned(**wanted, micro_batch=6)
    first, *_, hint = str(caught.value).splitlines()
    assert first == "gpt2 with --micro-batch 6 does not fit into a GPU of 24.00 GiB: at most 4 samples at once"
    assert "--micro-batch 4, or --sequence-parallel 2" in hint
    assert planned(**wanted, micro_batch=4).strategy.sequence_parallel == 1
    assert planned(**wanted, micro_batch=6, sequence_parallel=2).strategy.sequence_parallel == 2
    with pytest.raises(NothingFitsError):
        planned(**wanted, micro_batch=5)


def exchange_seconds(on: Cluster, size: int) -> float:
    batch = BatchPlan.of(4, (1,) * (on.world_size // size), sequence_parallel=size)
    model = test_cost.model(work_of=test_cost.work(exchanged_per_sample=8e9, num_exchanges=100))
    strategy = Strategy(zero_stage=2, sequence_parallel=size)
    alone = test_cost.model()
    return (
        test_cost.cost.step_time(model, strategy, batch, on, test_cost.Request()).communication_seconds
        - test_cost.cost.step_time(alone, strategy, batch, on, test_cost.Request()).communication_seconds
    )


def test_all_to_alls_take_the_links_that_they_pass() -> None:
    inside = test_cost.cluster(4, bandwidth=1e9)
    assert exchange_seconds(inside, 2) == pytest.approx(2 * 8 / 2)  # of two groups two samples each, half of it leaves
    assert exchange_seconds(inside, 4) == pytest.approx(4 * 8 * 3 / 4)
    across = test_cost.cluster(4, nodes=2, bandwidth=1e9)
    assert exchange_seconds(across, 2) == pytest.approx(2 * 8 / 2)  # each pair is in one node
    assert exchange_seconds(across, 4) == pytest.approx(4 * 8 * 3 / 4 * 2)  # two ranks share the node's link
