"""A small run with dropout, a decaying learning rate and seeded generators: all that a checkpoint has to keep."""

import gc
import hashlib
import random
from pathlib import Path
from typing import Any

import torch

from bench.plans import plan_by_hand
from frugal.checkpoint import saving
from frugal.checkpoint.progress import Progress
from frugal.data.batches import Position
from frugal.data.sources import Provenance
from frugal.engine.engine import Engine, initialize
from frugal.models.objectives import CausalLM
from frugal.planning.plan import Plan
from tests.engine.small_models import ragged_samples, tiny_gpt2

GLOBAL_BATCH, WORLD_SIZE = 6, 2


def plan_for(zero_stage: int, precision: str = "fp32", world_size: int = WORLD_SIZE, **strategy: Any) -> Plan:
    return plan_by_hand(
        world_size=world_size, global_batch=GLOBAL_BATCH, micro_batch=2, zero_stage=zero_stage,
        request={"precision": precision, "learning_rate": 1e-2}, strategy=strategy,
    )  # fmt: skip


def start(plan: Plan, *, seed: int = 0, dropout: float = 0.1, **changes: Any) -> Engine:
    """An engine with dropout, a decaying learning rate and generators seeded by rank."""
    model = tiny_gpt2(seed=seed, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **changes)
    random.seed(seed)
    torch.manual_seed(1000 * seed + torch.distributed.get_rank())
    return initialize(model, plan, CausalLM(), learning_rate_schedule=lambda step: 1 / (1 + step))


def stop(engine: Engine) -> None:
    engine.destroy()
    gc.collect()


def steps(engine: Engine, first: int, last: int) -> list[tuple[float, float]]:
    """Loss and learning rate of the steps from `first` to before `last`."""
    results = [engine.train_step(ragged_samples(GLOBAL_BATCH, seed=step)) for step in range(first, last)]
    return [(result.loss, result.learning_rate) for result in results]


def weights(engine: Engine) -> str:
    """A fingerprint of all weights and optimizer states of this rank."""
    optimizer = engine.deepspeed.optimizer
    return str(hashlib.sha256(repr(_numbers(optimizer.state_dict())).encode()).hexdigest())


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten().tolist()
    if isinstance(value, dict):
        return {str(key): _numbers(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [_numbers(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else None


def save_at(engine: Engine, folder: Path, step: int, **changes: Any) -> Path:
    progress = Progress(step=step, position=Position(1, step), data=Provenance(fingerprint="corpus"), **changes)
    return saving.save(engine, folder, progress)
