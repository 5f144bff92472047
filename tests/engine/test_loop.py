"""The loop, and that a killed run continues as if nothing had been."""

import itertools
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.ranks import Ranks
from bench.runs import records
from frugal.checkpoint import random_state
from frugal.config.learning_rate import Curve
from frugal.config.run_settings import RunSettings
from frugal.data.batches import GlobalBatches, Position
from frugal.engine import loop
from tests.engine.engines import plan_here, run_loop, running
from tests.engine.gradients import bound_of_losses
from tests.engine.small_models import ragged_samples, tiny_gpt2

SAMPLES = ragged_samples(20)


def train(
    folder: Path, zero_stage: int = 2, *, dropout: float = 0.1, die: str = "", **changes: Any
) -> list[dict[str, Any]]:
    """A run of 8 steps on 20 samples, as `frugal.engine.run` puts it together; runs on ranks.

    `die` makes rank 1 end with SIGKILL in the middle of step 6, or of saving step 6, or tells it to stop in step 5.
    """
    settings = RunSettings(**{"steps": 8, "eval_every": 4, "save_every": 3, "out": folder} | changes)
    rank = dist.get_rank()
    batches = GlobalBatches(SAMPLES, global_batch=6, seed=settings.seed)
    total_steps = loop.num_steps(batches, settings)
    rate = Curve(peak=1e-2, schedule="cosine", warmup_steps=2, total_steps=total_steps).factor
    model = tiny_gpt2(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    plan = plan_here(zero_stage, 6, 2, {"learning_rate": 1e-2})
    with running(plan, model, learning_rate_schedule=rate) as engine:
        random_state.seed_all(rank)
        random.seed(rank)
        if die and rank == 1:
            owner, name, number, steps = {
                "in a step": (engine.deepspeed, "backward", signal.SIGKILL, 5),
                "told to stop": (engine.deepspeed, "backward", signal.SIGTERM, 4),
                "in a save": (torch, "save", signal.SIGKILL, 6),
            }[die]
            _kill_in(owner, name, number, when=lambda: engine.deepspeed.global_steps == steps)
        run_loop(engine, batches, settings, evaluate=partial(engine.evaluate, SAMPLES[:5]))
    return records(folder)


def _kill_in(owner: Any, name: str, number: signal.Signals, *, when: Callable[[], bool]) -> None:
    usual = getattr(owner, name)

    def killed(*args: Any, **kwargs: Any) -> Any:
        answer = usual(*args, **kwargs)
        if when():
            os.kill(os.getpid(), number)
        return answer

    setattr(owner, name, killed)


def trajectory(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Everything in the records but time and speed."""
    return [
        (r["event"], r["step"], r["loss"], r.get("learning_rate"), r.get("grad_norm")) for r in records if "loss" in r
    ]


@pytest.mark.parametrize(
    ("zero_stage", "die", "last"),
    [pytest.param(2, "in a step", "step-000003", marks=pytest.mark.exhaustive), (3, "in a save", "step-000003")],
)
def test_a_killed_run_continues_as_if_nothing_had_been(
    zero_stage: int, die: str, last: str, tmp_path: Path, two_ranks: Ranks
) -> None:
    whole = trajectory(two_ranks.run(train, tmp_path / "whole", zero_stage)[0])
    assert [(event, step) for event, step, *_ in whole] == [
        *[("step", step) for step in (1, 2, 3, 4)], ("evaluation", 4),
        *[("step", step) for step in (5, 6, 7, 8)], ("evaluation", 8),
    ]  # fmt: skip
    with pytest.raises(AssertionError, match=r"died|failed"):
        two_ranks.run(train, tmp_path / "killed", zero_stage, die=die)
    assert (tmp_path / "killed" / "checkpoints" / "latest").read_text() == f"{last}\n"
    resumed = two_ranks.run(train, tmp_path / "killed", zero_stage, resume=True)[0]
    assert trajectory(resumed) == whole
    left = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
    assert left == ["latest", "step-000006", "step-000008", "written.json"]


def test_one_rank_told_to_stop_ends_all_after_the_step_with_nothing_lost(tmp_path: Path, two_ranks: Ranks) -> None:
    whole = trajectory(two_ranks.run(train, tmp_path / "whole")[0])
    stopped = trajectory(two_ranks.run(train, tmp_path / "stopped", die="told to stop")[0])
    last = stopped[-1][1]
    assert last in (5, 6), "a thread may hear of the signal in the next step"
    assert stopped == [record for record in whole if record[1] <= last]
    assert (tmp_path / "stopped" / "checkpoints" / "latest").read_text() == f"step-{last:06d}\n"
    assert trajectory(two_ranks.run(train, tmp_path / "stopped", resume=True)[0]) == whole


def test_one_rank_and_two_train_the_same_model(tmp_path: Path, one_rank: Ranks, two_ranks: Ranks) -> None:
    never = {"dropout": 0.0, "eval_every": 2, "save_every": 0, "epochs": 2, "steps": None}
    alone = trajectory(one_rank.run(train, tmp_path / "1", **never)[0])
    both = trajectory(two_ranks.run(train, tmp_path / "2", **never)[0])
    batches = [batch[:] for batch in itertools.islice(GlobalBatches(SAMPLES, global_batch=6).iterate(), 7)]
    bound = bound_of_losses(tiny_gpt2, batches, learning_rate=1e-2)
    assert not (tmp_path / "2" / "checkpoints").exists()
    assert len(alone) == 7 + 4  # 2 epochs of 20 samples in batches of 6, evaluated after 2, 4, 6 and the last
    for one, two in zip(alone, both, strict=True):
        assert one[:2] == two[:2]
        assert one[2] == pytest.approx(two[2], rel=bound)


def test_epochs_become_steps_for_samples_and_for_tokens() -> None:
    samples = GlobalBatches(SAMPLES, global_batch=6)
    assert [loop.num_steps(samples, RunSettings(epochs=epochs)) for epochs in (1, 2, 3)] == [4, 7, 10]
    assert loop.num_steps(samples, RunSettings()) == 4
    assert loop.num_steps(samples, RunSettings(steps=5)) == 5
    lengths = torch.tensor([len(sample["input_ids"]) for sample in SAMPLES]).numpy()
    tokens = GlobalBatches(SAMPLES, global_tokens=128, lengths=lengths)
    steps = loop.num_steps(tokens, RunSettings(epochs=2))
    assert tokens.after(steps).epoch >= 2 > tokens.after(steps - 1).epoch
    assert tokens.after(0) == Position()
