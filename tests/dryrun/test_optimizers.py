"""Every implementation of an optimizer computes the same, and keeps as many bytes of states as it is said to."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.optimizers import Optimizer
from frugal.engine.engine import initialize
from frugal.models.objectives import CausalLM
from frugal.planning.plan import Plan
from tests.dryrun.test_truth import dry_run_of, plan_for
from tests.engine.gradients import bounds_of_run, relative_error
from tests.engine.small_models import ragged_samples, tiny_gpt2
from tests.kernels import needs_adams, needs_cpu_adam

AS_PLANNED: Any = (1, 4, 1, 2, "bf16", "off")
"""One rank, four samples, one step, ZeRO-2."""


def states(**request: Any) -> tuple[int, int]:
    """Bytes that live before the first step, and those that it leaves behind."""
    intervals = dry_run_of(plan_for(*AS_PLANNED, **request)).timeline.intervals(4)
    return intervals[0].live_bytes, intervals[3].live_bytes - intervals[0].live_bytes


ELEMENTS = sum(parameter.numel() for parameter in tiny_gpt2().parameters())


def test_moments_take_8_bytes_an_element_a_quarter_in_8_bits_and_half_in_bf16_as_do_master_weights() -> None:
    before, adamw = states()
    _, sgd = states(optimizer=Optimizer(name="sgd"))
    _, in_8_bits = states(optimizer=Optimizer(name="adamw-8bit"))
    before_in_bf16, in_bf16 = states(optimizer=Optimizer(states="bf16"))
    assert adamw - sgd == pytest.approx(8 * ELEMENTS, rel=1e-3)
    assert in_8_bits - sgd == pytest.approx((2 + 8 / 256) * ELEMENTS, rel=1e-3)
    assert before - before_in_bf16 == pytest.approx(2 * ELEMENTS, rel=1e-3)
    assert adamw - in_bf16 == pytest.approx(4 * ELEMENTS, rel=1e-3)


def weights_after(plan: Plan, num_steps: int = 3) -> torch.Tensor:
    """All weights in a row. Runs on ranks."""
    engine = initialize(tiny_gpt2(), plan, CausalLM())
    for _ in range(num_steps):
        engine.train_step(ragged_samples(4))
    found = torch.cat([parameter.detach().float().flatten() for parameter in engine.module.parameters()])
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("implementation", "offload"),
    [
        ("foreach", "none"),
        ("for-loop", "none"),
        pytest.param("deepspeed", "none", marks=needs_adams),
        pytest.param("deepspeed", "cpu", marks=needs_adams),
    ],
)
def test_an_implementation_computes_what_the_first_one_computes(
    implementation: str, offload: str, one_rank: Ranks
) -> None:
    usual, other = (
        one_rank.run(weights_after, plan_by_hand(
            world_size=1, global_batch=4, micro_batch=4, zero_stage=2, strategy={"offload_optimizer": place},
            request={"learning_rate": 1e-3, "optimizer": Optimizer(implementation=name)},
        ))[0]
        for name, place in ((None, "none"), (implementation, offload))
    )  # fmt: skip
    bound = bounds_of_run(tiny_gpt2, [ragged_samples(4)] * 3, learning_rate=1e-3)[2]
    assert relative_error({"all": other.double()}, {"all": usual}) < bound
    assert (usual - torch.cat([p.detach().flatten() for p in tiny_gpt2().parameters()])).abs().max() > 1e-4


NUMBERS = {"learning_rate": 1e-3, "gradient_clipping": 0.0, "weight_decay": 0.1}


def weights_of_plain_torch() -> torch.Tensor:
    """All weights after `torch.optim.AdamW` has updated a bf16 model itself. Runs on ranks."""
    from frugal.config.request import Request

    model, objective = tiny_gpt2().to(torch.bfloat16), CausalLM()
    request = Request(**NUMBERS)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-3,
        weight_decay=0.1,
        betas=request.optimizer.betas,
        eps=request.optimizer.epsilon,
        fused=True,
    )
    for _ in range(3):
        batch = objective.collate(ragged_samples(4))
        (objective.loss_sum(model, batch) * (1 / objective.count(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def plan_in_bf16(zero_stage: int, offload: str = "none") -> Plan:
    return plan_by_hand(
        world_size=1, global_batch=4, micro_batch=4, zero_stage=zero_stage,
        request={"precision": "bf16", "optimizer": Optimizer(states="bf16"), **NUMBERS},
        strategy={"offload_optimizer": offload},
    )  # fmt: skip


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_with_states_in_bf16_weights_are_those_of_torchs_adamw_on_a_bf16_model(
    zero_stage: int, one_rank: Ranks
) -> None:
    plan = plan_in_bf16(zero_stage)
    (ours,) = one_rank.run(weights_after, plan)
    (with_fp32,) = one_rank.run(weights_after, replace(plan, request=replace(plan.request, optimizer=Optimizer())))
    (theirs,) = one_rank.run(weights_of_plain_torch)  # a process with as many threads
    assert torch.equal(ours, theirs)
    assert not torch.equal(with_fp32, theirs)


@needs_cpu_adam
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_on_the_host_states_in_bf16_go_the_same_way(zero_stage: int, one_rank: Ranks) -> None:
    (ours,) = one_rank.run(weights_after, plan_in_bf16(zero_stage, "cpu"))
    before = torch.cat([p.detach().bfloat16().float().flatten() for p in tiny_gpt2().parameters()])
    (theirs,) = one_rank.run(weights_of_plain_torch)  # a process with as many threads
    assert (ours - theirs).norm() < 0.05 * (theirs - before).norm()


def mistake_of(plan: Plan) -> str:
    """Return what a rank says instead of training. Runs on ranks."""
    from frugal.errors import FrugalError

    try:
        weights_after(plan)
    except FrugalError as error:
        return str(error)
    return "nothing"


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_training_without_the_library_says_how_to_get_it(one_rank: Ranks) -> None:
    (said,) = one_rank.run(mistake_of, plan_for(*AS_PLANNED, optimizer=Optimizer(name="adamw-8bit")))
    assert "--optimizer adamw-8bit needs bitsandbytes" in said
    assert "pip install bitsandbytes" in said


def mistake_without_a_compiler(plan: Plan) -> str:
    """Runs on ranks."""
    from unittest.mock import patch

    from deepspeed.ops.op_builder.builder import OpBuilder

    with (
        patch.object(OpBuilder, "is_compatible", lambda *_args, **_kwargs: False),
        patch.dict(OpBuilder._loaded_ops, clear=True),
    ):
        return mistake_of(plan)


def test_training_without_a_compiler_says_what_needs_none(one_rank: Ranks) -> None:
    (said,) = one_rank.run(
        mistake_without_a_compiler, plan_for(*AS_PLANNED, optimizer=Optimizer(implementation="deepspeed"))
    )
    assert "DeepSpeed's FusedAdam cannot be compiled here" in said
    assert "leave out optimizer.implementation" in said
