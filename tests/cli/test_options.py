"""Help that people can read, and other trainers' names answered with ours."""

from itertools import pairwise

import pytest

from frugal.cli import run
from frugal.config.other_names import OTHER_NAMES
from frugal.config.schema import PLAN_SETTINGS, SETTINGS
from tests.commands import Capture, frugal

ANSWERS = {
    "HF Trainer's": {
        "--per-device-train-batch-size 8": "--global-batch N is what you want kept; --micro-batch 8 pins the",
        "--gradient_accumulation_steps=4": "--global-batch N is what you want kept; --accumulation-steps 4 pins the",
        "--gradient-checkpointing": "leave it out, or pin it: --activation-checkpointing full",
        "--deepspeed ds.json": "`frugal plan -o DIR` writes DIR/ds_config.json; --zero-stage and --offload pin parts",
        "--bf16 True": "--precision bf16",
        "--output-dir there": "--out there",
        "--max-seq-length 512": "--seq-len 512",
        "--model-name-or-path gpt2": "--model gpt2",
        "--logging-steps 10": "leave it out",
        "--report-to wandb": "--track wandb",
        "--max-grad-norm 0.5": "--gradient-clipping 0.5",
        "--lr-scheduler-type cosine_with_restarts": "--schedule cosine",
        "--optim adamw_bnb_8bit": "--optimizer adamw-8bit",
        "--resume-from-checkpoint run/checkpoint-5": "--resume --out DIR",
        "--warmup-ratio 0.03": "--warmup 3%",
        "--early-stopping-patience 3": "--patience 3",
        "--dataset-name wikitext": "--data wikitext",
    },
    "other trainers'": {
        "--batch-size": "--global-batch N is what you want kept; --micro-batch N pins the per-GPU size"
    },
    "Megatron's": {"--adam-eps 1e-6": "--optimizer adamw,epsilon=1e-6"},
    "torchtitan's": {"--optimizer.beta2 0.999": "--optimizer adamw,beta2=0.999"},
    "torchrun's": {"--nproc-per-node 2": "--gpus 2, with --device cpu for CPU processes"},
}


@pytest.mark.parametrize(
    ("words", "whose", "hint"),
    [(words, whose, hint) for whose, each in ANSWERS.items() for words, hint in each.items()],
)
def test_another_trainers_flag_is_answered_with_ours(capsys: Capture, words: str, whose: str, hint: str) -> None:
    code, out, said = frugal(capsys, "train", *words.split())
    assert (code, out) == (2, "")
    assert said.startswith(f"error: {words.split()[0].partition('=')[0]} is {whose} name\n")
    assert f"\nhint: {hint}" in said


def test_a_flag_of_training_alone_is_said_to_be_one(capsys: Capture) -> None:
    assert frugal(capsys, "plan", "--eval-steps", "3")[2] == (
        "error: --eval-steps is HF Trainer's name\n\nhint: --eval-every 3, which `frugal train` has\n"
    )


@pytest.mark.parametrize("name", ["learning_rate", "seed", "weight_decay", "zero_stage"])
def test_names_that_mean_the_same_everywhere_are_ours(name: str) -> None:
    assert name in SETTINGS and name not in OTHER_NAMES


def test_no_other_name_is_ours_and_no_hint_names_a_flag_that_there_is_not() -> None:
    assert not OTHER_NAMES.keys() & {name for name, row in SETTINGS.items() if row.is_flag}
    ours = {row.flag for row in SETTINGS.values() if row.is_flag} | {"--set"}
    paths = {row.flag for row in SETTINGS.values()}
    for other in OTHER_NAMES.values():
        words = [word.strip(",;:") for word in other.hint.split()]
        assert {word for word in words if word.startswith("--")} <= ours
        assert {after.partition("=")[0] for word, after in pairwise(words) if word == "--set"} <= paths


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--grace", "--set train.grace=3"), ("--min-lr-ratio", "--schedule cosine,min-lr-ratio=3"),
        ("--no-decay-norms", "--optimizer adamw,decay-norms=3"), ("--held", "--mem 24G-3, of 24G in all"),
        ("--optimizer-states", "--optimizer adamw,states=3"), ("--validation-fraction", "--validation-data 300%"),
        ("--nvme-path", "--offload nvme:3"), ("--ssh-port", "`Port 3` in ~/.ssh/config"),
        ("--no-expandable-segments",
         "PYTORCH_ALLOC_CONF=expandable_segments:False in the environment, which plans follow"),
        ("--layer-modes", "--activation-checkpointing 3"), ("--target-column", "--columns target=3"),
        ("--train-tokens", "--steps N or --epochs N says how long to train"),
        ("--gpu-hour-price", "leave it out; `frugal plan` says with it what a run costs"),
    ],
)  # fmt: skip
def test_a_former_flag_is_answered_with_what_it_is_now(capsys: Capture, flag: str, hint: str) -> None:
    code, _, said = frugal(capsys, "train", flag, "3")
    assert code == 2 and said.endswith(f"hint: {hint}\n")


def test_a_flag_may_be_written_with_underscores_and_a_length_as_in_the_names_of_models(capsys: Capture) -> None:
    words = ["plan", "--gpus", "4", "--mem", "12G", "--seq-len", "4k", "--global_tokens", "100"]
    assert "a sample has up to 4096 tokens" in frugal(capsys, *words)[2]


@pytest.mark.parametrize("command", ["plan", "train", "explain", "dryrun"])
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_help_fits_a_terminal_and_begins_with_what_people_need_first(
    capsys: Capture, command: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run([command, flag]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    start = lines.index("What most runs need:")
    first = [line.split()[0].strip(",") for line in lines[start : lines.index("", start)] if line.startswith("  --")]
    expected = ["--model", "--global-batch", "--seq-len", "--lora", "--precision", "--learning-rate", "--gpus", "--mem"]
    expected += {"plan": ["--data", "--steps"], "train": ["--data", "--steps", "--out"]}.get(command, [])
    assert first == expected
    hidden = [row.flag for row in PLAN_SETTINGS.values() if row.is_expert]
    shown = {line.split()[0] for line in lines if line.startswith("  --")}
    assert (set(hidden) <= shown) == (flag == "--help-all")
    assert len(shown) <= 45 or flag == "--help-all"
