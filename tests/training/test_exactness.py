"""The gradient of a global batch does not depend on how it was cut."""

import gc

import pytest
import torch

from frugal.training.engine import initialize
from frugal.training.loss import CausalLM
from tests.plans import plan_by_hand
from tests.ranks import Ranks
from tests.training.models import ragged_samples, tiny_gpt2

LEARNING_RATE = 1024.0  # so large that the rounding of weights hides nothing of the gradient


def reference_gradient(global_batch: int) -> dict[str, torch.Tensor]:
    """Plain PyTorch, one process, fp64, every sample by itself."""
    model, objective = tiny_gpt2().double(), CausalLM()
    batches = [objective.collate([sample]) for sample in ragged_samples(global_batch)]
    targets = sum(map(objective.count, batches))
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
        )
        (loss / targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def measured_gradient(world_size: int, global_batch: int, micro_batch: int, zero_stage: int, precision: str) -> tuple[dict[str, torch.Tensor], float]:
    """The gradient DeepSpeed applied, read off one SGD step: (before - after) / learning rate. Runs on ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    plan = plan_by_hand(
        world_size=world_size, global_batch=global_batch, micro_batch=micro_batch, zero_stage=zero_stage,
        request={"optimizer": "sgd", "learning_rate": LEARNING_RATE, "weight_decay": 0.0, "gradient_clipping": 0.0, "precision": precision},
    )  # fmt: skip
    model = tiny_gpt2(seed=torch.distributed.get_rank())  # rank 0's weights must win
    before = {name: p.detach().double().clone() for name, p in tiny_gpt2().named_parameters()}
    engine = initialize(model, plan, CausalLM())
    result = engine.train_step(ragged_samples(global_batch))
    gradient = {}
    for name, parameter in engine.module.named_parameters():
        after = safe_get_full_fp32_param(parameter)
        after = parameter.detach() if after is None else after
        gradient[name] = (before[name] - after.double().view_as(before[name])) / LEARNING_RATE
    engine.destroy()
    del engine, model
    gc.collect()
    return gradient, result.loss


def relative_error(gradient: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    difference = sum(float(((gradient[n] - reference[n]) ** 2).sum()) for n in reference)
    return float((difference / sum(float((g**2).sum()) for g in reference.values())) ** 0.5)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("world_size", "global_batch", "micro_batch"),
    [(1, 8, 8), (1, 8, 1), (2, 8, 2), (2, 8, 1), (3, 8, 2), (3, 100, 5), (3, 2, 4)],
)
def test_fp32_gradient_is_that_of_plain_pytorch(
    world_size: int, global_batch: int, micro_batch: int, zero_stage: int, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 3: "three_ranks"}[world_size])
    measured = ranks.run(measured_gradient, world_size, global_batch, micro_batch, zero_stage, "fp32")
    reference = reference_gradient(global_batch)
    for gradient, loss in measured:
        assert relative_error(gradient, reference) < 1e-6
        assert loss == measured[0][1]
