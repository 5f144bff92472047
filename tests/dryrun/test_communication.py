"""Buckets, overlapped communication, clipping and accumulation take the memory that was dry-run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.hardware.cluster import DeviceKind
from frugal.dryrun.messages import AskDryRun
from frugal.dryrun.run import dry_run
from frugal.models.objectives import CausalLM
from frugal.planning.plan import Plan
from tests.dryrun.test_truth import SMALL_BUCKETS, TOLERANCE, dry_run_result, measured
from tests.engine.small_models import tiny_gpt2

MICRO_BATCH = 4


def plan_of(
    zero_stage: int, accumulation_steps: int = 1, clipping: float = 1.0, seq_len: int = 64, **strategy: Any
) -> Plan:
    return plan_by_hand(
        world_size=2,
        global_batch=2 * MICRO_BATCH * accumulation_steps,
        micro_batch=MICRO_BATCH,
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


IN_EVERY_RUN = (
    "overlap-zero2-steps3",
    "bucket-2000-zero3",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in PLANS]
)
def test_every_phase_of_every_rank_is_as_dry_run(name: str, two_ranks: Ranks) -> None:
    plan = PLANS[name]
    dry_run = [
        [(i.phase, i.peak_bytes, i.live_bytes) for i in dry_run_result(plan, rank).intervals(MICRO_BATCH)]
        for rank in range(2)
    ]
    measurements = (two_ranks.run(partial(measured, plan)) for _ in range(3))  # gloo's threads may let a bucket go late
    truth = next((each for each in measurements if differences(dry_run, each) == []), None)
    assert truth is not None, differences(dry_run, two_ranks.run(partial(measured, plan)))


def differences(dry_run: Sequence[Any], truth: Sequence[Any]) -> list[str]:
    """Phases of ranks whose peak or live bytes are not those measured."""
    return [
        f"rank {rank}: {ours} for {theirs}"
        for rank, phases in enumerate(zip(dry_run, truth, strict=True))
        for ours, theirs in zip(*phases, strict=True)
        if ours[0] != theirs[0] or list(ours[1:]) != pytest.approx(list(theirs[1:]), rel=TOLERANCE)
    ]


def backward_peak(plan: Plan, kind: DeviceKind) -> int:
    """The most that lives in backward, bytes."""

    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return tiny_gpt2().to(torch.bfloat16)

    found = dry_run(
        build,
        CausalLM(),
        AskDryRun(
            request=plan.request,
            strategy=plan.strategy,
            micro_batch=1,
            accumulation_steps=1,
            world_size=2,
            rank=0,
            kind=kind,
        ),
    )
    return found.phases["backward"]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_on_a_gpu_side_streams_hold_what_a_cpu_would_have_freed(zero_stage: int) -> None:
    """DeepSpeed's second bucket is in both; what CUDA adds is what the work before the last has not yet let go."""
    bucket_bytes = 2 * SMALL_BUCKETS["reduce_bucket_elements"]
    alone, overlapped = (plan_of(zero_stage, seq_len=8, overlap_comm=overlap) for overlap in (False, True))
    on_gpu = backward_peak(overlapped, "cuda") - backward_peak(alone, "cuda")
    on_cpu = backward_peak(overlapped, "cpu") - backward_peak(alone, "cpu")
    assert on_gpu >= on_cpu + bucket_bytes // 2
    assert on_gpu <= on_cpu + 6 * bucket_bytes
