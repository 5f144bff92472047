"""The gradient of a global batch does not depend on how it was cut."""

import gc
import socket

import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.engine.engine import initialize
from frugal.errors import FrugalError
from frugal.models.objectives import CausalLM, SummedLoss
from tests.engine.gradients import SGD, Gradient, applied, bound_by, relative_error, weights, with_bound
from tests.engine.small_models import NormedNet, points, ragged_samples, squared_error, tiny_gpt2

EXHAUSTIVE = pytest.mark.exhaustive


def reference_gradient(global_batch: int, dtype: torch.dtype = torch.float64) -> Gradient:
    """Plain PyTorch, one process, every sample by itself."""
    model, objective = tiny_gpt2().to(dtype), CausalLM()
    batches = [objective.collate([sample]) for sample in ragged_samples(global_batch)]
    targets = sum(map(objective.count, batches))
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
        )
        (loss / targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def measured_gradient(
    world_size: int,
    global_batch: int,
    micro_batch: int | tuple[int, ...],
    zero_stage: int,
    precision: str = "fp32",
    accumulation_dtype: str = "fp32",
    **strategy: object,
) -> tuple[Gradient, float]:
    """The gradient DeepSpeed applied, read off one SGD step: (before - after) / learning rate. Runs on ranks."""
    plan = plan_by_hand(
        world_size=world_size, global_batch=global_batch, micro_batch=micro_batch, zero_stage=zero_stage,
        request={**SGD, "precision": precision},
        strategy={"gradient_accumulation_dtype": accumulation_dtype, **strategy},
    )  # fmt: skip
    model = tiny_gpt2(seed=torch.distributed.get_rank())  # rank 0's weights must win
    before = weights(tiny_gpt2())
    engine = initialize(model, plan, CausalLM())
    result = engine.train_step(ragged_samples(global_batch))
    gradient = applied(engine, before)
    engine.destroy()
    del engine, model
    gc.collect()
    return gradient, result.loss


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("world_size", "global_batch", "micro_batch"),
    [
        *(
            pytest.param(*split, marks=pytest.mark.exhaustive)
            for split in ((1, 8, 8), (1, 8, 1), (2, 8, 2), (2, 8, 1), (3, 100, 5))
        ),
        (3, 8, 2),
        (3, 2, 4),
    ],
)
def test_fp32_gradient_is_that_of_plain_pytorch(
    world_size: int, global_batch: int, micro_batch: int, zero_stage: int, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 3: "three_ranks"}[world_size])
    measured = ranks.run(measured_gradient, world_size, global_batch, micro_batch, zero_stage, "fp32")
    reference, bound = with_bound(reference_gradient, global_batch)
    for gradient, loss in measured:
        assert relative_error(gradient, reference) < bound
        assert loss == measured[0][1]


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize(
    ("micro_batch", "fixture"),
    [
        (1, "two_ranks"),
        pytest.param(8, "one_rank", marks=pytest.mark.exhaustive),
        pytest.param(1, "one_rank", marks=pytest.mark.exhaustive),
        pytest.param(4, "two_ranks", marks=pytest.mark.exhaustive),
    ],
)
def test_bf16_gradient_is_within_bf16_rounding(
    micro_batch: int, fixture: str, zero_stage: int, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    ((gradient, _), *_) = ranks.run(measured_gradient, ranks.world_size, 16, micro_batch, zero_stage, "bf16")
    reference = reference_gradient(16)
    assert relative_error(gradient, reference) < bound_by(reference_gradient(16, torch.bfloat16), reference)


@pytest.mark.exhaustive
def test_bf16_error_does_not_grow_with_accumulation(one_rank: Ranks) -> None:
    reference = reference_gradient(256)
    error = {
        dtype: relative_error(one_rank.run(measured_gradient, 1, 256, 1, 2, "bf16", dtype)[0][0], reference)
        for dtype in ("fp32", "bf16")
    }
    assert error["fp32"] < bound_by(reference_gradient(16, torch.bfloat16), reference_gradient(16))  # of fewer
    assert error["fp32"] < error["bf16"] / 2


@pytest.mark.parametrize("zero_stage", [*(pytest.param(stage, marks=EXHAUSTIVE) for stage in (0, 1)), 2, 3])
def test_ranks_may_take_different_micro_batches(zero_stage: int, three_ranks: Ranks) -> None:
    ((gradient, _), *_) = three_ranks.run(measured_gradient, 3, 100, (6, 3, 1), zero_stage)
    reference, bound = with_bound(reference_gradient, 100)
    assert relative_error(gradient, reference) < bound


SMALL_BUCKETS, ON_HOST, TILED = {"reduce_bucket_elements": 1000}, {"offload_optimizer": "cpu"}, {"loss": "tiled"}


@pytest.mark.parametrize(
    ("zero_stage", "strategy"),
    [
        *((stage, SMALL_BUCKETS | ON_HOST | TILED) for stage in (2, 3)),
        pytest.param(0, TILED, marks=pytest.mark.exhaustive),
        pytest.param(1, SMALL_BUCKETS | ON_HOST | TILED, marks=pytest.mark.exhaustive),
        *(
            pytest.param(stage, strategy, marks=pytest.mark.exhaustive)
            for stage in (1, 2, 3)
            for strategy in (SMALL_BUCKETS, ON_HOST, TILED)
        ),
    ],
)
def test_buckets_host_memory_and_the_tiled_loss_change_nothing(
    zero_stage: int, strategy: dict[str, object], two_ranks: Ranks
) -> None:
    ((gradient, _), *_) = two_ranks.run(measured_gradient, 2, 7, 2, zero_stage, **strategy)
    reference, bound = with_bound(reference_gradient, 7)
    assert relative_error(gradient, reference) < bound


ADAM = {"learning_rate": 1e-2, "weight_decay": 0.1, "gradient_clipping": 0.0}
NUMBERS = {"adam_beta1": 0.8, "adam_beta2": 0.999, "adam_epsilon": 1e-6}


def after_three_steps(zero_stage: int) -> Gradient:
    """All weights after three steps of AdamW on eight ragged samples each. Runs on ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    world_size = torch.distributed.get_world_size()
    plan = plan_by_hand(
        world_size=world_size, global_batch=8, micro_batch=2, zero_stage=zero_stage, request={**ADAM, **NUMBERS}
    )
    engine = initialize(tiny_gpt2(), plan, CausalLM())
    for step in range(3):
        engine.train_step(ragged_samples(8, seed=step))
    after = {}
    for name, parameter in engine.module.named_parameters():
        whole = safe_get_full_fp32_param(parameter)
        after[name] = (parameter.detach() if whole is None else whole).double().view(-1).clone()
    engine.destroy()
    del engine
    gc.collect()
    return after


def three_steps_of_torch(dtype: torch.dtype = torch.float64) -> Gradient:
    """How far torch.optim.AdamW moves weights in three such steps, in one process."""
    model, objective = tiny_gpt2().to(dtype), CausalLM()
    before = weights(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.999), eps=1e-6, foreach=False
    )
    for step in range(3):
        batch = objective.collate(ragged_samples(8, seed=step))
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: (after - before[name]).view(-1) for name, after in weights(model).items()}


@pytest.mark.parametrize(
    ("fixture", "zero_stage"),
    [
        ("two_ranks", 3),
        *(pytest.param("two_ranks", stage, marks=EXHAUSTIVE) for stage in (1, 2)),
        *(pytest.param("one_rank", stage, marks=EXHAUSTIVE) for stage in (0, 3)),
    ],
)
def test_betas_and_epsilon_are_those_asked_for(zero_stage: int, fixture: str, request: pytest.FixtureRequest) -> None:
    (moved, bound), before = with_bound(three_steps_of_torch), weights(tiny_gpt2())
    ranks: Ranks = request.getfixturevalue(fixture)
    for after in ranks.run(after_three_steps, zero_stage):
        assert relative_error({name: after[name] - before[name].view(-1) for name in after}, moved) < bound


def normed_gradient(
    world_size: int, micro_batch: int, zero_stage: int, choice: str | None
) -> tuple[Gradient, dict[str, torch.Tensor]]:
    """As `measured_gradient`, of a model with BatchNorm, and what that keeps after the step. Runs on ranks."""
    plan = plan_by_hand(
        world_size=world_size, global_batch=16, micro_batch=micro_batch, zero_stage=zero_stage,
        request={**SGD, "precision": "fp32", "batch_norm": choice},
    )  # fmt: skip
    engine = initialize(NormedNet(), plan, SummedLoss(squared_error, example=points(1)[0]))
    engine.evaluate(points(4))  # which leaves modules in training mode
    engine.train_step(points(16))
    gradient = applied(engine, weights(NormedNet()))
    kept = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    engine.destroy()
    return gradient, kept


def gradient_of_normed_net(training: bool, dtype: torch.dtype) -> Gradient:
    """Of all points at once, by plain PyTorch."""
    model = NormedNet().to(dtype).train(training)
    batch = torch.utils.data.default_collate(points(16))
    (squared_error(model, {name: tensor.to(dtype) for name, tensor in batch.items()}) / 16).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("zero_stage", [0, 3, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (1, 2))])
@pytest.mark.parametrize(("fixture", "micro_batch"), [("one_rank", 8), ("two_ranks", 3)])
def test_with_frozen_statistics_batch_norm_is_exact_for_any_split(
    fixture: str, micro_batch: int, zero_stage: int, request: pytest.FixtureRequest
) -> None:
    reference, bound = with_bound(gradient_of_normed_net, False)
    ranks: Ranks = request.getfixturevalue(fixture)
    for gradient, _ in ranks.run(normed_gradient, ranks.world_size, micro_batch, zero_stage, "frozen"):
        assert relative_error(gradient, reference) < bound


def test_statistics_of_the_own_micro_batch_depend_on_the_split(one_rank: Ranks) -> None:
    (of_eight, _), (of_two, _) = (one_rank.run(normed_gradient, 1, micro_batch, 0, None)[0] for micro_batch in (8, 2))
    assert relative_error(of_two, of_eight) > 0.1


@pytest.mark.parametrize(
    ("micro_batch", "zero_stage"),
    [(4, 0), (8, 3), *(pytest.param(8, stage, marks=EXHAUSTIVE) for stage in (0, 1, 2))],
)
def test_synchronised_statistics_are_those_of_one_rank_with_the_same_micro_steps(
    micro_batch: int, zero_stage: int, one_rank: Ranks, two_ranks: Ranks
) -> None:
    ((reference, kept),) = one_rank.run(normed_gradient, 1, micro_batch, 0, None)
    bound = 2 * with_bound(gradient_of_normed_net, True)[1]  # both are in fp32
    for gradient, own in two_ranks.run(normed_gradient, 2, micro_batch // 2, zero_stage, "sync"):
        assert relative_error(gradient, reference) < bound
        assert all(torch.allclose(own[name], kept[name], rtol=bound, atol=bound) for name in kept)


def losses(zero_stage: int, activation_checkpointing: str, dropout: float) -> list[float]:
    """Four steps on eight ragged samples each. Runs on ranks."""
    plan = plan_by_hand(
        world_size=2, global_batch=8, micro_batch=2, zero_stage=zero_stage,
        strategy={"activation_checkpointing": activation_checkpointing},
    )  # fmt: skip
    model = tiny_gpt2(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    torch.manual_seed(torch.distributed.get_rank())
    engine = initialize(model, plan, CausalLM())
    measured = [engine.train_step(ragged_samples(8, seed=step)).loss for step in range(4)]
    engine.destroy()
    return measured


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.exhaustive), 0.1])
@pytest.mark.parametrize("zero_stage", [*(pytest.param(stage, marks=EXHAUSTIVE) for stage in (0, 2)), 3])
def test_activation_checkpointing_does_not_change_the_losses(zero_stage: int, dropout: float, two_ranks: Ranks) -> None:
    kept = two_ranks.run(losses, zero_stage, "off", dropout)[0]
    assert two_ranks.run(losses, zero_stage, "full", dropout)[0] == kept
    assert two_ranks.run(losses, zero_stage, "selective", dropout)[0] == kept
    assert kept[-1] < kept[0]


def message_of_a_step_on(samples: list[dict[str, list[int]]]) -> str:
    """What train_step says about samples it cannot use. Runs on ranks."""
    engine = initialize(
        tiny_gpt2(), plan_by_hand(world_size=1, global_batch=2, micro_batch=2, zero_stage=0), CausalLM()
    )
    try:
        engine.train_step(samples)
    except FrugalError as error:
        return str(error)
    finally:
        engine.destroy()
    return "nothing"


def test_a_batch_without_targets_is_refused(one_rank: Ranks) -> None:
    ignored = {"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}
    assert one_rank.run(message_of_a_step_on, [ignored, ignored]) == [
        "the global batch has no target to learn from\n  because every label of its 2 samples is ignored"
    ]
    assert one_rank.run(message_of_a_step_on, [])[0].startswith("the global batch is empty")


def message_of_a_wrong_plan(world_size: int) -> str:
    """What initialize says about a plan for another world, or another plan on each rank. Runs on ranks."""
    global_batch = 8 if world_size != 2 else 8 + torch.distributed.get_rank()
    plan = plan_by_hand(world_size=world_size, global_batch=global_batch, micro_batch=2, zero_stage=0)
    try:
        initialize(tiny_gpt2(), plan, CausalLM())
    except FrugalError as error:
        return f"{error.exit_code} {error}"
    return "nothing"


def test_a_plan_for_another_world_is_refused(two_ranks: Ranks) -> None:
    assert two_ranks.run(message_of_a_wrong_plan, 4)[1] == (
        "4 the plan is for 4 ranks, this run has 2\n\nhint: plan again for 2 GPUs, or start 4 processes"
    )


def test_ranks_with_different_plans_are_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(message_of_a_wrong_plan, 2):
        assert message.startswith(
            "4 the ranks were given different plans\n  because another plan.json than that of rank 0"
        )
        assert f": rank 1 on {socket.gethostname()}\n" in message
