"""Parameters that a step does not use: neither an earlier step's gradient nor another parameter's reaches them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.training.engine import initialize
from frugal.training.objectives import SummedLoss
from tests.training.gradients import Gradient
from tests.training.routed_models import KINDS, OPTIMIZERS, Routed, plain, routed_points, squared_error, update_error

ALIKE = ["012012012012", "000000000000", "121212121212", "222222222222"]
"""The ways of the samples of each step; every rank takes the same in the same order, so long as it takes three."""

Case = tuple[int, str, str, int, tuple[tuple[str, Any], ...]]
"""ZeRO stage, kind of model, optimizer, micro-batch, and more of the strategy."""


def trained(case: Case, batches: Sequence[str]) -> Gradient:
    """All weights after a step on each batch. Runs on ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    zero_stage, kind, optimizer, micro_batch, strategy = case
    plan = plan_by_hand(
        world_size=dist.get_world_size(), global_batch=len(batches[0]), micro_batch=micro_batch, zero_stage=zero_stage,
        request={"gradient_clipping": 0.0, **OPTIMIZERS[optimizer]}, strategy=dict(strategy),
    )  # fmt: skip
    engine = initialize(Routed(kind), plan, SummedLoss(squared_error, example=routed_points("0")[0]))
    for step, ways in enumerate(batches):
        engine.train_step(routed_points(ways, seed=step))
    after = {}
    for name, parameter in engine.module.named_parameters():
        whole = safe_get_full_fp32_param(parameter)
        after[name] = (parameter.detach() if whole is None else whole).double().clone()
    engine.destroy()
    return after


def errors(cases: Sequence[Case], batches: Sequence[str]) -> list[float]:
    """How far each case is off plain PyTorch, relative to the update. Runs on ranks."""
    return [update_error(trained(case, batches), plain(case[1], list(batches), case[2]), case[1]) for case in cases]


IN_TURNS = "000011112222"
"""With three micro-steps of four samples, each of them uses another way."""
OFFLOADED = (("offload_optimizer", "cpu"),)


@pytest.mark.parametrize(
    "zero_stage", [pytest.param(0, marks=pytest.mark.exhaustive), pytest.param(1, marks=pytest.mark.exhaustive), 2, 3]
)
def test_an_unused_parameter_gets_no_gradient_of_an_earlier_step(zero_stage: int, one_rank: Ranks) -> None:
    places = [()] if zero_stage == 0 else [(), OFFLOADED]
    cases = [
        (zero_stage, kind, "sgd", micro_batch, place) for kind in KINDS for micro_batch in (12, 4) for place in places
    ]
    batches = [*ALIKE, IN_TURNS, IN_TURNS[::-1]]
    (found,) = one_rank.run(errors, cases, batches)
    assert [case for case, error in zip(cases, found, strict=True) if error > 4 * fp32_error(case[1], batches)] == []


def fp32_error(kind: str, batches: list[str], optimizer: str = "sgd") -> float:
    """How far plain PyTorch in fp32 is off itself in fp64, on this machine."""
    single, double = (plain(kind, batches, optimizer, dtype) for dtype in (torch.float32, torch.float64))
    return update_error(single, double, kind)
