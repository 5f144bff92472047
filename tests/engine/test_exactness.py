"""The gradient of a global batch does not depend on how it was cut, nor on the strategy."""

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.optimizers import Optimizer
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.engine.engine import Engine, initialize
from frugal.errors import FrugalError
from frugal.models import tiled_loss
from frugal.models.objectives import CausalLM, SummedLoss
from tests.engine.engines import losses_of, plan_here, running
from tests.engine.gradients import (
    SGD,
    Gradient,
    applied,
    bound_by,
    plain_gradient,
    relative_error,
    weights,
    whole,
    with_bound,
)
from tests.engine.small_models import NormedNet, points, ragged_samples, squared_error, tiny_gpt2

EXHAUSTIVE = pytest.mark.exhaustive


def reference_gradient(global_batch: int, dtype: torch.dtype = torch.float64) -> Gradient:
    """Plain PyTorch, one process, every sample by itself."""
    return plain_gradient(tiny_gpt2().to(dtype), ragged_samples(global_batch))


def measured_gradient(
    global_batch: int,
    micro_batch: int | tuple[int, ...],
    zero_stage: int,
    precision: str = "fp32",
    accumulation_dtype: str = "fp32",
) -> tuple[Gradient, float]:
    """The gradient DeepSpeed applied, read off one SGD step: (before - after) / learning rate. Runs on ranks."""
    plan = plan_here(
        zero_stage, global_batch, micro_batch, {**SGD, "precision": precision},
        gradient_accumulation_dtype=accumulation_dtype,
    )  # fmt: skip
    with running(plan, tiny_gpt2(seed=dist.get_rank())) as engine:  # rank 0's weights must win
        result = engine.train_step(ragged_samples(global_batch))
        assert differences(engine) == []
        return applied(engine, weights(tiny_gpt2())), result.loss


@pytest.mark.parametrize(
    ("fixture", "global_batch", "micro_batch", "zero_stage"),
    [
        pytest.param(*split, stage, marks=[] if stage in quick else EXHAUSTIVE)
        for split, quick in {
            ("three_ranks", 8, 2): (0, 1, 2, 3), ("three_ranks", 2, 4): (0, 3), ("one_rank", 8, 8): (),
            ("one_rank", 8, 1): (), ("two_ranks", 8, 2): (), ("two_ranks", 8, 1): (), ("three_ranks", 100, 5): (),
            ("three_ranks", 100, (6, 3, 1)): (),
        }.items()
        for stage in range(4)
    ],
)  # fmt: skip
def test_fp32_gradient_is_that_of_plain_pytorch(
    fixture: str, global_batch: int, micro_batch: Any, zero_stage: int, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    measured = ranks.run(measured_gradient, global_batch, micro_batch, zero_stage)
    reference, bound = with_bound(reference_gradient, global_batch)
    for gradient, loss in measured:
        assert relative_error(gradient, reference) < bound
        assert loss == measured[0][1]


@pytest.mark.parametrize(
    ("zero_stage", "micro_batch", "fixture", "summed_in"),
    [
        (2, 1, "two_ranks", "fp32"),
        (3, 1, "two_ranks", "fp32"),
        (2, 1, "two_ranks", "bf16"),
        *(
            pytest.param(stage, *split, "fp32", marks=EXHAUSTIVE)
            for stage in (2, 3)
            for split in ((8, "one_rank"), (1, "one_rank"), (4, "two_ranks"))
        ),
        pytest.param(3, 1, "two_ranks", "bf16", marks=EXHAUSTIVE),
    ],
)
def test_bf16_gradient_is_within_bf16_rounding(
    zero_stage: int, micro_batch: int, fixture: str, summed_in: str, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    ((gradient, _), *_) = ranks.run(measured_gradient, 16, micro_batch, zero_stage, "bf16", summed_in)
    reference = reference_gradient(16)
    assert relative_error(gradient, reference) < bound_by(reference_gradient(16, torch.bfloat16), reference)


@pytest.mark.exhaustive
def test_bf16_error_does_not_grow_with_accumulation(one_rank: Ranks) -> None:
    reference = reference_gradient(256)
    error = {
        dtype: relative_error(one_rank.run(measured_gradient, 256, 1, 2, "bf16", dtype)[0][0], reference)
        for dtype in ("fp32", "bf16")
    }
    assert error["fp32"] < bound_by(reference_gradient(16, torch.bfloat16), reference_gradient(16))  # of fewer
    assert error["fp32"] < error["bf16"] / 2


# Under every strategy, with numbers of the optimizer that are not the usual ones.

SMALL = {
    "reduce_bucket_elements": 1000, "prefetch_bucket_elements": 0, "max_live_elements": 0,
    "persistence_threshold_elements": 0, "sub_group_elements": 5000,
}  # fmt: skip
ON_HOST = {"offload_optimizer": "cpu"}
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {  # the lowest stage that has it
    "plain": (0, {}),
    "selective": (0, {"activation_checkpointing": "selective"}),
    "full": (0, {"activation_checkpointing": "full"}),
    "offloaded": (0, {"activation_checkpointing": "offloaded"}),
    "tiled": (0, {"loss": "tiled"}),
    "small buckets": (0, SMALL),
    "overlapped": (1, {"overlap_comm": True}),
    "optimizer on the host": (1, ON_HOST),
    "parameters on the host": (3, {**ON_HOST, "offload_parameters": "cpu"}),
    "everything": (1, {"activation_checkpointing": "full", "loss": "tiled", **SMALL, **ON_HOST}),
}
EVERY = tuple(STRATEGIES)
ADAM = {
    "learning_rate": 5e-3,
    "optimizer": Optimizer(reference_batch=3, lr_rule="linear", beta1=0.8, beta2=0.999, epsilon=1e-6),
    "weight_decay": 0.1, "gradient_clipping": 0.0,
}  # fmt: skip
SCALED_RATE = 1e-2  # for batches of 6


def differences(engine: Engine) -> list[str]:
    """Return what DeepSpeed's engine does not do as the strategy says. Runs on ranks."""
    strategy, inner = engine.plan.strategy, engine.deepspeed
    zero = inner._config.zero_config
    checks: dict[str, tuple[Any, Any]] = {
        "stage": (inner.zero_optimization_stage(), strategy.zero_stage),
        "recomputes": (inner.module.is_gradient_checkpointing, strategy.activation_checkpointing != "off"),
        "tiles": (tiled_loss.is_applied(inner), strategy.loss == "tiled"),
    }
    whole_size = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in inner.module.parameters())
    if strategy.zero_stage:
        updated = sum(flat.numel() for flat in engine.zero.flat_tensors())
        summed_in = DTYPES[strategy.gradient_accumulation_dtype]
        checks |= {
            "sums gradients in": (inner.optimizer.gradient_accumulation_dtype, summed_in),
            "bucket": (zero.reduce_bucket_size, strategy.reduce_bucket_elements),
            "overlap": (bool(zero.overlap_comm), strategy.overlap_comm),
            "optimizer on the host": (inner.zero_use_cpu_optimizer(), strategy.offload_optimizer == "cpu"),
            "parts of the states": (updated < 1.2 * whole_size / dist.get_world_size(), True),
        }
    if strategy.zero_stage == 3:
        held = sum(parameter.numel() for parameter in inner.module.parameters())
        checks |= {
            "parameters on the host": (zero.offload_param is not None, strategy.offload_parameters == "cpu"),
            "parameters are split": (held < 0.1 * whole_size, strategy.persistence_threshold_elements == 0),
        }
    return [f"{name}: {found}, planned {planned}" for name, (found, planned) in checks.items() if found != planned]


def after_three_steps(zero_stage: int, names: tuple[str, ...]) -> dict[str, tuple[Gradient, list[str]]]:
    """All weights after three steps of AdamW under each strategy, and what is not applied. Runs on ranks."""
    found = {}
    for name in names:
        lowest, strategy = STRATEGIES[name]
        if zero_stage < lowest:
            continue
        with running(plan_here(zero_stage, 6, 2, ADAM, **strategy)) as engine:
            rates = {engine.train_step(ragged_samples(6, seed=step)).learning_rate for step in range(3)}
            assert rates == {SCALED_RATE}
            found[name] = whole(engine), differences(engine)
    return found


def three_steps_of_torch(dtype: torch.dtype = torch.float64) -> Gradient:
    """Return how far torch.optim.AdamW moves weights in three such steps, in one process."""
    model = tiny_gpt2().to(dtype)
    before = weights(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SCALED_RATE, weight_decay=0.1, betas=(0.8, 0.999), eps=1e-6, foreach=False
    )
    for step in range(3):
        plain_gradient(model, ragged_samples(6, seed=step), micro_batch=6)
        optimizer.step()
        optimizer.zero_grad()
    return {name: after - before[name] for name, after in weights(model).items()}


@pytest.mark.parametrize(
    ("fixture", "zero_stage", "names"),
    [
        ("two_ranks", 2, EVERY),
        ("two_ranks", 3, ("plain", "everything")),
        *(pytest.param("two_ranks", stage, EVERY, marks=EXHAUSTIVE) for stage in (0, 1, 3)),
        *(pytest.param("one_rank", stage, ("plain",), marks=EXHAUSTIVE) for stage in (0, 3)),
    ],
)
def test_each_strategy_is_applied_and_trains_as_torch_s_adamw_with_the_numbers_that_were_asked_for(
    fixture: str, zero_stage: int, names: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    (moved, bound), before = with_bound(three_steps_of_torch), weights(tiny_gpt2())
    ranks: Ranks = request.getfixturevalue(fixture)
    for of_rank in ranks.run(after_three_steps, zero_stage, names):
        assert {name: differ for name, (_, differ) in of_rank.items() if differ} == {}
        for name, (after, _) in of_rank.items():
            assert relative_error({key: after[key] - before[key] for key in after}, moved) < bound, name


def normed_gradient(micro_batch: int, zero_stage: int, choice: str | None) -> Gradient:
    """As `measured_gradient`, of a model with BatchNorm. Runs on ranks."""
    objective = SummedLoss(squared_error, example=points(1)[0])
    with running(
        plan_here(zero_stage, 16, micro_batch, {**SGD, "batch_norm": choice}), NormedNet(), objective
    ) as engine:
        engine.evaluate(points(4))  # which leaves modules in training mode
        engine.train_step(points(16))
        return applied(engine, weights(NormedNet()))


def gradient_of_normed_net(dtype: torch.dtype) -> Gradient:
    """Return the gradient of all points at once with running statistics, by plain PyTorch."""
    model = NormedNet().to(dtype).eval()
    batch = torch.utils.data.default_collate(points(16))
    (squared_error(model, {name: tensor.to(dtype) for name, tensor in batch.items()}) / 16).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("zero_stage", [0, 3, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (1, 2))])
@pytest.mark.parametrize(("fixture", "micro_batch"), [("one_rank", 8), ("two_ranks", 3)])
def test_with_frozen_statistics_batch_norm_is_exact_for_any_split(
    fixture: str, micro_batch: int, zero_stage: int, request: pytest.FixtureRequest
) -> None:
    reference, bound = with_bound(gradient_of_normed_net)
    ranks: Ranks = request.getfixturevalue(fixture)
    for gradient in ranks.run(normed_gradient, micro_batch, zero_stage, "frozen"):
        assert relative_error(gradient, reference) < bound


@pytest.mark.parametrize("choice", [None, "local"])
def test_statistics_of_the_own_micro_batch_depend_on_the_split(choice: str | None, one_rank: Ranks) -> None:
    of_eight, of_two = (one_rank.run(normed_gradient, micro_batch, 0, choice)[0] for micro_batch in (8, 2))
    assert relative_error(of_two, of_eight) > 0.1


def losses(zero_stage: int, activation_checkpointing: str, dropout: float) -> list[float]:
    """Four steps on eight ragged samples each. Runs on ranks."""
    model = tiny_gpt2(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    torch.manual_seed(dist.get_rank())
    with running(plan_here(zero_stage, activation_checkpointing=activation_checkpointing), model) as engine:
        return losses_of(engine, 0, 4)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.exhaustive), 0.1])
@pytest.mark.parametrize("zero_stage", [*(pytest.param(stage, marks=EXHAUSTIVE) for stage in (0, 2)), 3])
def test_activation_checkpointing_does_not_change_the_losses(zero_stage: int, dropout: float, two_ranks: Ranks) -> None:
    kept = two_ranks.run(losses, zero_stage, "off", dropout)[0]
    assert two_ranks.run(losses, zero_stage, "full", dropout)[0] == kept
    assert two_ranks.run(losses, zero_stage, "selective", dropout)[0] == kept
    assert kept[-1] < kept[0]


def messages_of_steps(batches: list[list[dict[str, list[int]]]]) -> list[str]:
    """Return what train_step says about samples it cannot use. Runs on ranks."""
    messages = []
    with running(plan_here(0, 2)) as engine:
        for samples in batches:
            with pytest.raises(FrugalError) as raised:
                engine.train_step(samples)
            messages.append(str(raised.value))
    return messages


def test_a_batch_without_targets_is_refused(one_rank: Ranks) -> None:
    ignored = {"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}
    ((of_ignored, of_none),) = one_rank.run(messages_of_steps, [[ignored, ignored], []])
    assert "because every label of its 2 samples is ignored" in of_ignored
    assert of_none.startswith("the global batch is empty")


def message_of_a_wrong_plan(world_size: int) -> str:
    """Return what initialize says about a plan for another world, or another plan on each rank. Runs on ranks."""
    global_batch = 8 if world_size != 2 else 8 + dist.get_rank()
    plan = plan_by_hand(world_size=world_size, global_batch=global_batch, micro_batch=2, zero_stage=0)
    with pytest.raises(FrugalError) as raised:
        initialize(tiny_gpt2(), plan, CausalLM())
    return f"{raised.value.exit_code} {raised.value}"


def test_a_plan_for_another_world_and_different_plans_are_refused(two_ranks: Ranks) -> None:
    assert two_ranks.run(message_of_a_wrong_plan, 4)[1] == (
        "4 the plan is for 4 ranks, this run has 2\n\nhint: plan again for 2 GPUs, or start 4 processes"
    )
    for message in two_ranks.run(message_of_a_wrong_plan, 2):
        assert message.startswith("4 the ranks were given different plans\n")
        assert f": rank 1 on {socket.gethostname()}\n" in message
