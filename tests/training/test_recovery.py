"""Out of memory on one rank: nobody hangs, and the weights are those of a run that was never disturbed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from frugal.errors import FrugalError
from frugal.training.engine import Engine, initialize
from frugal.training.loss import CausalLM
from tests.plans import plan_by_hand
from tests.ranks import Ranks
from tests.training.models import ragged_samples, tiny_gpt2

GLOBAL_BATCH, MICRO_BATCH, DISTURBED_STEP = 12, 4, 1


class Disturbance:
    """Raises out-of-memory on one rank, once, in the forward or backward of the second layer of one micro-step."""

    def __init__(self, engine: Engine, rank: int, where: str, micro_step: int) -> None:
        self.armed, self.here, self.where, self.countdown = False, engine.rank == rank, where, micro_step
        engine.module.transformer.h[1].register_forward_hook(self.on_forward)

    def on_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not (self.armed and self.here):
            return
        if self.countdown > 0:
            self.countdown -= 1
        elif self.where == "forward":
            self.fail()
        else:
            (output if isinstance(output, torch.Tensor) else output[0]).register_hook(lambda gradient: self.fail())

    def fail(self) -> None:
        if self.armed:
            self.armed = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def train(
    zero_stage: int, options: dict[str, Any], disturbed: tuple[str, int] | None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Three steps; the second one disturbed on rank 1, or run in half the cells from the start. Runs on ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    options = dict(options)
    request = {"precision": options.pop("precision", "fp32")}
    plan = plan_by_hand(
        world_size=2,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        zero_stage=zero_stage,
        request=request,
        strategy=options,
    )
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    model = tiny_gpt2(**dropout)
    torch.manual_seed(7 + dist.get_rank())
    engine = initialize(model, plan, CausalLM())
    disturbance = Disturbance(engine, 1, *disturbed) if disturbed else None
    losses = []
    for step in range(3):
        if step == DISTURBED_STEP:
            if disturbance:
                disturbance.armed = True
            else:
                # 12 samples on 2 ranks: 2 micro-steps of 3; halved: 3 // 2
                engine.limits = replace(engine.limits, max_samples=(1, 1))
        losses.append(engine.train_step(ragged_samples(GLOBAL_BATCH, seed=step)).loss)
    if disturbance:
        assert not disturbance.armed or not disturbance.here, "the disturbance never happened"
        assert engine.limits.max_samples == (1, 1)
    weights = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter)
        weights[name] = (parameter.detach() if full is None else full).cpu().clone()
    engine.destroy()
    return weights, losses


STRATEGIES = {
    "ZeRO-0": (0, {}),
    "ZeRO-1": (1, {}),
    "ZeRO-2": (2, {}),
    "ZeRO-2, small buckets": (2, {"reduce_bucket_elements": 5000}),
    "ZeRO-2, host optimizer": (2, {"offload_optimizer": "cpu"}),
    "ZeRO-2, bf16": (2, {"precision": "bf16"}),
    "ZeRO-3": (3, {}),
    "ZeRO-3, nothing persistent": (
        3, {"reduce_bucket_elements": 5000, "persistence_threshold_elements": 0, "prefetch_bucket_elements": 3000},
    ),
    "ZeRO-3, host optimizer": (3, {"offload_optimizer": "cpu"}),
    "ZeRO-3, bf16, activation checkpointing": (3, {"precision": "bf16", "activation_checkpointing": "full"}),
    "ZeRO-2, tiled loss": (2, {"loss": "tiled"}),
}  # fmt: skip


IN_EVERY_RUN = ("ZeRO-0", "ZeRO-1", "ZeRO-2, small buckets", "ZeRO-2, bf16", "ZeRO-3, host optimizer")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in STRATEGIES]
)
def test_out_of_memory_on_one_rank_leaves_no_trace(name: str, two_ranks: Ranks) -> None:
    zero_stage, options = STRATEGIES[name]
    undisturbed = two_ranks.run(train, zero_stage, options, None, timeout=120)[0]
    for disturbed in [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]:
        weights, losses = two_ranks.run(train, zero_stage, options, disturbed, timeout=120)[0]
        assert losses == undisturbed[1], disturbed
        assert all(torch.equal(weights[n], undisturbed[0][n]) for n in weights), disturbed


def train_one_sample() -> str:
    """A step that runs out of memory although its cells hold one sample. Runs on ranks."""
    plan = plan_by_hand(world_size=2, global_batch=2, micro_batch=1, zero_stage=2)
    engine = initialize(tiny_gpt2(), plan, CausalLM())
    disturbance = Disturbance(engine, 0, "forward", 0)
    disturbance.armed = True
    try:
        engine.train_step(ragged_samples(2))
    except FrugalError as error:
        return f"{error.exit_code} {error.what}"
    finally:
        engine.destroy()
    return "nothing"


def test_a_single_sample_that_does_not_fit_ends_the_run_on_every_rank(two_ranks: Ranks) -> None:
    assert two_ranks.run(train_one_sample) == ["5 out of memory with a micro-batch of one sample"] * 2
