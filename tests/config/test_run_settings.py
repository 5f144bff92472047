"""What a run is asked for reaches every rank, and what cannot be is refused."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from frugal.config.run_settings import RunSettings, earlier_settings, run_settings
from frugal.config.schema import parse
from frugal.config.setting import settings_of
from frugal.errors import RequestError

SOME = RunSettings(
    data=("a.txt", "b.txt"), validation_data=("c.txt",), test_data=("d.txt",), tokenizer="folder", limit=3,
    skip_bad_rows=True, steps=7, too_long="skip", schedule="warmup_stable_decay", warmup_ratio=0.25,
    min_lr_ratio=0.1, decay_ratio=0.5, eval_every=3, save_every=5,
    keep=5, async_save=True, on_nan="skip", seed=9, out=Path("there"), validation_fraction=0.25,
    validation_samples=12, resume=True, accept_changed_data=True, grace=75, text_column="t", label_column="l",
    source_column="s", target_column="g", schedule_steps=8, track=("wandb",), format="messages",
    chat_template="chatml", train_on="all", callback=("c.py:C",), push_to_hub="me/mine",
    metric="m.py:f1", best="loss", best_mode="max", patience=3, save_best_model=True, tune=False,
)  # fmt: skip


def parsed(arguments: list[str]) -> RunSettings:
    """What the ranks understand."""
    return run_settings(parse(arguments, {}, settings_of(RunSettings)), {})


POWERED = RunSettings(schedule="polynomial", schedule_power=2.0, warmup_steps=3)
STREAMED = RunSettings(stream=True, shuffle_buffer=100, steps=3)


@pytest.mark.parametrize("asked", [RunSettings(), SOME, POWERED, STREAMED, replace(RunSettings(), epochs=3)])
def test_the_ranks_understand_what_was_asked(asked: RunSettings) -> None:
    assert parsed(asked.arguments()) == asked


def test_every_setting_is_tried_above() -> None:
    assert [f.name for f in fields(RunSettings) if getattr(SOME, f.name) == f.default] == [
        "stream", "shuffle_buffer", "epochs", "warmup_steps", "schedule_power",
    ]  # fmt: skip


def test_more_words_than_a_command_line_takes_reach_the_ranks_in_a_file(tmp_path: Path) -> None:
    many = replace(SOME, data=tuple(f"{'folder/' * 30}ÿ ü\n{number}.txt" for number in range(10_000)))
    (word,) = many.rank_words(tmp_path / "run")
    assert word == f"@{tmp_path}/run/arguments"
    assert parsed([word]) == many
    assert SOME.rank_words(tmp_path) == SOME.arguments()


def test_a_file_of_words_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^cannot read the arguments in gone\n  because No such file or directory$"):
        parsed(["@gone"])


def test_a_run_to_resume_need_not_be_told_again(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_bytes(replace(SOME, out=tmp_path).record())
    flags = {"resume": True, "accept_changed_data": True, "epochs": 2, "data": ()}
    resumed = run_settings(flags, earlier_settings(tmp_path))
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
        (
            {"steps": 3, "warmup_steps": 5, "schedule_steps": 4},
            "--warmup-steps 5 is more than --schedule-steps 4\n  because the learning rate would never reach its peak",
        ),
        (
            {"steps": 3, "schedule_steps": 2},
            "--schedule-steps 2 is less than the 3 steps of the run\n"
            "  because the cosine schedule ends at a learning rate of 0, and steps after it would change nothing\n\n"
            "hint: use --schedule-steps 3, or --schedule constant",
        ),
        (
            {"warmup_steps": 3, "warmup_ratio": 0.1},
            "--warmup-steps and --warmup-ratio were both given\n\nhint: leave one of them out",
        ),
        ({"warmup_ratio": 3.0}, "--warmup-ratio is 3\n  because it is a part: at least 0, at most 1"),
        ({"min_lr_ratio": 3.0}, "--min-lr-ratio is 3\n  because it is a part: at least 0, at most 1"),
        (
            {"schedule": "cosine_with_min_lr"},
            "--schedule cosine_with_min_lr was given without --min-lr-ratio\n"
            "  because what the learning rate is to end at is not known\n\n"
            "hint: add --min-lr-ratio 0.1, or use --schedule cosine, which ends at 0",
        ),
        (
            {"schedule": "inverse_sqrt", "min_lr_ratio": 0.1},
            "--min-lr-ratio was given with --schedule inverse_sqrt\n"
            "  because this schedule has no end to fall to\n\nhint: leave it out, or use --schedule cosine",
        ),
        (
            {"decay_ratio": 0.1},
            "--decay-ratio was given with --schedule cosine\n"
            "  because only warmup_stable_decay has one to choose\n\n"
            "hint: leave it out, or use --schedule warmup_stable_decay",
        ),
        (
            {"schedule": "warmup_stable_decay", "steps": 10, "warmup_steps": 6, "decay_ratio": 0.5},
            "6 steps of warmup and 5 of decay are more than --steps 10\n"
            "  because the learning rate would fall before it has reached its peak\n\n"
            "hint: shorten --warmup-steps or --decay-ratio",
        ),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        run_settings(values, {})
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
            "`schedule` in [train] is 'step'\n  because it must be one of cosine, linear, constant, "
            "constant_with_warmup, cosine_with_min_lr, polynomial, inverse_sqrt, warmup_stable_decay",
        ),
    ],
)
def test_a_wrong_table_in_frugal_toml_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        run_settings({}, table)
    assert str(raised.value) == message
