"""`frugal train`, as people call it: real runs through DeepSpeed's launcher, and how they end."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
import pytest

from bench.runs import TINY, command, environment, frugal_train, plan, prepared, records
from frugal import cli
from frugal.cli import train
from frugal.config.request import Request
from frugal.planning.plan import Plan
from frugal.report.run import read_run
from tests import forked
from tests.commands import Capture
from tests.engine.reports.test_trackers import curves

ONE = ("--device", "cpu", "--gpus", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's config.json, text to train on, and plans for one and two CPU ranks."""
    return prepared(tmp_path_factory.mktemp("train"), 1, 2)


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path) -> tuple[int, str, str]:
    """A run of six steps through DeepSpeed's launcher."""
    return frugal_train(
        folder, "--plan", "plan2.json", "--data", "text.jsonl", "--steps", 6, "--eval-every", 3, "--save-every", 3,
        "--validation-data", "10%", "--out", "two", "--track", "tensorboard",
    )  # fmt: skip


def test_a_run_on_two_ranks_says_what_it_does(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    code, output, errors = on_two_ranks
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0] == f"random weights ({folder}/config.json names none); tokens are bytes"
    assert lines[1] == (
        f"training {folder}/config.json (0 parameters) for 6 steps of 8 samples on 2 ranks;"
        f" {len_of(folder, 'training')} samples, {len_of(folder, 'validation')} for validation"
    )
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "step 1/6", "step 2/6", lines[4], "step 3/6", "step 3/6", "step 4/6", "step 5/6", "step 6/6", "step 6/6",
        f"model written to {folder}/two/model",
    ]  # fmt: skip
    assert re.fullmatch(r"memory: planned 0.0 MiB, measured \d\.\d MiB \(\+inf %\)", lines[4])


def len_of(folder: Path, part: str) -> int:
    """Samples of the prepared data."""
    import datasets

    name = {"training": "train", "validation": "validation"}[part]
    (found,) = (folder / "cache" / "frugal" / "data").glob(f"*/{name}.arrow")
    return len(datasets.Dataset.from_file(str(found)))


def test_a_run_leaves_plan_record_metrics_checkpoints_and_model(
    folder: Path, on_two_ranks: tuple[int, str, str]
) -> None:
    run = folder / "two"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints", "ds_config.json", "logs", "metrics.jsonl", "model", "plan.json", "report.html", "tensorboard",
        "trackers.json", "train.json", "written.json",
    ]  # fmt: skip
    assert (run / "logs" / "rank_0.log").read_text().splitlines() == on_two_ranks[1].splitlines()
    assert (run / "logs" / "rank_1.log").exists()
    assert Plan.read(run / "plan.json") == Plan.read(folder / "plan2.json")
    assert (run / "checkpoints" / "latest").read_text() == "step-000006\n"
    steps = [record for record in records(run) if record["event"] == "step"]
    assert steps[0]["learning_rate"] == 0.01, "2.5e-3 for a batch of 2, by the linear rule for one of 8"
    evaluations = [record for record in records(run) if record["event"] == "evaluation"]
    assert [record["step"] for record in evaluations] == [3, 6]
    assert evaluations[1]["loss"] < evaluations[0]["loss"]
    assert [(each.event, each.step) for each in read_run(run).history.others if each.event in ("start", "end")] == [
        ("start", 0), ("end", 6)
    ]  # fmt: skip
    assert all(8 * 2 <= step["tokens"] <= step["positions"] <= 8 * 64 for step in steps)
    shown = curves(run / "tensorboard")
    assert shown["train/loss"] == [(record["step"], pytest.approx(record["loss"])) for record in steps]
    assert shown["eval/loss"] == [(record["step"], pytest.approx(record["loss"])) for record in evaluations]


@pytest.mark.exhaustive
def test_names_beyond_ascii_under_the_posix_locale(folder: Path) -> None:
    data, out = folder / "d\u00e4t\u00e4" / "t\u00e9xt.jsonl", folder / "r\u00fc\u00f1"
    data.parent.mkdir()
    shutil.copy(folder / "text.jsonl", data)
    posix = {**environment(folder), "LC_ALL": "POSIX"}
    for more in (("--steps", 2), ("--steps", 3, "--resume")):
        words = command("--plan", "plan1.json", "--data", data, "--out", out, *more)
        done = subprocess.run(words, cwd=folder, env=posix, capture_output=True, timeout=200)
        assert done.returncode == 0, done.stderr.decode()
    assert "model written to" in done.stdout.decode()
    assert json.loads((out / "train.json").read_text())["data"] == [str(data)]
    assert [record["step"] for record in records(out) if record["event"] == "step"] == [1, 2, 3]


@pytest.mark.exhaustive
def test_a_run_that_is_further_than_it_is_to_go_is_refused_and_stays_as_it_was(
    folder: Path, on_two_ranks: tuple[int, str, str]
) -> None:
    """Also with another plan, which is for the devices that it ran on where nothing is said of them."""
    before = (folder / "two" / "train.json").read_bytes()
    for more in ((), ("--zero-stage", 1)):
        code, _, errors = frugal_train(folder, "--resume", "--out", "two", "--steps", 5, *more)
        assert (code, errors) == (
            2,
            "error: the run in two is at step 6 already\n  because it was to end at step 5\n\n"
            "hint: resume with --steps 7 or more; `frugal export` writes its model\n",
        )
    assert (folder / "two" / "train.json").read_bytes() == before


def test_a_run_goes_on_with_what_there_is(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    shutil.copytree(folder / "two", folder / "elsewhere")
    code, output, errors = frugal_train(
        folder, "--resume", "--out", "elsewhere", *ONE, "--mem", "1G", "--zero-stage", 3, "--steps", 7
    )
    assert (code, errors) == (0, "")
    assert (
        "resumed at step 6 of elsewhere: 2 ranks -> 1 rank, ZeRO-2 -> ZeRO-3, "
        "learning rate of step 7 0 -> 0.0004952 (cosine over 6 steps -> cosine over 7 steps); "
        "global batch and order are unchanged"
    ) in output.splitlines()
    ours = Plan.read(folder / "elsewhere" / "plan.json")
    assert (ours.batch.global_batch, ours.request.seq_len, ours.request.precision) == (8, 64, "fp32")
    assert [record["step"] for record in records(folder / "elsewhere") if record["event"] == "step"] == [
        1, 2, 3, 4, 5, 6, 7,
    ]  # fmt: skip
    assert sorted(path.name for path in (folder / "elsewhere" / "checkpoints").glob("step-*")) == [
        "step-000006", "step-000007",
    ]  # fmt: skip


def test_a_run_goes_on_with_no_other_model_or_recipe_and_no_plan_is_computed_for_it(
    folder: Path, on_two_ranks: tuple[int, str, str]
) -> None:
    (folder / "wide.json").write_text(json.dumps(TINY | {"n_embd": 64}))
    for asked, said in (
        (("--model", "wide.json"), "is of another model\n  because it was made with "),
        (("--precision", "bf16"), "was made with precision fp32, this run has precision bf16\n"),
    ):
        code, output, errors = frugal_train(folder, "--resume", "--out", "two", *ONE, "--mem", "1G", *asked)
        assert (code, output) == (4, "") and errors.startswith(f"error: two/checkpoints/step-000006 {said}"), errors


def in_its_seventh_step(folder: Path, run: str) -> subprocess.Popen[str]:
    """A run that goes on from its sixth step and would not end by itself."""
    process = forked.popen(
        command("--resume", "--out", run, "--steps", 100_000, "--save-every", 0), cwd=folder, env=environment(folder),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 7/100000  loss "):
        assert process.poll() is None
    return process


def test_ctrl_c_ends_all_ranks_with_130(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    process = in_its_seventh_step(folder, "two")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n"), errors
    assert (folder / "two" / "checkpoints" / "latest").read_text() == "step-000006\n"


def test_a_killed_rank_ends_the_run_and_is_named(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    shutil.copytree(folder / "two", folder / "killed")
    process = in_its_seventh_step(folder, "killed")
    family = psutil.Process(process.pid).children(recursive=True)
    next(rank for rank in _ranks_of(process) if "--local_rank=1" in rank.cmdline()).kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert errors.endswith(
        "error: a rank was ended by SIGKILL\n  because somebody sent it, or Linux: `dmesg` says which processes it "
        "ended for want of host memory\n\nhint: continue from step-000006 with --resume\n"
    )
    assert psutil.wait_procs(family, timeout=30)[1] == [], "all have ended"


@pytest.mark.exhaustive
def test_ctrl_c_while_ranks_start_is_an_interrupt_too(folder: Path) -> None:
    process = forked.popen(
        command("--plan", "plan2.json", "--data", "text.jsonl", "--steps", 9, "--out", "early"),
        cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (ranks := _ranks_of(process)):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n"), errors
    assert psutil.wait_procs(ranks, timeout=30)[1] == [], "all have ended"


def _ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):  # one may end while it is looked at
        family = psutil.Process(process.pid).children(recursive=True)
        return [each for each in family if any("--local_rank=" in word for word in each.cmdline())]
    return []


PLANNING = (
    "--mem", "1G", "--model", "config.json", "--seq-len", "64", "--global-batch", "8", "--max-tokens-per-gpu", "128",
    "--precision", "fp32", "--data", "text.jsonl",
)  # fmt: skip


def test_without_a_plan_it_plans_first_and_memory_comes_out_as_predicted(folder: Path) -> None:
    code, output, errors = frugal_train(folder, *ONE, *PLANNING, "--steps", 3, "--out", "one")
    assert (code, errors) == (0, "")
    assert "8 samples = " in output
    measured = re.search(r"memory: planned (\S+) MiB, measured (\S+) MiB \(([+-]\d+\.\d) %\)", output)
    assert measured is not None
    assert abs(float(measured[3])) <= 1.0
    assert [record["step"] for record in records(folder / "one") if record["event"] == "step"] == [1, 2, 3]
    phases = read_run(folder / "one").phases
    assert list(phases) == ["initialisation", "forward", "backward", "optimizer step"]
    for name, phase in phases.items():
        assert phase.measured_bytes == pytest.approx(phase.planned_bytes, rel=0.01), name


def test_the_plan_it_makes_is_that_of_frugal_plan_for_the_lengths_of_the_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    made: list[Plan] = []
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr("frugal.cli.train.run", lambda plan, asked: made.append(plan))  # it would join a group here
    (folder / "data.toml").write_text('[train]\ndata = "text.jsonl"\n')
    assert cli.run(["train", *ONE, *PLANNING, "--out", "new"]) == 0
    assert cli.run(["train", *ONE, *PLANNING[:-2], "--config", "data.toml", "--out", "new"]) == 0
    for where in (PLANNING[-2:], ("--config", "data.toml")):
        assert cli.run(["plan", *ONE, *PLANNING[:-2], *where, "-o", "made", "-v"]) == 0
        made.append(Plan.read(folder / "made" / "plan.json"))
    assert "data " in capsys.readouterr().out
    assert len({plan.digest for plan in made}) == 1
    lengths = made[0].request.lengths
    assert lengths is not None
    assert lengths.tokens[0] < lengths.longest == 64, "windows, and what is left of documents"


@pytest.mark.parametrize(
    ("task", "tokens", "steps", "said"),
    [
        ("causal-lm", None, 1, "1 step of 8 samples"),
        ("causal-lm", 700, 2, "2 steps of up to 700 tokens"),
        ("seq2seq", 700, 2, "2 steps of up to 700 target tokens"),
    ],
)
def test_a_step_is_as_large_as_was_asked(folder: Path, task: str, tokens: int | None, steps: int, said: str) -> None:
    import torch

    from frugal.data.report import BuildReport
    from frugal.engine.reports import opening

    made = plan(folder, 1)
    made = dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, task=task),
        batch=dataclasses.replace(made.batch, global_tokens=tokens),
    )
    data: Any = SimpleNamespace(training=range(9), validation=range(2), report=BuildReport(bad_rows=1))
    assert opening.describe(made, "error", data, steps, 0) == (
        f"training {folder}/config.json (0 parameters) for {said} on 1 rank; 9 samples, 2 for validation; "
        "1 row that cannot be read left out"
    )
    for samples in (made.batch.global_batch - 1, made.batch.global_batch):
        data.training = range(samples)
        said_first = "\n".join(opening.remarks(made, data, torch.device("cpu"), 0))
        assert (f"each of {samples} about" in said_first) == (samples < made.batch.global_batch)


def test_a_new_plan_for_a_run_keeps_all_of_its_request_that_changes_numbers() -> None:
    ways = {
        "max_tokens_per_gpu", "micro_batch", "accumulation_steps", "even", "zero_stage",
        "activation_checkpointing", "loss", "offload", "nvme_path", "expandable_segments", "mlp", "kernels",
        "document_tokens", "offload_ratio", "sequence_parallel", "layer_modes",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(Request)} == ways | set(train._TRAINED)
    assert not ways & set(train._TRAINED)
