"""`frugal train`, as people call it: whole messages, exit codes, and real runs through DeepSpeed's launcher."""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]  # has no types
import pytest
import torch

from frugal import cli
from frugal.planning.cluster import Cluster, Node
from frugal.planning.plan import Plan
from tests.plans import plan_by_hand

TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 260, "n_positions": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's config.json, text to train on, and plans for one and two CPU ranks."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "config.json").write_text(json.dumps(TINY))
    rows = [{"text": f"line {i}: " + "to be or not to be, " * (i % 7)} for i in range(200)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for world_size in (1, 2):
        (folder / f"plan{world_size}.json").write_bytes(plan(folder, world_size).to_json())
    return folder


def plan(folder: Path, world_size: int) -> Plan:
    made = plan_by_hand(
        world_size=world_size, global_batch=8, micro_batch=2, zero_stage=2,
        request={
            "model": str(folder / "config.json"), "learning_rate": 2.5e-3, "reference_batch": 2, "lr_rule": "linear",
        },
    )  # fmt: skip
    return msgspec.convert(msgspec.to_builtins(made), Plan).sealed()  # numbers as a file has them


def environment(folder: Path) -> dict[str, str]:
    """A cache of its own, and as many threads as a test may take."""
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "frugal", "train", *map(str, arguments)]


def frugal_train(folder: Path, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a real run in a process of its own."""
    done = subprocess.run(
        command(*arguments), cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=280
    )
    return done.returncode, done.stdout, done.stderr


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path) -> tuple[int, str, str]:
    """A run of six steps through DeepSpeed's launcher."""
    return frugal_train(
        folder, "--plan", "plan2.json", "--data", "text.jsonl", "--steps", 6, "--eval-every", 3, "--save-every", 3,
        "--validation-fraction", 0.1, "--out", "two",
    )  # fmt: skip


def test_a_run_on_two_ranks_says_what_it_does(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    code, output, errors = on_two_ranks
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0] == (
        f"training {folder}/config.json (0 parameters) for 6 steps of 8 samples on 2 ranks;"
        f" {len_of(folder, 'training')} samples, {len_of(folder, 'validation')} for validation"
    )
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "step 1/6", "step 2/6", lines[3], "step 3/6", "step 3/6", "step 4/6", "step 5/6", "step 6/6", "step 6/6",
        f"model written to {folder}/two/model",
    ]  # fmt: skip
    assert re.fullmatch(r"memory: planned 0.0 MiB, measured \d\.\d MiB \(\+inf %\)", lines[3])


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
        "checkpoints", "ds_config.json", "logs", "metrics.jsonl", "model", "plan.json", "train.json",
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


def test_the_final_model_and_tokenizer_load(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "two" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "two" / "model")
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer("to be or not to be, " * 2)["input_ids"]]])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert loss < 0.9 * torch.log(torch.tensor(260.0))  # better than a guess among all tokens


def torchrun(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A run on two ranks that torchrun starts."""
    script = Path(__file__).parents[1] / "launch" / "torchrun.sh"
    return subprocess.run(
        [script, "2", *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=200,
        env=environment(folder) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip


def test_torchrun_gives_the_same_run(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    done = torchrun(
        folder, "--plan", "plan2.json", "--data", "text.jsonl", "--steps", 6, "--eval-every", 3, "--save-every", 0,
        "--validation-fraction", 0.1, "--out", "torchrun",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours, theirs = (
        [(r["event"], r["step"], r.get("loss")) for r in records(folder / name)] for name in ("two", "torchrun")
    )
    assert ours == theirs


def test_a_wrong_resume_is_said_once_through_the_launcher(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    code, output, errors = frugal_train(folder, "--resume", "--out", "two", "--steps", 7, "--limit", 199)
    assert (code, output) == (4, "")
    lines = errors.splitlines()
    assert lines[:2] == [
        "error: the data of the run in two has changed since step 6", "  because --limit was not given, is 199"
    ]  # fmt: skip
    assert re.fullmatch(r"  because it had 200 documents, .*, now it has 199 documents, .*", lines[2])
    assert lines[3:] == ["", "hint: restore it, start anew with another --out, or go on with --accept-changed-data"]


def test_a_run_goes_on_with_what_there_is(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    shutil.copytree(folder / "two", folder / "elsewhere")
    code, output, errors = frugal_train(
        folder, "--resume", "--out", "elsewhere", "--ranks", 1, "--mem", "1G", "--zero-stage", 3, "--steps", 7
    )
    assert (code, errors) == (0, "")
    assert (
        "resumed at step 6 of elsewhere: 2 ranks -> 1 rank, ZeRO-2 -> ZeRO-3; "
        "global batch, order and learning rate are unchanged"
    ) in output.splitlines()
    ours = Plan.read(folder / "elsewhere" / "plan.json")
    assert (ours.batch.global_batch, ours.request.seq_len, ours.request.precision) == (8, 64, "fp32")
    assert [record["step"] for record in records(folder / "elsewhere") if record["event"] == "step"] == [
        1, 2, 3, 4, 5, 6, 7,
    ]  # fmt: skip
    assert sorted(path.name for path in (folder / "elsewhere" / "checkpoints").glob("step-*")) == [
        "step-000006", "step-000007",
    ]  # fmt: skip


def in_its_seventh_step(folder: Path, run: str) -> subprocess.Popen[str]:
    """A run that goes on from its sixth step and would not end by itself."""
    process = subprocess.Popen(
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
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert (folder / "two" / "checkpoints" / "latest").read_text() == "step-000006\n"


def test_sigterm_saves_the_step_and_ends_with_0(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    shutil.copytree(folder / "two", folder / "told")
    process = in_its_seventh_step(folder, "told")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    saved = (folder / "told" / "checkpoints" / "latest").read_text().strip()
    last = int(saved.removeprefix("step-"))
    assert last >= 7
    assert output.endswith(f"told to stop: step {last} is saved in told/checkpoints, continue with --resume\n")


def test_ranks_end_when_frugal_train_is_killed(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    process = in_its_seventh_step(folder, "two")
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_a_killed_rank_ends_the_run_and_is_named(folder: Path, on_two_ranks: tuple[int, str, str]) -> None:
    shutil.copytree(folder / "two", folder / "killed")
    process = in_its_seventh_step(folder, "killed")
    family = psutil.Process(process.pid).children(recursive=True)
    next(rank for rank in family if "--local_rank=1" in rank.cmdline()).kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert errors.endswith("error: a rank was ended by SIGKILL\n\nhint: continue from step-000006 with --resume\n")
    assert not any(each.is_running() for each in family)


def test_ctrl_c_before_there_are_ranks_is_an_interrupt_too(folder: Path) -> None:
    process = subprocess.Popen(
        command("--plan", "plan2.json", "--data", "text.jsonl", "--steps", 9, "--out", "early"),
        cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (children := psutil.Process(process.pid).children()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "\ninterrupted\n")  # below the terminal's ^C
    assert not any(child.is_running() for child in children)


PLANNING = (
    "--mem", "1G", "--model", "config.json", "--seq-len", "64", "--global-batch", "8", "--max-samples-per-gpu", "2",
    "--precision", "fp32", "--data", "text.jsonl",
)  # fmt: skip


def test_without_a_plan_it_plans_first_and_memory_comes_out_as_predicted(folder: Path) -> None:
    code, output, errors = frugal_train(folder, "--ranks", 1, *PLANNING, "--steps", 3, "--out", "one")
    assert (code, errors) == (0, "")
    assert "8 samples = " in output
    measured = re.search(r"memory: planned (\S+) MiB, measured (\S+) MiB \(([+-]\d+\.\d) %\)", output)
    assert measured is not None
    assert abs(float(measured[3])) <= 1.0
    assert [record["step"] for record in records(folder / "one") if record["event"] == "step"] == [1, 2, 3]


def test_the_plan_it_makes_is_that_of_frugal_plan_for_the_lengths_of_the_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Plan] = []
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr("frugal.cli.train.run", lambda plan, asked: made.append(plan))  # it would join a group here
    (folder / "data.toml").write_text('[train]\ndata = "text.jsonl"\n')
    assert cli.run(["train", "--ranks", "1", *PLANNING, "--out", "new"]) == 0
    assert cli.run(["train", "--ranks", "1", *PLANNING[:-2], "--config", "data.toml", "--out", "new"]) == 0
    for where in (PLANNING[-2:], ("--config", "data.toml")):
        assert cli.run(["plan", "--device", "cpu", "--gpus", "1", *PLANNING[:-2], *where, "-o", "made"]) == 0
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
    from frugal.training import run
    from frugal.training.preparation import Report

    made = plan(folder, 1)
    made = dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, task=task),
        batch=dataclasses.replace(made.batch, global_tokens=tokens),
    )
    data: Any = SimpleNamespace(training=range(9), validation=range(2), report=Report(bad_rows=1))
    asked: Any = SimpleNamespace(too_long="error")
    assert run._describe(made, asked, data, steps, 0) == (
        f"training {folder}/config.json (0 parameters) for {said} on 1 rank; 9 samples, 2 for validation; "
        "1 row that cannot be read left out"
    )


# Bad input.


def message(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Exit code and message of a call that fails before anything is started."""
    code = cli.run(["train", *map(str, arguments)])
    printed = capsys.readouterr()
    assert printed.out == ""
    return f"{code}: {printed.err}"


def test_plan_and_planning_flags_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message(capsys, "--plan", folder / "plan2.json", "--global-batch", 4) == (
        "2: error: --plan was given together with --global-batch\n"
        "  because a plan is a decision already made\n\nhint: leave one of them out\n"
    )


def test_ranks_and_gpus_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message(capsys, "--ranks", 2, "--gpus", 2, "--out", folder / "new") == (
        "2: error: --ranks was given together with --gpus\n"
        "  because --ranks 2 means 2 processes on this machine's CPU\n\nhint: leave one of them out\n"
    )


def test_a_plan_for_another_number_of_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message(capsys, "--plan", folder / "plan2.json", "--ranks", 3, "--out", folder / "new") == (
        "4: error: the plan is for 2 CPU ranks, this run has 3 CPU ranks\n\n"
        "hint: leave --ranks out, or plan again: frugal plan --device cpu --gpus 3\n"
    )


def test_a_missing_a_broken_and_a_changed_plan(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anew = "\n\nhint: make a new one with `frugal plan -o DIR`\n"
    path = tmp_path / "plan.json"
    assert message(capsys, "--plan", path) == (
        f"2: error: cannot read the plan {path}\n  because No such file or directory"
        "\n\nhint: make one with `frugal plan -o DIR`\n"
    )
    path.write_text("{")
    assert message(capsys, "--plan", path) == (
        f"2: error: {path} is not a plan\n  because Input data was truncated{anew}"
    )
    path.write_text((folder / "plan2.json").read_text().replace('"learning_rate": 0.0025', '"learning_rate": 0.1'))
    assert message(capsys, "--plan", path) == (
        f"4: error: {path} was changed after it was made\n  because its digest does not match its content{anew}"
    )


def test_a_plan_for_gpus_or_for_several_nodes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(folder, 2)
    device = made.cluster.devices[0]
    path = tmp_path / "plan.json"
    gpus = (msgspec.convert(msgspec.to_builtins(device) | {"kind": "cuda"}, type(device)),) * 2
    path.write_bytes(_on(made, (Node(devices=gpus),)).to_json())
    if torch.cuda.device_count() < 2:
        assert message(capsys, "--plan", path, "--out", tmp_path / "new") == (
            f"4: error: the plan is for 2 GPUs, there are {torch.cuda.device_count()} here\n\n"
            "hint: plan for what is here: frugal plan --gpus N, or frugal train --ranks N for CPU processes\n"
        )
    path.write_bytes(_on(made, (Node(devices=(device,)),) * 2).to_json())
    assert message(capsys, "--plan", path, "--out", tmp_path / "new") == (
        "4: error: the plan is for 2 nodes, and nothing names them\n\n"
        "hint: name them with --hostfile HOSTS, a line `NAME slots=GPUS` for each; or start the ranks yourself: "
        "--print slurm, or torchrun, openmpi, no-ssh\n"
    )


def _on(made: Plan, nodes: tuple[Node, ...]) -> Plan:
    cluster = Cluster(nodes=nodes, intra_bandwidth=1e9, inter_bandwidth=1e9)
    values = msgspec.to_builtins(made) | {"cluster": msgspec.to_builtins(cluster)}
    return msgspec.convert(values, Plan).sealed()


def test_a_port_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as sock:
        sock.bind(("", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert message(capsys, "--plan", folder / "plan2.json", "--master-port", port, "--out", folder / "new") == (
            f"2: error: port {port} cannot be used\n  because Address already in use\n\nhint: leave --master-port out\n"
        )


def test_a_port_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert message(capsys, "--master-port", 99999) == (
        "2: error: invalid value for '--master-port': 99999 is not in the range 1<=x<=65535\n\n"
        "hint: see `frugal train --help`\n"
    )


def test_a_folder_with_another_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints" / "step-000005").mkdir(parents=True)
    assert message(capsys, "--plan", folder / "plan2.json", "--out", tmp_path) == (
        f"2: error: {tmp_path} holds a run already\n  because its newest checkpoint is step-000005\n\n"
        "hint: continue it with --resume, or choose another folder with --out\n"
    )


def test_resuming_where_nothing_was_saved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message(capsys, "--resume", "--out", folder / "new") == (
        f"6: error: there is no checkpoint in {folder}/new/checkpoints\n\nhint: start without --resume\n"
    )


def test_two_runs_in_one_folder(folder: Path, tmp_path: Path) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # as a run does while it writes there
    told = frugal_train(folder, "--plan", "plan1.json", "--data", "text.jsonl", "--steps", 1, "--out", tmp_path)
    os.close(held)
    assert told == (
        2,
        "",
        f"error: another run is writing to {tmp_path}\n"
        "  because two runs in one folder would overwrite each other's checkpoints\n\n"
        "hint: wait for it to end, or choose another folder with --out\n",
    )
    assert not list(tmp_path.iterdir())


def test_a_run_keeps_its_folder_also_when_memory_has_been_measured(folder: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("--plan", "plan1.json", "--data", "text.jsonl", "--steps", 100, "--save-every", 0, "--out", tmp_path),
        cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("memory: planned") for line in lines) and next(lines).startswith("step ")
    mine = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(mine)
    process.kill()
    process.wait()


def test_a_wrong_table_in_frugal_toml(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "frugal.toml").write_text("[train]\nstep = 3\n")
    assert message(capsys, "--config", tmp_path / "frugal.toml") == (
        "2: error: unknown setting `step` in [train]\n\nhint: did you mean `steps`?\n"
    )


def test_missing_data_a_full_disk_and_another_model_are_said_by_the_run_itself(folder: Path, tmp_path: Path) -> None:
    """One process for all three, because each needs torch."""
    done = subprocess.run(
        [sys.executable, "-c", _THREE, str(folder), str(tmp_path)], cwd=folder, env=environment(folder),
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "error: there is no data at nowhere.jsonl\n  because no such file or folder\n"
        "error: cannot write to /proc/frugal\n  because No such file or directory\n\n"
        "hint: choose another folder with --out\n"
        f"error: the plan is for another model than {tmp_path}/config.json is now\n"
        "  because it was made for 1 parameters, the model has 35,840\n\nhint: plan again\n"
    )
    assert done.stdout == "[2, 2, 4]\n"


_THREE = """
import sys
from pathlib import Path
import msgspec
from frugal.cli import run
from frugal.planning.plan import Plan

folder, other = sys.argv[1:]
(Path(other) / "config.json").write_text(Path(folder, "config.json").read_text())
values = msgspec.json.decode(Path(folder, "plan1.json").read_bytes())
values["request"]["model"] = other + "/config.json"
values["model"]["parameters"] = 1
Path(other, "plan.json").write_bytes(msgspec.convert(values, Plan).sealed().to_json())
train = ["train", "--steps", "1", "--plan"]
print([
    run([*train, folder + "/plan1.json", "--data", "nowhere.jsonl", "--out", other + "/a"]),
    run([*train, folder + "/plan1.json", "--data", "text.jsonl", "--out", "/proc/frugal"]),
    run([*train, other + "/plan.json", "--data", "text.jsonl", "--out", other + "/b"]),
])
"""
