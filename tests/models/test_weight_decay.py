"""Without decay of norms and biases a run is torch's AdamW with HF Trainer's two parameter groups."""

import gc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.optimizers import Optimizer
from frugal.engine.engine import initialize
from frugal.errors import RequestError
from frugal.models.objectives import CausalLM
from tests.engine.gradients import with_bound
from tests.engine.small_models import ragged_samples, tiny_gpt2

RATE, DECAY, STEPS = 1e-2, 5.0, 4
"""A decay so strong that who takes part in it shows in the loss."""


def falling(step: int) -> float:
    return 1 / (1 + step)


def losses(
    world_size: int, zero_stage: int, strategy: dict[str, Any], *, decay_norms: bool = False, folder: Path | None = None
) -> list[float]:
    """Return the losses of steps with a falling rate, resumed in the middle if there is a folder; runs on ranks."""
    plan = plan_by_hand(
        world_size=world_size, global_batch=6, micro_batch=2, zero_stage=zero_stage, strategy=strategy,
        request={
            "learning_rate": RATE, "weight_decay": DECAY, "gradient_clipping": 0.0,
            "optimizer": Optimizer(decay_norms=decay_norms),
        },
    )  # fmt: skip
    engine = initialize(tiny_gpt2(), plan, CausalLM(), learning_rate_schedule=falling)
    trained = []
    for step in range(STEPS):
        if folder is not None and step == 2:
            engine.save(folder)
            engine.destroy()
            engine = initialize(tiny_gpt2(seed=1), plan, CausalLM(), learning_rate_schedule=falling)
            engine.load(folder)
        trained.append(engine.train_step(ragged_samples(6, seed=step)).loss)
    engine.destroy()
    gc.collect()
    return trained


def by_torch(dtype: torch.dtype) -> list[float]:
    """The same by torch alone, with the groups that HF Trainer makes."""
    model = tiny_gpt2().to(dtype)
    with TemporaryDirectory() as folder:  # Trainer makes it
        arguments = TrainingArguments(output_dir=folder, weight_decay=DECAY, report_to=[], use_cpu=True)
        groups = Trainer(model, arguments).create_optimizer().param_groups
    assert sorted(group["weight_decay"] for group in groups) == [0.0, DECAY]
    optimizer = torch.optim.AdamW(
        [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups],
        lr=RATE, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    taken, objective = [], CausalLM()
    for step in range(STEPS):
        batch = objective.collate(ragged_samples(6, seed=step))
        loss = objective.loss_sum(model, batch) / objective.count(batch)
        taken.append(loss.item())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = RATE / (1 + step)
        optimizer.step()
        optimizer.zero_grad()
    return taken


def test_what_decays_is_what_decays_in_hf_trainer_on_any_stage(one_rank: Ranks, two_ranks: Ranks) -> None:
    expected, bound = with_bound(by_torch)
    (all_decay,) = one_rank.run(losses, 1, 0, {}, decay_norms=True)
    assert abs(all_decay[-1] - expected[-1]) > 1e-3, "otherwise the test shows nothing"
    assert one_rank.run(losses, 1, 0, {})[0] == pytest.approx(expected, rel=bound)
    for trained in two_ranks.run(losses, 2, 2, {"offload_optimizer": "cpu"}):
        assert trained == pytest.approx(expected, rel=bound)


OTHERS = [pytest.param(stage, {}, marks=pytest.mark.exhaustive) for stage in (1, 2, 3)]


@pytest.mark.parametrize(("zero_stage", "strategy"), [(3, {"sub_group_elements": 20_000}), *OTHERS])
def test_a_resumed_run_goes_on_with_what_decays(
    zero_stage: int, strategy: dict[str, Any], two_ranks: Ranks, tmp_path: Path
) -> None:
    expected, bound = with_bound(by_torch)
    for trained in two_ranks.run(losses, 2, zero_stage, strategy, folder=tmp_path):
        assert trained == pytest.approx(expected, rel=bound)


def test_sgd_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"decay-norms` false is impossible with --optimizer sgd\n.*only AdamW's can"
    ):
        Optimizer(name="sgd", decay_norms=False)
