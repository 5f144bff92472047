"""The loop, its learning rates, its log and its settings; and that a killed run continues as if nothing had been."""

import gc
import io
import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from rich.console import Console

from frugal.errors import CheckpointError, RequestError
from frugal.training import checkpoint, generators, loop, settings, stopping
from frugal.training.batches import GlobalBatches, Position
from frugal.training.checkpoint import Progress
from frugal.training.engine import StepResult, initialize
from frugal.training.evaluate import Evaluation
from frugal.training.log import Log
from frugal.training.objectives import CausalLM
from frugal.training.schedule import factor
from frugal.training.settings import Settings
from tests.plans import plan_by_hand
from tests.ranks import Ranks
from tests.training.models import ragged_samples, tiny_gpt2

# Learning rates.


def rates(schedule: Any, warmup_steps: int, total_steps: int) -> list[float]:
    return [
        factor(step, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps)
        for step in range(total_steps)
    ]


def test_warmup_rises_evenly_to_the_peak_and_wastes_no_step() -> None:
    assert rates("constant", 4, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_from_the_peak_and_never_reach_zero_in_a_step() -> None:
    assert rates("linear", 0, 4) == [1.0, 0.75, 0.5, 0.25]
    assert rates("cosine", 1, 5) == pytest.approx([1.0, 1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert all(rate > 0 for rate in rates("cosine", 3, 200))


def test_steps_beyond_the_end_keep_the_last_value() -> None:
    assert factor(9, schedule="cosine", warmup_steps=0, total_steps=5) == 0.0


# Settings.

SOME = Settings(
    data=("a.txt", "b.txt"), validation_data=("c.txt",), test_data=("d.txt",), tokenizer="folder", limit=3,
    skip_bad_rows=True, steps=7, too_long="skip", schedule="linear", warmup_steps=2, eval_every=3, save_every=0,
    keep=5, async_save=True, on_nan="skip", seed=9, out=Path("there"), validation_fraction=0.25,
    validation_samples=12, resume=True, accept_changed_data=True, text_column="t", label_column="l", source_column="s",
    target_column="g",
)  # fmt: skip


def parsed(arguments: list[str]) -> Settings:
    """What the ranks understand."""

    @click.command()
    @settings.options
    def command(**flags: Any) -> None:
        nonlocal understood
        understood = settings.collect(flags, {})

    understood = Settings()
    command.main(arguments, standalone_mode=False)
    return understood


@pytest.mark.parametrize("asked", [Settings(), SOME, replace(Settings(), epochs=3)])
def test_the_ranks_understand_what_was_asked(asked: Settings) -> None:
    assert parsed(asked.arguments()) == asked


def test_every_setting_is_tried_above() -> None:
    assert [f.name for f in fields(Settings) if getattr(SOME, f.name) == f.default] == ["epochs"]


def test_a_run_to_resume_need_not_be_told_again(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_bytes(replace(SOME, out=tmp_path).record())
    flags = {"resume": True, "accept_changed_data": True, "epochs": 2, "data": ()}
    resumed = settings.collect(flags, settings.earlier(tmp_path))
    assert resumed == replace(SOME, out=tmp_path, steps=None, epochs=2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "--steps is 0\n  because it must be at least 1"),
        ({"save_every": -1}, "--save-every is -1\n  because it must be at least 0"),
        (
            {"validation_fraction": 1.0},
            "--validation-fraction is 1.0\n"
            "  because it is the part of the data that is not trained on: at least 0, less than 1",
        ),
        ({"steps": 3, "epochs": 3}, "--steps and --epochs were both given\n\nhint: leave one of them out"),
        (
            {"steps": 3, "warmup_steps": 4},
            "--warmup-steps 4 is more than --steps 3\n  because the learning rate would never reach its peak",
        ),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        settings.collect(values, {})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stepps": 3}, "unknown setting `stepps` in [train]\n\nhint: did you mean `steps`?"),
        ({"steps": "3"}, "`steps` in [train] is '3'\n  because it must be a whole number"),
        ({"data": [1]}, "`data` in [train] is [1]\n  because it must be a path or a list of paths"),
        ({"resume": 1}, "`resume` in [train] is 1\n  because it must be true or false"),
        ({"tokenizer": 5}, "`tokenizer` in [train] is 5\n  because it must be text"),
        (
            {"schedule": "step"},
            "`schedule` in [train] is 'step'\n  because it must be one of cosine, linear, constant",
        ),
    ],
)
def test_a_wrong_table_in_frugal_toml_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        settings.collect({}, table)
    assert str(raised.value) == message


# The log.

MIB = 1 << 20


def result(loss: float = 2.5, targets: int = 1000) -> StepResult:
    return StepResult(loss=loss, targets=targets, samples=8, grad_norm=0.5, learning_rate=3e-4)


def logged(folder: Path, total_steps: int, *, terminal: bool = False, first_step: int = 0) -> tuple[Log, io.StringIO]:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, highlight=False, soft_wrap=True, width=120)
    log = Log(folder, rank=0, planned_bytes=400 * MIB, total_steps=total_steps, first_step=first_step, console=console)
    return log, written


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_people_and_programs_read(tmp_path: Path) -> None:
    log, written = logged(tmp_path, 3)
    with log:
        log.step(1, result(), 0.5)
        log.step(2, result(loss=float("nan")), 1.5)
        log.memory(2, 396 * MIB)
        log.evaluation(2, Evaluation(loss=1.0, targets=70, samples=7))
    assert written.getvalue().splitlines() == [
        "step 1/3  loss 2.5000  lr 3.00e-04  2,000 tokens/s  1.0 s left  memory 400.0 MiB",
        "step 2/3  loss nan  lr 3.00e-04  1,000 tokens/s  1.0 s left  memory 400.0 MiB",
        "memory: planned 400.0 MiB, measured 396.0 MiB (-1.0 %)",
        "step 2/3  validation loss 1.0000  perplexity 2.72  (7 samples)",
    ]
    first, second, memory, evaluation = records(tmp_path)
    assert first.pop("time") > 1e9
    assert first == {
        "event": "step", "step": 1, "loss": 2.5, "targets": 1000, "samples": 8, "learning_rate": 3e-4,
        "grad_norm": 0.5, "tokens_per_second": 2000.0, "memory_bytes": None,
    }  # fmt: skip
    assert second["loss"] is None
    assert (memory["planned_bytes"], memory["measured_bytes"]) == (400 * MIB, 396 * MIB)
    assert (evaluation["event"], evaluation["perplexity"]) == ("evaluation", pytest.approx(2.718282))


def test_a_long_run_prints_few_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    log, written = logged(tmp_path, 1000)
    with log:
        for step in range(1, 1001):
            log.step(step, result(), 0.1)
    lines = written.getvalue().splitlines()
    assert len(lines) == 41
    assert (lines[0][:9], lines[-1][:14]) == ("step 1/10", "step 1000/1000")
    assert len(records(tmp_path)) == 1000


def test_a_terminal_shows_one_line_that_moves_and_keeps_what_is_said(tmp_path: Path) -> None:
    log, written = logged(tmp_path, 9, terminal=True)
    with log:
        log.step(1, result(), 0.5)
        log._progress.refresh()
        log.say("this stays")
    text = written.getvalue()
    assert "step 1/9" in text
    assert "2,000 tokens/s" in text
    assert "\x1b[2K" in text.split("this stays")[0]  # the line of progress was erased to make room
    assert "this stays\n" in text


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Log(tmp_path, rank=1, planned_bytes=1, total_steps=1) as log:
        log.step(1, result(), 0.5)
        log.memory(1, 1)
        log.evaluation(1, Evaluation(loss=1.0, targets=1, samples=1))
        log.say("nothing")
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_drops_the_records_of_steps_that_are_done_again(tmp_path: Path) -> None:
    log, _ = logged(tmp_path, 9)
    with log:
        for step in (1, 2, 3):
            log.step(step, result(), 0.1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')  # killed while writing
    log, _ = logged(tmp_path, 9, first_step=2)
    with log:
        log.step(3, result(), 0.1)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_a_log_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        Log(tmp_path / "nowhere", rank=0, planned_bytes=1, total_steps=1)
    assert str(raised.value) == (
        f"cannot write {tmp_path}/nowhere/metrics.jsonl\n  because No such file or directory\n\n"
        "hint: make room, then continue with --resume, or choose another --out"
    )


# The loop.

SAMPLES = ragged_samples(20)


def train(
    folder: Path, world_size: int, zero_stage: int = 2, *, dropout: float = 0.1, die: str = "", **changes: Any
) -> list[dict[str, Any]]:
    """A run of 8 steps on 20 samples, as `frugal.training.run` puts it together; runs on ranks.

    `die` makes rank 1 end with SIGKILL in the middle of step 6, or of saving step 6, or tells it to stop in step 5.
    """
    asked = Settings(**{"steps": 8, "eval_every": 4, "save_every": 3, "out": folder} | changes)
    rank = torch.distributed.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_by_hand(
        world_size=world_size, global_batch=6, micro_batch=2, zero_stage=zero_stage, request={"learning_rate": 1e-2}
    )
    model = tiny_gpt2(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    batches = GlobalBatches(SAMPLES, global_batch=6, seed=asked.seed)
    total_steps = loop.steps_of(batches, asked)
    engine = initialize(
        model, plan, CausalLM(),
        learning_rate_schedule=lambda step: factor(step, schedule="cosine", warmup_steps=2, total_steps=total_steps),
    )  # fmt: skip
    generators.seed_all(rank)
    random.seed(rank)
    start = checkpoint.load(engine, asked.checkpoints).progress if asked.resume else Progress(step=0)
    if die == "in a step" and rank == 1:
        _kill_in(engine.deepspeed, "backward", signal.SIGKILL, when=lambda: engine.deepspeed.global_steps == 5)
    if die == "told to stop" and rank == 1:
        _kill_in(engine.deepspeed, "backward", signal.SIGTERM, when=lambda: engine.deepspeed.global_steps == 4)
    if die == "in a save" and rank == 1:
        _kill_in(torch, "save", signal.SIGKILL, when=lambda: engine.deepspeed.global_steps == 6)
    log = Log(folder, rank=rank, planned_bytes=1, total_steps=total_steps, first_step=start.step)
    with log, stopping.listening():
        loop.train(engine, batches, SAMPLES[:5], asked, log, start=start, total_steps=total_steps)
    engine.destroy()
    gc.collect()
    return records(folder)


def _kill_in(owner: Any, name: str, number: signal.Signals, *, when: Callable[[], bool]) -> None:
    usual = getattr(owner, name)

    def killed(*args: Any, **kwargs: Any) -> Any:
        answer = usual(*args, **kwargs)
        if when():
            os.kill(os.getpid(), number)
        return answer

    setattr(owner, name, killed)


def trajectory(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Everything in the records but time and speed."""
    return [(r["event"], r["step"], r["loss"], r.get("learning_rate"), r.get("grad_norm")) for r in found]


@pytest.mark.parametrize(
    ("zero_stage", "die", "last"),
    [pytest.param(2, "in a step", "step-000003", marks=pytest.mark.exhaustive), (3, "in a save", "step-000003")],
)
def test_a_killed_run_continues_as_if_nothing_had_been(
    zero_stage: int, die: str, last: str, tmp_path: Path, two_ranks: Ranks
) -> None:
    whole = trajectory(two_ranks.run(train, tmp_path / "whole", 2, zero_stage)[0])
    assert [(event, step) for event, step, *_ in whole] == [
        *[("step", step) for step in (1, 2, 3, 4)], ("evaluation", 4),
        *[("step", step) for step in (5, 6, 7, 8)], ("evaluation", 8),
    ]  # fmt: skip
    with pytest.raises(AssertionError, match=r"died|failed"):
        two_ranks.run(train, tmp_path / "killed", 2, zero_stage, die=die)
    assert (tmp_path / "killed" / "checkpoints" / "latest").read_text() == f"{last}\n"
    resumed = two_ranks.run(train, tmp_path / "killed", 2, zero_stage, resume=True)[0]
    assert trajectory(resumed) == whole
    left = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
    assert left == ["latest", "step-000006", "step-000008"]


def test_one_rank_told_to_stop_ends_all_after_the_step_with_nothing_lost(tmp_path: Path, two_ranks: Ranks) -> None:
    whole = trajectory(two_ranks.run(train, tmp_path / "whole", 2)[0])
    stopped = trajectory(two_ranks.run(train, tmp_path / "stopped", 2, die="told to stop")[0])
    assert stopped == [record for record in whole if record[1] <= 5]
    assert (tmp_path / "stopped" / "checkpoints" / "latest").read_text() == "step-000005\n"
    assert trajectory(two_ranks.run(train, tmp_path / "stopped", 2, resume=True)[0]) == whole


def test_one_rank_and_two_train_the_same_model(tmp_path: Path, one_rank: Ranks, two_ranks: Ranks) -> None:
    never = {"dropout": 0.0, "eval_every": 2, "save_every": 0, "epochs": 2, "steps": None}
    alone = trajectory(one_rank.run(train, tmp_path / "1", 1, **never)[0])
    both = trajectory(two_ranks.run(train, tmp_path / "2", 2, **never)[0])
    assert not (tmp_path / "2" / "checkpoints").exists()
    assert len(alone) == 7 + 4  # 2 epochs of 20 samples in batches of 6, evaluated after 2, 4, 6 and the last
    for one, two in zip(alone, both, strict=True):
        assert one[:2] == two[:2]
        assert one[2] == pytest.approx(two[2], rel=1e-5)


def test_epochs_become_steps_for_samples_and_for_tokens() -> None:
    samples = GlobalBatches(SAMPLES, global_batch=6)
    assert [loop.steps_of(samples, Settings(epochs=epochs)) for epochs in (1, 2, 3)] == [4, 7, 10]
    assert loop.steps_of(samples, Settings()) == 4
    assert loop.steps_of(samples, Settings(steps=5)) == 5
    lengths = torch.tensor([len(sample["input_ids"]) for sample in SAMPLES]).numpy()
    tokens = GlobalBatches(SAMPLES, global_tokens=128, lengths=lengths)
    steps = loop.steps_of(tokens, Settings(epochs=2))
    assert tokens.after(steps).epoch >= 2 > tokens.after(steps - 1).epoch
    assert tokens.after(0) == Position()
