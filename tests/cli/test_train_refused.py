"""Requests that `frugal train` refuses, with their messages."""

import copy
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import GPT2Config

from bench.runs import command, environment, frugal_train, plan, prepared
from frugal import cli
from frugal.checkpoint import in_use
from frugal.cli import train
from frugal.config.hardware.cluster import Cluster, Node
from frugal.data.tokenizer import load_tokenizer
from frugal.planning.plan import Plan
from tests import forked
from tests.commands import Capture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's config.json, text to train on, and plans for one and two CPU ranks."""
    return prepared(tmp_path_factory.mktemp("train"), 1, 2)


def message(capsys: Capture, *arguments: object, data: str = "stdlib") -> str:
    """Exit code and message of a call that fails before anything is started."""
    code = cli.run(["train", "--data", data, *map(str, arguments)])
    printed = capsys.readouterr()
    assert printed.out == ""
    return f"{code}: {printed.err}"


@pytest.mark.parametrize(
    ("words", "code", "what", "hint"),
    [
        ("--plan plan2.json --global-batch 4", 2, "--plan was given together with --global-batch", "leave one"),
        ("--plan plan2.json --set optimizer.beta2=0.9", 2, "--plan was given together with --set", "leave one"),
        ("--ranks 2 --out new", 2, "--ranks is frugal's former name", "--device cpu --gpus 2 --mem 2G"),
        ("--plan plan2.json --gpus 3 --out new", 2, "--plan was given together with --gpus", "leave one"),
        ("--master-port 99999", 2, "--master-port is 99999", "from 1 to 65535"),
        ("--plan plan2.json --out used", 2, "used holds a run already", "--resume"),
        ("--resume --out new", 6, "there is no checkpoint in new/checkpoints", "without --resume"),
        ("--config wrong.toml", 2, "unknown setting `step` in [train]", "did you mean `steps`?"),
    ],
)
def test_what_contradicts_itself_or_is_there_already(
    words: str, code: int, what: str, hint: str, folder: Path, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    Path("used", "checkpoints", "step-000005").mkdir(parents=True, exist_ok=True)
    Path("wrong.toml").write_text("[train]\nstep = 3\n")
    said = message(capsys, *words.split())
    assert said.startswith(f"{code}: error: {what}") and hint in said


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--lora r=2", "2: error: --lora would freeze random weights\n"),
        ("--tokenizer large", "2: error: the tokenizer has 300 tokens, model has embeddings for 260\n"),
        ("--metric nowhere.py:f1", "2: error: cannot import nowhere.py\n"),
        ("--set train.callback=nowhere.py:Seen", "2: error: cannot import nowhere.py\n"),
        ("--out text.jsonl", "2: error: cannot write to text.jsonl\n"),
        ("--out text.jsonl/run", "2: error: cannot write to text.jsonl/run\n"),
        ("--seq-len 65", "2: error: --seq-len 65 is longer than model can read\n"),
        ("--epochs 1 --warmup 500", "2: error: --warmup 500 is more than the "),
        ("--device cuda --gpus 99 --mem 24G", "4: error: the plan is for 99 GPUs, there are "),
    ],
)
def test_what_no_plan_changes_is_refused_before_one_is_computed(
    words: str, what: str, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train, "planned", lambda *_: pytest.fail("a plan is computed"))
    Path("model").mkdir(exist_ok=True)
    config = GPT2Config(
        vocab_size=260, n_positions=64, n_embd=16, n_layer=1, n_head=2, architectures=["GPT2LMHeadModel"]
    )
    config.save_pretrained("model")
    tokenizer = load_tokenizer()
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens([f"<{number}>" for number in range(300 - len(tokenizer))])
    larger.save_pretrained("large")
    given = ["--out", "new", "--device", "cpu", "--gpus", "1", "--mem", "1G", "--model", "model", *words.split()]
    said = message(capsys, *given, data="text.jsonl")
    assert said.startswith(what), said
    assert not Path("new").exists()


def test_a_plan_that_is_a_pipe_or_a_device_is_named_and_not_waited_for(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    pipe, device = tmp_path / "pipe", tmp_path / "device"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path, what in ((pipe, "a named pipe"), (device, "a device")):
        said = message(capsys, "--plan", path)
        assert said.startswith(f"2: error: cannot read the plan {path}\n  because it is {what}, and not a file\n")
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    (run / "checkpoints" / "step-000001" / "manifest.json").touch()
    os.mkfifo(run / "train.json")
    said = message(capsys, "--plan", folder / "plan2.json", "--resume", "--out", run)
    assert said.startswith(f"2: error: cannot read the settings of the run in {run}\n") and "it is a named pipe" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "needed"), [(1, 34), (2, 40)])
def test_few_open_files(ranks: int, needed: int, folder: Path, tmp_path: Path) -> None:
    """What is refused is said in words; with as many as it says, a run goes through."""

    def run(number: int) -> subprocess.CompletedProcess[str]:
        words = command("--plan", f"plan{ranks}.json", "--data", "text.jsonl", "--steps", 1, "--out", tmp_path)
        return subprocess.run(
            ["sh", "-c", f'ulimit -n {number}; exec "$@"', "sh", *words], cwd=folder, env=environment(folder),
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip

    refused = run(20)
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.startswith(f"error: a process may have 20 open files here, and ranks need {needed}\n")
    done = run(needed)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["--out", "--data"])
def test_a_name_that_is_no_text(name: str, folder: Path, capsys: Capture) -> None:
    stands = os.fsdecode(b"caf\xe9")
    said = message(capsys, "--plan", folder / "plan2.json", name, stands)
    assert said.startswith(f"2: error: {name} caf\\xe9 is not UTF-8\n") and "hint: rename it, or use a link" in said


def test_a_plan_for_gpus_or_for_several_nodes(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    made = plan(folder, 2)
    device = made.cluster.devices[0]
    path = tmp_path / "plan.json"
    gpus = (msgspec.convert(msgspec.to_builtins(device) | {"kind": "cuda"}, type(device)),) * 2
    path.write_bytes(_on(made, (Node(devices=gpus),)).to_json())
    if torch.cuda.device_count() < 2:
        said = message(capsys, "--plan", path, "--out", tmp_path / "new")
        assert said.startswith(f"4: error: the plan is for 2 GPUs, there are {torch.cuda.device_count()} here\n")
        assert "frugal plan --gpus N, or --device cpu --gpus N --mem 2G" in said
    path.write_bytes(_on(made, (Node(devices=(device,)),) * 2).to_json())
    said = message(capsys, "--plan", path, "--out", tmp_path / "new")
    assert said.startswith("4: error: the plan is for 2 nodes, and nothing names them\n")
    assert "--hostfile HOSTS" in said


def _on(made: Plan, nodes: tuple[Node, ...]) -> Plan:
    cluster = Cluster(nodes=nodes, intra_bandwidth=1e9, inter_bandwidth=1e9)
    values = msgspec.to_builtins(made) | {"cluster": msgspec.to_builtins(cluster)}
    return msgspec.convert(values, Plan).sealed()


def test_a_port_in_use(folder: Path, capsys: Capture) -> None:
    with socket.socket() as sock:
        sock.bind(("", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert message(capsys, "--plan", folder / "plan2.json", "--master-port", port, "--out", folder / "new") == (
            f"2: error: port {port} cannot be used\n  because Address already in use\n\n"
            "hint: start again without --master-port: a free port is chosen\n"
        )


def test_two_runs_in_one_folder(folder: Path, tmp_path: Path) -> None:
    with in_use.marked(tmp_path):  # as a run does while it writes there
        code, _, errors = frugal_train(
            folder, "--plan", "plan1.json", "--data", "text.jsonl", "--steps", 1, "--out", tmp_path
        )
    assert code == 2
    assert errors.startswith(f"error: another run is writing to {tmp_path}: process {os.getpid()} ")
    assert errors.endswith("hint: wait for it to end, or choose another folder with --out\n")
    assert {path.name for path in tmp_path.iterdir()} <= {in_use.MARK}


def test_a_run_keeps_its_folder_also_when_memory_has_been_measured(folder: Path, tmp_path: Path) -> None:
    process = forked.popen(
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


def test_missing_data_a_full_disk_and_another_model_are_said_by_the_run_itself(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-", folder, tmp_path], cwd=folder, env=environment(folder), input=_THREE,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "error: there is no data at nowhere.jsonl\n  because no such file or folder\n\n"
        "hint: give a file, a folder, a pattern such as 'corpus/*.jsonl', or a data set of the hub as OWNER/NAME\n"
        "error: cannot write to /proc/frugal\n  because /proc/frugal: No such file or directory\n\n"
        "hint: see to it that it can be written, or choose another folder with --out\n"
        f"error: the plan is for another model than {tmp_path}/config.json is now\n"
        "  because it was made for 1 parameters, 0 trained; the model has 35,840 parameters, 35,840 trained\n"
        "\nhint: plan again\n"
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
