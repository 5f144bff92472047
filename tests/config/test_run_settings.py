"""What a run is asked for reaches every rank, and what cannot be is refused."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from frugal.config.learning_rate import Schedule
from frugal.config.run_settings import MOST_CHARACTERS, RunSettings, earlier_settings
from frugal.config.schema import merged, parse, settings_of_toml
from frugal.config.setting import build, settings_of
from frugal.errors import RequestError

SOME = RunSettings(
    data=("a.txt", "b.txt"), validation_data=("c.txt",), test_data=("d.txt",), tokenizer="folder", limit=3,
    skip_bad_rows=True, steps=7, too_long="skip", warmup="25%",
    schedule=Schedule(name="warmup_stable_decay", min_lr_ratio=0.1, decay_ratio=0.5, steps=8), eval_every=3,
    save_every=5, keep=5, async_save=True, on_nan="skip", seed=9, out=Path("there"), validation_samples=12,
    resume=True, accept_changed_data=True, grace=75, columns="text=t,label=l",
    track=("wandb",), format="messages", chat_template="chatml", train_on="all", callback=("c.py:C",),
    metric="m.py:f1", best="f1:max", patience=3, mirror="s3://bucket/run",
)  # fmt: skip


def parsed(arguments: list[str]) -> RunSettings:
    """Return what the ranks understand."""
    return build(RunSettings, parse(arguments, {}, settings_of(RunSettings)))


def of_file(train: dict[str, Any]) -> RunSettings:
    """Return what [train] of a frugal.toml asks for."""
    return build(RunSettings, settings_of_toml({"train": train}, []))


POWERED = RunSettings(schedule=Schedule(name="polynomial", power=2.0), warmup="3", validation_data=("12.5%",))
STREAMED = RunSettings(stream=True, shuffle_buffer=100, steps=3)


@pytest.mark.parametrize("asked", [RunSettings(), SOME, POWERED, STREAMED, replace(RunSettings(), epochs=3)])
def test_the_ranks_understand_what_was_asked(asked: RunSettings) -> None:
    assert parsed(asked.arguments()) == asked


def test_every_setting_is_tried_above() -> None:
    assert [f.name for f in fields(RunSettings) if getattr(SOME, f.name) == f.default] == [
        "stream", "shuffle_buffer", "epochs",
    ]  # fmt: skip


def test_more_words_than_a_command_line_takes_are_refused_with_a_way_out() -> None:
    many = replace(SOME, data=tuple(f"folder/ÿ ü\n{number}.txt" for number in range(1000)))
    with pytest.raises(RequestError) as raised:
        many.arguments()
    assert f"and a command takes {MOST_CHARACTERS:,}" in raised.value.what and "--data @FILE" in str(raised.value.hint)
    listed = replace(SOME, data=("@list", "-a.txt"))
    assert parsed(listed.arguments()) == listed


def test_a_run_of_another_version_is_not_resumed_with_its_unknown_settings(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_bytes(b'{"steps": 3, "text_column": "text", "warmup_steps": 0}')
    with pytest.raises(RequestError) as raised:
        earlier_settings(tmp_path)
    assert "another version of frugal" in raised.value.what and "text_column, warmup_steps" in str(raised.value)


def test_a_run_to_resume_need_not_be_told_again(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_bytes(replace(SOME, out=tmp_path).record())
    flags = {"resume": True, "accept_changed_data": True, "epochs": 2, "data": ()}
    resumed = build(RunSettings, merged(earlier_settings(tmp_path), flags))
    assert resumed == replace(SOME, out=tmp_path, steps=None, epochs=2)


@pytest.mark.parametrize(
    ("values", "what", "hint"),
    [
        ({"steps": 0}, "--steps is 0", None),
        ({"save_every": -1}, "--save-every is -1", None),
        ({"validation_data": "100%"}, "--validation-data is 100%", None),
        ({"steps": 3, "epochs": 3}, "--steps and --epochs were both given", "leave one"),
        ({"track": ["wandb", "mine"]}, "--track is mine", None),
        ({"steps": 3, "warmup": 4}, "--warmup 4 is more than the 3 steps of the run", "5%"),
        ({"steps": 3, "warmup": "5", "schedule": {"steps": 4}}, "--warmup 5 is more than `steps` of", None),
        ({"steps": 3, "warmup": "150%"}, "--warmup 5 is more than the 3 steps of the run", "5%"),
        ({"warmup": "soon"}, "`warmup` in [train] of frugal.toml is 'soon'", None),
        ({"steps": 3, "schedule": {"steps": 2}}, "`steps` 2 of --schedule is less than", "schedule.steps=3"),
        ({"schedule": {"min_lr_ratio": 3.0}}, "`min-lr-ratio` of --schedule is 3", None),
        ({"schedule": {"steps": 0}}, "`steps` of --schedule is 0", None),
        ({"schedule": "polynomial,power=inf"}, "`power` of --schedule is inf", None),
        ({"schedule": "cosine_with_min_lr"}, "--schedule cosine_with_min_lr was given without", "min-lr-ratio=0.1"),
        ({"schedule": "inverse_sqrt,min-lr-ratio=0.1"}, "`min-lr-ratio` was given with", "cosine"),
        ({"schedule": {"decay-ratio": 0.1}}, "`decay-ratio` was given with --schedule cosine", "warmup_stable_decay"),
        ({"schedule": "warmup_stable_decay,decay-ratio=0.5", "steps": 10, "warmup": "6"},
         "6 steps of warmup and 5 of decay are more than the 10 steps of the run", "--warmup"),
        ({"columns": "body"}, "--columns is body", "text=body"),
        ({"best": "f1"}, "--best f1 was given without --metric", "--metric"),
        ({"best": "loss:most"}, "--best is loss:most", "f1:max"),
        ({"best": "loss", "save_every": 0}, "--best was given with --save-every 0", "--save-every"),
        ({"patience": 2}, "--patience was given without --eval-every", "--eval-every"),
        ({"metric": "m.py:f1", "eval_every": 0}, "--metric was given with --eval-every 0", None),
        ({"best": "loss", "validation_data": "0%"}, "--best was given, and no sample is kept for validation", "5%"),
        ({"stream": True, "epochs": 1}, "--epochs was given with --stream", "--steps"),
        ({"stream": True, "limit": 1}, "train.limit was given with --stream", "--steps"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(values: dict[str, Any], what: str, hint: str | None) -> None:
    with pytest.raises(RequestError) as raised:
        of_file(values)
    assert raised.value.what.startswith(what)
    assert (hint or "") in str(raised.value.hint)


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"stepps": 3}, "unknown setting `stepps` in [train] of frugal.toml"),
        ({"steps": "three"}, "`steps` in [train] of frugal.toml is 'three'"),
        ({"data": [1]}, "`data` in [train] of frugal.toml is [1]"),
        ({"columns": {"text": 1}}, "`columns` in [train] of frugal.toml is {'text': 1}"),
        ({"warmup": 10**400}, f"`warmup` in [train] of frugal.toml is {10**400}"),
        ({"resume": 1}, "`resume` in [train] of frugal.toml is 1"),
        ({"schedule": "step"}, "`name` of --schedule is step in [train] of frugal.toml"),
        ({"schedule": {"power": [2]}}, "`power` of --schedule is [2] in [train] of frugal.toml"),
        ({"warmup": "5 %"}, "`warmup` in [train] of frugal.toml is '5 %'"),
    ],
)
def test_a_wrong_table_in_frugal_toml_is_refused(table: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError) as raised:
        of_file(table)
    assert raised.value.what == what
    assert raised.value.because or raised.value.hint


@pytest.mark.parametrize(
    ("asked", "fraction", "files"),
    [((), 0.05, ()), (("10%",), 0.1, ()), (("0%",), 0.0, ()), (("a.txt", "b.txt"), 0.0, ("a.txt", "b.txt"))],
)
def test_validation_data_are_a_part_of_the_data_or_files(
    asked: tuple[str, ...], fraction: float, files: tuple[str, ...]
) -> None:
    made = build(RunSettings, {"validation_data": asked})
    assert (made.validation_fraction, made.validation_files) == (fraction, files)


def test_columns_are_text_or_a_table_and_name_their_own_kind_unless_told() -> None:
    made = of_file({"columns": {"text": "body", "label": "topic"}})
    assert made.named_columns() == {"text": "body", "label": "topic"}
    assert build(RunSettings, {"columns": "text=body, label=topic"}).named_columns() == made.named_columns()
    assert of_file({"columns": {"text": "question, in full"}}).named_columns() == {"text": "question, in full"}
