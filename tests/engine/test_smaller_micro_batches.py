"""Every smaller micro-batch is really applied, and trains as the plain run does."""

from typing import Any

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.engine.engine import initialize
from frugal.models import tiled_loss
from frugal.models.objectives import CausalLM
from frugal.planning.strategy import Strategy
from tests.engine.gradients import bound_of_losses
from tests.engine.small_models import ragged_samples, tiny_gpt2

SMALL = {
    "reduce_bucket_elements": 1000, "prefetch_bucket_elements": 0, "max_live_elements": 0,
    "persistence_threshold_elements": 0, "sub_group_elements": 5000,
}  # fmt: skip
HOST = {"offload_optimizer": "cpu"}
RUNGS: dict[str, dict[str, Any]] = {
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "offloaded": {"activation_checkpointing": "offloaded"},
    "tiled": {"loss": "tiled"},
    "small buckets": SMALL,
    "overlapped": {"overlap_comm": True},
    "optimizer on the host": HOST,
    "parameters on the host": {**HOST, "offload_parameters": "cpu"},
    "everything": {"activation_checkpointing": "full", "loss": "tiled", **SMALL, **HOST},
}
NEEDS_STAGE = {"overlapped": 1, "optimizer on the host": 1, "parameters on the host": 3, "everything": 1}


def trajectory(zero_stage: int, strategy: dict[str, Any], precision: str = "fp32") -> tuple[list[float], str]:
    """Losses of four AdamW steps on seven ragged samples each, and what is really on. Runs on ranks."""
    plan = plan_by_hand(
        world_size=2, global_batch=7, micro_batch=2, zero_stage=zero_stage,
        request={"learning_rate": 1e-3, "precision": precision}, strategy=strategy,
    )  # fmt: skip
    engine = initialize(tiny_gpt2().to(DTYPES[precision]), plan, CausalLM())
    losses = [engine.train_step(ragged_samples(7, seed=step)).loss for step in range(4)]
    applied = is_applied(engine.deepspeed, plan.strategy)
    engine.destroy()
    return losses, applied


def is_applied(engine: Any, strategy: Strategy) -> str:
    """What DeepSpeed's engine does not do as the strategy says; empty where all is well."""
    zero, differs = engine._config.zero_config, []
    checks: dict[str, tuple[Any, Any]] = {
        "stage": (engine.zero_optimization_stage(), strategy.zero_stage),
        "recomputes": (engine.module.is_gradient_checkpointing, strategy.activation_checkpointing != "off"),
        "tiles": (tiled_loss.is_applied(engine), strategy.loss == "tiled"),
    }
    if strategy.zero_stage:
        in_adam = [state["exp_avg"] for state in engine.optimizer.optimizer.state.values() if "exp_avg" in state]
        elements = sum(moment.numel() for moment in in_adam)
        whole = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        checks |= {
            "sums gradients in": (
                engine.optimizer.gradient_accumulation_dtype,
                DTYPES[strategy.gradient_accumulation_dtype],
            ),
            "bucket": (zero.reduce_bucket_size, strategy.reduce_bucket_elements),
            "overlap": (bool(zero.overlap_comm), strategy.overlap_comm),
            "optimizer on the host": (engine.zero_use_cpu_optimizer(), strategy.offload_optimizer == "cpu"),
            "parts of the states": (elements < 0.6 * whole, True),
        }
    if strategy.zero_stage == 3:
        held = sum(p.numel() for p in engine.module.parameters())
        checks |= {
            "parameters on the host": (zero.offload_param is not None, strategy.offload_parameters == "cpu"),
            "parameters are split": (held < 0.1 * whole, strategy.persistence_threshold_elements == 0),
        }
    for name, (found, planned) in checks.items():
        if found != planned:
            differs.append(f"{name}: {found}, planned {planned}")
    return "; ".join(differs)


def all_rungs(zero_stage: int) -> dict[str, tuple[list[float], str]]:
    """Every rung that this stage has. Runs on ranks."""
    return {
        name: trajectory(zero_stage, strategy)
        for name, strategy in {"plain": {}, **RUNGS}.items()
        if NEEDS_STAGE.get(name, 0) <= zero_stage
    }


@pytest.mark.parametrize("zero_stage", [2, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 1, 3))])
def test_every_rung_is_applied_and_trains_as_the_plain_run_does(zero_stage: int, two_ranks: Ranks) -> None:
    (plain, _) = two_ranks.run(trajectory, 0, {})[0]
    assert plain[-1] < plain[0]
    bound = bound_of_losses(tiny_gpt2, [ragged_samples(7, seed=step) for step in range(4)], learning_rate=1e-3)
    for losses, differs in two_ranks.run(all_rungs, zero_stage)[0].values():
        assert differs == ""
        assert losses == pytest.approx(plain, rel=bound)


@pytest.mark.parametrize("zero_stage", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_gradients_summed_in_bf16_train_about_as_those_summed_in_fp32(zero_stage: int, two_ranks: Ranks) -> None:
    (whole, _), (short, differs) = (
        two_ranks.run(trajectory, zero_stage, {"gradient_accumulation_dtype": dtype}, "bf16")[0]
        for dtype in ("fp32", "bf16")
    )
    assert differs == ""
    assert short == pytest.approx(whole, rel=2**-8)  # bf16 keeps 8 bits of each sum
    assert short != whole
