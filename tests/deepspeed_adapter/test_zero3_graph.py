"""What is left out of a dry run to save time changes nothing in it."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from frugal.config.request import Request
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.dryrun.messages import AskDryRun, DryRun
from frugal.dryrun.run import dry_run
from frugal.models.objectives import CausalLM
from frugal.planning.strategy import Strategy
from tests.engine.small_models import tiny_gpt2


def dry_run_result(stage: int, world_size: int = 4, rank: int = 1, precision: Any = "bf16", **more: Any) -> DryRun:
    def build() -> Any:
        with torch.device("meta"):
            return tiny_gpt2().to(DTYPES[precision])

    strategy = Strategy(
        zero_stage=stage, activation_checkpointing="full", reduce_bucket_elements=30_000,
        prefetch_bucket_elements=50_000, max_live_elements=60_000, persistence_threshold_elements=100,
    )  # fmt: skip
    asked = AskDryRun(
        request=Request(precision=precision, seq_len=32), strategy=strategy, micro_batch=2, accumulation_steps=2,
        world_size=world_size, rank=rank, kind="cuda", **more,
    )  # fmt: skip
    return dry_run(build, CausalLM(), asked)


@pytest.mark.parametrize(
    ("world_size", "rank"),
    [(3, 2), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((2, 0), (64, 63)))],
)
def test_collectives_at_once_make_the_same_storages_as_deepspeeds_loops_over_ranks(world_size: int, rank: int) -> None:
    ours = dry_run_result(3, world_size, rank).timeline
    with patch("frugal.deepspeed_adapter.zero3_graph.at_once", nullcontext):
        theirs = dry_run_result(3, world_size, rank).timeline
    assert sorted(ours.fixed) == sorted(theirs.fixed)
    assert ours.events == theirs.events and ours.phases == theirs.phases


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_one_micro_step_sets_the_stage_for_the_second_optimizer_step(stage: int, precision: str) -> None:
    short = dry_run_result(stage, precision=precision, first_micro_steps=1)
    whole = dry_run_result(stage, precision=precision)
    assert len(short.timeline.events) < len(whole.timeline.events)
    assert short.phases == whole.phases
    assert short.peak == whole.peak
