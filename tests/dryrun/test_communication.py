"""Buckets, overlapped communication, clipping and accumulation take the memory that was dry-run."""

from typing import Any

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.hardware.cluster import DeviceKind
from frugal.planning.plan import Plan
from tests.dryrun.test_truth import SMALL_BUCKETS, assert_as_dry_run, dry_run_of


def plan_of(
    zero_stage: int, accumulation_steps: int = 1, clipping: float = 1.0, micro_batch: int = 4, seq_len: int = 64,
    **strategy: Any,
) -> Plan:  # fmt: skip
    return plan_by_hand(
        world_size=2,
        global_batch=2 * micro_batch * accumulation_steps,
        micro_batch=micro_batch,
        zero_stage=zero_stage,
        request={"gradient_clipping": clipping, "precision": "bf16" if zero_stage > 1 else "fp32", "seq_len": seq_len},
        strategy={**SMALL_BUCKETS, **strategy},
    )


PLANS = {
    **{
        f"overlap-zero{stage}-steps{steps}": plan_of(stage, steps, overlap_comm=True)
        for stage in (1, 2, 3)
        for steps in (1, 3)
    },
    **{f"no-clipping-zero{stage}": plan_of(stage, 2, clipping=0.0) for stage in (0, 2, 3)},
    **{
        f"bucket-{elements}-zero{stage}": plan_of(stage, reduce_bucket_elements=elements, overlap_comm=overlap)
        for stage, elements, overlap in ((2, 2_000, False), (2, 400_000, True), (3, 2_000, True), (3, 400_000, False))
    },
}


IN_EVERY_RUN = ("overlap-zero2-steps3", "bucket-2000-zero3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in PLANS]
)
def test_every_phase_of_every_rank_is_as_dry_run(name: str, two_ranks: Ranks) -> None:
    assert_as_dry_run(PLANS[name], two_ranks)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_on_a_gpu_side_streams_hold_what_a_cpu_would_have_freed(zero_stage: int) -> None:
    """DeepSpeed's second bucket is in both; what CUDA adds is what the work before the last has not yet let go."""
    kinds: tuple[DeviceKind, ...] = ("cuda", "cpu")
    bucket_bytes = 2 * SMALL_BUCKETS["reduce_bucket_elements"]
    alone, overlapped = (
        plan_of(zero_stage, micro_batch=1, seq_len=8, overlap_comm=overlap) for overlap in (False, True)
    )
    on_gpu, on_cpu = (
        dry_run_of(overlapped, kind=kind).phases["backward"] - dry_run_of(alone, kind=kind).phases["backward"]
        for kind in kinds
    )
    assert on_gpu >= on_cpu + bucket_bytes // 2
    assert on_gpu <= on_cpu + 6 * bucket_bytes
