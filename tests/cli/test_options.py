"""Help that people can read, and other trainers' names answered with ours."""

from itertools import pairwise
from pathlib import Path

import pytest

from frugal.cli import run
from frugal.config.schema import PLAN_SETTINGS, SETTINGS
from frugal.config.setting import OTHER_NAMES
from tests.commands import frugal

HF = "error: {} is HF Trainer's name\n"
BATCH = "  because frugal keeps the global batch, and cuts it into micro-batches for the GPUs there are\n"
LOGGED = "  because every step is written to metrics.jsonl in the run's folder\n\nhint: leave it out\n"

ANSWERS = {
    "--per-device-train-batch-size 8": f"{HF}{BATCH}\n"
    "hint: --global-batch N is what you want kept; --micro-batch 8 pins the per-GPU size\n",
    "--batch-size": f"error: --batch-size is other trainers' name\n{BATCH}\n"
    "hint: --global-batch N is what you want kept; --micro-batch N pins the per-GPU size\n",
    "--gradient_accumulation_steps=4": f"{HF}{BATCH}\n"
    "hint: --global-batch N is what you want kept; --accumulation-steps 4 pins the micro-steps\n",
    "--gradient-checkpointing": HF
    + "  because frugal switches activation checkpointing on where it is needed or pays\n\n"
    "hint: leave it out, or pin it: --activation-checkpointing full\n",
    "--deepspeed ds.json": HF
    + "  because frugal writes DeepSpeed's JSON itself, from a plan that was checked against the memory there is\n\n"
    "hint: `frugal plan -o DIR` writes DIR/ds_config.json; --zero-stage and --offload pin parts of it\n",
    "--bf16 True": HF + "\nhint: --precision bf16\n",
    "--output-dir there": HF + "\nhint: --out there\n",
    "--max-seq-length 512": HF + "\nhint: --seq-len 512\n",
    "--model-name-or-path gpt2": HF + "\nhint: --model gpt2\n",
    "--logging-steps 10": HF + LOGGED,
    "--report-to wandb": HF + "\nhint: --track wandb\n",
    "--max-grad-norm 0.5": HF + "\nhint: --gradient-clipping 0.5\n",
    "--lr-scheduler-type cosine_with_restarts": HF + "\nhint: --schedule cosine\n",
    "--optim adamw_bnb_8bit": HF + "\nhint: --optimizer adamw-8bit\n",
    "--resume-from-checkpoint run/checkpoint-5": HF
    + "  because a run resumes from the newest checkpoint in its folder\n\nhint: --resume --out DIR\n",
    "--adam-eps 1e-6": "error: --adam-eps is Megatron's name\n\nhint: --set optimizer.epsilon=1e-6\n",
    "--optimizer.beta2 0.999": "error: --optimizer.beta2 is torchtitan's name\n\nhint: --set optimizer.beta2=0.999\n",
    "--nproc-per-node 2": "error: --nproc-per-node is torchrun's name\n\n"
    "hint: --gpus 2, or --ranks 2 for CPU processes\n",
    "--warmup-ratio 0.03": HF + "\nhint: --warmup 3%\n",
    "--early-stopping-patience 3": HF + "\nhint: --patience 3\n",
    "--dataset-name wikitext": HF + "\nhint: --data wikitext\n",
}  # fmt: skip


@pytest.mark.parametrize("words", ANSWERS)
def test_another_trainers_flag_is_answered_with_ours(capsys: pytest.CaptureFixture[str], words: str) -> None:
    flag = words.split()[0].partition("=")[0]
    assert frugal(capsys, "train", *words.split()) == (2, "", ANSWERS[words].replace("{}", flag))


def test_a_flag_of_training_alone_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert frugal(capsys, "plan", "--num-train-epochs", "3")[2] == (
        "error: --num-train-epochs is HF Trainer's name\n\nhint: --epochs 3, which `frugal train` has\n"
    )


def test_an_optimizer_that_is_asked_for_and_cannot_be_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    because = (
        "  because updates of DeepSpeed 0.19.8's Muon depend on the number of ranks that gradients are split over: in "
        "bf16 under ZeRO-2, with gradients summed in fp32, those of one rank and of two differ by 95 %, and under "
        "ZeRO-3 it refuses reduce_scatter\n\nhint: use --optimizer adamw\n"
    )
    for command in ("plan", "train"):
        said = frugal(capsys, command, "--optimizer", "Muon")
        assert said == (2, "", f"error: --optimizer Muon is impossible\n{because}")
    file = tmp_path / "frugal.toml"
    file.write_text('optimizer = "muon"\n')
    said = frugal(capsys, "plan", "--config", str(file))
    assert said == (2, "", f"error: --optimizer muon is impossible in {file}\n{because}")
    assert "is not one of" in frugal(capsys, "plan", "--optimizer", "lion")[2]


@pytest.mark.parametrize("name", ["learning_rate", "seed", "weight_decay", "zero_stage"])
def test_names_that_mean_the_same_everywhere_are_ours(name: str) -> None:
    assert name in SETTINGS and name not in OTHER_NAMES


def test_no_other_name_is_ours_and_no_hint_names_a_flag_that_there_is_not() -> None:
    assert not OTHER_NAMES.keys() & {name for name, row in SETTINGS.items() if row.is_flag}
    ours = {row.flag for row in SETTINGS.values() if row.is_flag} | {"--ranks", "--set"}
    paths = {row.path for row in SETTINGS.values()}
    for other in OTHER_NAMES.values():
        words = [word.strip(",;:") for word in other.hint.split()]
        assert {word for word in words if word.startswith("--")} <= ours
        assert {after.partition("=")[0] for word, after in pairwise(words) if word == "--set"} <= paths


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--grace", "--set train.grace=3"), ("--min-lr-ratio", "--set schedule.min-lr-ratio=3"),
        ("--no-decay-norms", "--set optimizer.decay-norms=false"), ("--held", "--set held=3"),
        ("--layer-modes", "--activation-checkpointing 3"), ("--target-column", "--columns target=3"),
    ],
)  # fmt: skip
def test_a_former_flag_is_answered_with_what_it_is_now(
    capsys: pytest.CaptureFixture[str], flag: str, hint: str
) -> None:
    code, _, said = frugal(capsys, "train", flag, "3")
    assert code == 2 and said.endswith(f"hint: {hint}\n")


def test_a_command_may_be_called_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert frugal(capsys, "dryrun")[2].startswith("error: missing argument 'PLAN|MODEL|SCRIPT.py:STEP'")


def test_a_length_may_be_written_as_in_the_names_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpus", "4", "--mem", "12G", "--seq-len", "4k", "--global-tokens", "100"]
    assert "a sample has up to 4096 tokens" in frugal(capsys, *words)[2]


def test_a_flag_may_be_written_with_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--global-batch is 0" in frugal(capsys, "plan", "--gpus", "4", "--mem", "12G", "--global_batch", "0")[2]


@pytest.mark.parametrize("command", ["plan", "train", "explain", "dryrun"])
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_help_fits_a_terminal_and_begins_with_what_people_need_first(
    capsys: pytest.CaptureFixture[str], command: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run([command, flag]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    start = lines.index("What most runs need:")
    first = [line.split()[0].strip(",") for line in lines[start : lines.index("", start)] if line.startswith("  --")]
    expected = ["--model", "--global-batch", "--seq-len", "--lora", "--precision", "--learning-rate", "--gpus", "--mem"]
    expected += {"plan": ["--data"], "train": ["--data", "--steps", "--out"]}.get(command, [])
    assert first == expected
    hidden = [row.flag for row in PLAN_SETTINGS.values() if row.is_expert]
    shown = {line.split()[0] for line in lines if line.startswith("  --")}
    assert (set(hidden) <= shown) == (flag == "--help-all")
    assert len(shown) <= 45 or flag == "--help-all"
