"""Tensors that a CPU rank holds beside a dry run's."""

import pytest
import torch

from bench.memory.cpu_rank import dry_run_as_process
from bench.plans import plan_by_hand
from frugal.dryrun.messages import AskDryRun, DryRun
from frugal.dryrun.run import dry_run
from frugal.models.objectives import CausalLM
from tests.engine.small_models import tiny_gpt2


@pytest.fixture(autouse=True)
def alone() -> None:
    """A dry run in this process forms a group of its own; a test before may have left one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def dry_run_result(zero_stage: int, offload: str) -> DryRun:
    plan = plan_by_hand(
        world_size=1, global_batch=1, micro_batch=1, zero_stage=zero_stage, request={"precision": "bf16"},
        strategy={"offload_optimizer": "cpu", "offload_parameters": offload, "reduce_bucket_elements": 300_000},
    )  # fmt: skip

    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return tiny_gpt2(n_embd=128, n_layer=2, vocab_size=2048).to(torch.bfloat16)

    asked = AskDryRun(
        request=plan.request, strategy=plan.strategy, micro_batch=1, accumulation_steps=1, world_size=1, rank=0,
        kind="cpu",
    )  # fmt: skip
    return dry_run(build, CausalLM(), asked)


def test_gathered_parameters_that_are_on_the_host_already_take_nothing() -> None:
    apart = dry_run_result(3, "cpu").phases["forward"]
    with dry_run_as_process():
        as_process = dry_run_result(3, "cpu").phases["forward"]
    assert apart - as_process >= 2 * 2048 * 128  # the embedding in bf16


def test_the_optimizer_steps_all_the_same() -> None:
    apart = dry_run_result(2, "none").peak.categories["optimizer"]
    with dry_run_as_process():
        assert dry_run_result(2, "none").peak.categories["optimizer"] == apart
