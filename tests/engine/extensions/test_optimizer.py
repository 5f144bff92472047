"""An optimizer of a user's own and groups of parameters train as plain torch does in one process, on any ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.optimizers import Optimizer
from frugal.engine.engine import initialize
from frugal.errors import FrugalError
from frugal.models.objectives import CausalLM
from tests.engine.engines import losses_of, running
from tests.engine.gradients import with_bound
from tests.engine.small_models import ragged_samples, tiny_gpt2

STEPS, STOP = 4, 2
GROUPS = {
    "*.bias": {"weight_decay": 0.0},
    "transformer.h.1.*": {"lr": 5e-3, "weight_decay": 2.0},
    "transformer.wte.*": {"lr": 1e-3},
}
REST = {"lr": 1e-2, "weight_decay": 1.0}


def nadam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Two moments, an average and a product that is one number; no optimizer of a plan's."""
    return torch.optim.NAdam(groups, **REST, decoupled_weight_decay=True, foreach=False)


def rmsprop(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, **REST, momentum=0.9, centered=True)


class Counting(torch.optim.Optimizer):
    """Averaged gradients, whose number of steps is a Python number, as those of many optimizers are."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": REST["lr"], "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("momentum_buffer", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                state["step"] = state.get("step", 0) + 1
                assert type(state["step"]) is int
                parameter.add_(state["momentum_buffer"], alpha=-group["lr"] / (1 - 0.9 ** state["step"]))


MAKE = {"nadam": nadam, "rmsprop": rmsprop, "adamw": None, "counting": Counting}


def falling(step: int) -> float:
    return 1 / (1 + step)


def plan_for(world_size: int, zero_stage: int, **request: Any) -> Any:
    return plan_by_hand(
        world_size=world_size, global_batch=6, micro_batch=2, zero_stage=zero_stage,
        request={
            "gradient_clipping": 0.0, "learning_rate": REST["lr"], "weight_decay": REST["weight_decay"], **request,
        },
        strategy={"sub_group_elements": 9000, "persistence_threshold_elements": 100, "reduce_bucket_elements": 20_000},
    )  # fmt: skip


def losses(zero_stage: int, which: str, first: int, last: int, load: Path | None, save: Path | None) -> list[float]:
    """Return the losses of the steps from `first` to before `last`; runs on ranks."""
    how = {"learning_rate_schedule": falling, "optimizer": MAKE[which], "parameter_groups": GROUPS}
    plan = plan_for(torch.distributed.get_world_size(), zero_stage)
    with running(plan, tiny_gpt2(seed=1 if load else 0), **how) as engine:
        if load is not None:
            engine.load(load)
        found = losses_of(engine, first, last)
        if save is not None:
            engine.save(save)
    return found


def by_torch(which: str, dtype: torch.dtype) -> list[float]:
    """The same by torch alone, each parameter in a group of its own."""
    model, objective = tiny_gpt2().to(dtype), CausalLM()
    groups = []
    for name, parameter in model.named_parameters():
        own = (
            GROUPS["*.bias"] if name.endswith(".bias") else GROUPS["transformer.h.1.*"]
            if name.startswith("transformer.h.1.") else GROUPS["transformer.wte.*"]
            if name.startswith("transformer.wte.") else {}
        )  # fmt: skip
        groups.append({"params": [parameter], **own})
    make = MAKE[which]
    betas: Any = plan_for(1, 0).request.optimizer.betas
    optimizer = torch.optim.AdamW(groups, **REST, betas=betas) if make is None else make(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
    found = []
    for step in range(STEPS):
        batch = objective.collate(ragged_samples(6, seed=step))
        loss = objective.loss_sum(model, batch) / objective.count(batch)
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("which", "zero_stage", "fixture"),
    [
        ("nadam", 0, "one_rank"),
        ("nadam", 3, "three_ranks"),
        ("adamw", 2, "two_ranks"),
        *(pytest.param(which, zero_stage, "two_ranks", marks=exhaustive) for which in MAKE for zero_stage in range(4)),
    ],
)
def test_it_trains_as_torch_does_in_one_process(
    which: str, zero_stage: int, fixture: str, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    expected, bound = with_bound(by_torch, which)
    for found in ranks.run(losses, zero_stage, which, 0, STEPS, None, None):
        assert found == pytest.approx(expected, rel=bound)


@pytest.mark.parametrize("which", ["nadam", pytest.param("adamw", marks=exhaustive)])
def test_it_goes_on_from_a_checkpoint_on_the_same_ranks_and_on_others(
    which: str, two_ranks: Ranks, one_rank: Ranks, tmp_path: Path
) -> None:
    before = two_ranks.run(losses, 2, which, 0, STOP, None, tmp_path)[0]
    expected, bound = with_bound(by_torch, which)
    for ranks, zero_stage in ((two_ranks, 2), (one_rank, 3)):
        after = ranks.run(losses, zero_stage, which, STOP, STEPS, tmp_path, None)[0]
        assert before + after == pytest.approx(expected, rel=bound)


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=exhaustive)])
def test_numbers_in_its_states_stay_numbers(zero_stage: int, one_rank: Ranks, tmp_path: Path) -> None:
    whole = one_rank.run(losses, zero_stage, "counting", 0, STEPS, None, None)[0]
    before = one_rank.run(losses, zero_stage, "counting", 0, STOP, None, tmp_path)[0]
    assert before + one_rank.run(losses, zero_stage, "counting", STOP, STEPS, tmp_path, None)[0] == whole


def muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Muon(groups, lr=1e-3)


def adafactor(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=1e-3)


def said(zero_stage: int, make: Any, groups: Any, free_bytes: int | None = None, **request: Any) -> str:
    """Return what initialize says instead of making an engine. Runs on ranks."""
    plan = plan_for(1, zero_stage, **request)
    if free_bytes is not None:
        memory = replace(plan.memory, usable_bytes=free_bytes)
        plan = replace(plan, memory=memory, model=replace(plan.model, trainable_parameters=1000))
    try:
        initialize(tiny_gpt2(), plan, CausalLM(), optimizer=make, parameter_groups=groups).destroy()
    except FrugalError as error:
        return f"{error.exit_code} {error}"
    return "nothing"


def test_what_does_not_update_each_element_by_itself_is_refused_under_zero(one_rank: Ranks) -> None:
    (of_muon,) = one_rank.run(said, 2, muon, None)
    assert of_muon.startswith(
        "2 Muon cannot be trained with under ZeRO\n  because ZeRO cuts parameters into flat parts"
    )
    (of_adafactor,) = one_rank.run(said, 3, adafactor, None)
    assert "because the same gradient cut in two parts gives other weights than in one\n" in of_adafactor
    assert one_rank.run(said, 0, adafactor, None) == ["nothing"]


def test_an_optimizer_that_needs_more_than_the_plan_leaves_is_refused(one_rank: Ranks) -> None:
    sgd = {"optimizer": Optimizer(name="sgd")}
    assert one_rank.run(said, 1, nadam, None, 8000, **sgd) == ["nothing"]
    (message,) = one_rank.run(said, 1, nadam, None, 7999, **sgd)
    assert message.startswith("4 NAdam needs more memory than was planned\n  because it keeps 8 bytes of each element")


def test_a_pattern_that_matches_nothing_and_decay_that_is_said_twice_are_refused(one_rank: Ranks) -> None:
    (message,) = one_rank.run(said, 2, None, {"*.biass": {"lr": 1.0}})
    assert message.startswith("2 no trained parameter is called like `*.biass`\n")
    (message,) = one_rank.run(said, 2, None, GROUPS, optimizer=Optimizer(decay_norms=False))
    assert message.startswith("2 optimizer.decay-norms = false was planned, and the optimizer's groups are given\n")
