"""A cluster of unequal ranks, planned, dry-run and trained for real: as on one rank, and within the budgets."""

import json
from pathlib import Path

import pytest
import torch

import frugal
from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.engine.measure.two_steps import settled_collectives
from frugal.memory_watch import gauge
from frugal.models.resolve import resolve
from frugal.planning.plan import Plan
from tests.engine.engines import running
from tests.engine.gradients import bound_of_losses

SEQ_LEN, GLOBAL_BATCH, STEPS = 64, 22, 4
BUDGETS = ("4M", "9M")
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 2,
    "vocab_size": 256, "n_positions": SEQ_LEN, "bos_token_id": 0, "eos_token_id": 0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def samples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 256, (GLOBAL_BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def trained(plan: Plan, model: str) -> tuple[list[float], int]:
    """Losses of a few steps on the same full samples, and this rank's peak, bytes. Runs on ranks."""
    spec, batch = resolve(model, None), samples()
    with (
        settled_collectives(),
        gauge("cpu") as memory,
        running(plan, spec.build(dtype=torch.float32, seed=0), spec.objective()) as engine,
    ):
        results = [engine.train_step(batch) for _ in range(STEPS)]
        peak = memory.peak_bytes
    return [result.loss for result in results], peak


def test_a_planned_mixed_cluster_trains_as_one_rank_does_and_each_rank_keeps_its_budget(
    tmp_path: Path, one_rank: Ranks, two_ranks: Ranks
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = str(tmp_path)
    plan = frugal.plan(  # three micro-steps, so that the smaller rank is full
        model=model, device="cpu", mem=",".join(BUDGETS), global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN,
        precision="fp32", accumulation_steps=3, zero_stage=2, activation_checkpointing="off", loss="plain",
        learning_rate=1e-2,
    )  # fmt: skip
    small, large = plan.batch.sizes
    assert len(small) == len(large) == 3
    assert sum(small) + sum(large) == GLOBAL_BATCH
    assert max(small) < min(large), "the smaller rank takes fewer samples"

    alone = plan_by_hand(
        world_size=1, global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH, zero_stage=0,
        request={"learning_rate": plan.request.learning_rate, "seq_len": SEQ_LEN},
    )  # fmt: skip
    ((losses, _),) = one_rank.run(trained, alone, model)
    ranks = two_ranks.run(trained, plan, model)
    bound = bound_of_losses(
        lambda: resolve(model, None).build(dtype=torch.float32, seed=0), [samples()] * STEPS, learning_rate=1e-2
    )
    assert losses[-1] < losses[0] - 0.1
    for ours, _ in ranks:
        assert ours == pytest.approx(losses, rel=bound)

    budgets = [device.usable_bytes for device in plan.cluster.devices]
    peaks = [peak for _, peak in ranks]
    assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))
    assert peaks[1] > budgets[0], "the larger rank's share would not fit the smaller one"
    full = min(range(2), key=lambda rank: budgets[rank] - peaks[rank])
    assert plan.memory.total_bytes == pytest.approx(peaks[full], rel=0.02), "the fullest rank is as promised"
