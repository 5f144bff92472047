"""`frugal measure --calibrate`: two real ranks are probed, and the next plan uses what was found and says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import frugal
from frugal.cli import measure, run
from frugal.planning.plan import Plan
from tests.cli.test_measure import CONFIG

ASKED = ["--model", "config.json", "--device", "cpu", "--gpus", "2", "--mem", "2G", "--seq-len", "64", "--precision",
         "fp32", "--global-batch", "16", "--micro-batch", "4", "--zero-stage", "2", "--activation-checkpointing", "off",
         "--loss", "plain"]  # fmt: skip


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a small model, and settings in which this machine is calibrated with two ranks."""
    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "frugal", "measure", "--calibrate", "--device", "cpu", "--gpus", "2", "--json"]
    environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "settings")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder / "found.json").write_text(done.stdout)
    return folder


@pytest.fixture(autouse=True)
def here(calibrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that folder, with those settings."""
    monkeypatch.chdir(calibrated)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(calibrated / "settings"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(calibrated / "cache"))


def plan(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[Plan, str]:
    """The plan, and what was said on standard error."""
    assert run(["plan", *ASKED, *more, "--json"]) == 0
    captured = capsys.readouterr()
    return Plan.from_json(captured.out.encode()), captured.err


def kept(folder: Path) -> Path:
    """The calibration's file."""
    (path,) = (folder / "settings" / "frugal" / "calibration").glob("cpu-*.json")
    return path


def test_two_ranks_are_probed_in_every_respect_and_it_is_kept(calibrated: Path) -> None:
    found = json.loads((calibrated / "found.json").read_text())["calibration"]
    assert found == json.loads(kept(calibrated).read_text())
    assert (found["kind"], found["num_ranks"], found["driver"], found["card"]) == ("cpu", 2, "", None)
    probe = found["probe"]
    assert probe["context_bytes"] is None
    assert 1e8 < probe["matrix_flops"]["fp32"] < 1e14
    assert 1e7 < probe["memory_bandwidth"] < 1e12
    assert 1e6 < probe["link_bandwidth"] < 1e12
    assert 1e-7 < probe["operator_seconds"] < 1e-2


@pytest.mark.exhaustive
def test_the_next_plan_uses_it_and_says_so(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(kept(calibrated).read_text())
    made, said = plan(capsys)
    (rank, other) = made.cluster.devices
    assert rank == other
    assert (rank.matrix_flops, rank.memory_bandwidth, rank.operator_seconds, rank.measured_on) == (
        found["probe"]["matrix_flops"]["fp32"], found["probe"]["memory_bandwidth"],
        found["probe"]["operator_seconds"], found["date"],
    )  # fmt: skip
    assert made.cluster.intra_bandwidth == found["probe"]["link_bandwidth"]
    (note,) = (line for line in made.warnings if "measured" in line)
    assert note.endswith(f" GB/s between ranks: as measured on this machine on {found['date']}")
    assert said == ""
    run(["plan", *ASKED])
    text = capsys.readouterr().out
    assert note in text
    assert "only the seconds depend on it" not in text  # the assumption that it replaces


def test_a_plan_without_it_takes_longer_or_shorter_in_the_same_memory(capsys: pytest.CaptureFixture[str]) -> None:
    measured, _ = plan(capsys)
    assumed, _ = plan(capsys, "--set", "calibration=false")
    assert assumed.cluster.devices[0].measured_on is None
    assert not any("measured" in line for line in assumed.warnings)
    assert measured.time != assumed.time
    assert measured.memory == assumed.memory


def test_python_and_the_settings_file_can_leave_it_out(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"model": "config.json", "device": "cpu", "gpus": 2, "mem": "2G", "seq_len": 64, "precision": "fp32",
                "global_batch": 16, "micro_batch": 4, "zero_stage": 2, "activation_checkpointing": "off",
                "loss": "plain"}  # fmt: skip
    assert frugal.plan(**settings).cluster.devices[0].measured_on is not None
    assert frugal.plan(**settings, calibration=False).cluster.devices[0].measured_on is None
    (calibrated / "off.toml").write_text("calibration = false\n")
    made, _ = plan(capsys, "--config", "off.toml")
    assert made.cluster.devices[0].measured_on is None


def test_a_damaged_calibration_is_told_and_left_out(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = kept(calibrated)
    content = path.read_bytes()
    path.write_bytes(content[:100])
    try:
        made, said = plan(capsys)
    finally:
        path.write_bytes(content)
    assert made.cluster.devices[0].measured_on is None
    assert said.startswith(f"note: the calibration {path} cannot be read and is ignored: ")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("memory_bandwidth", 5e13, "50,000 GB/s"), ("matrix_flops", {"fp32": 6.3e15}, "6,300 TFLOP/s")],
)
def test_a_calibration_that_no_device_reaches_is_ignored_with_its_numbers(
    name: str, value: object, said: str, calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = kept(calibrated)
    content = path.read_bytes()
    changed = json.loads(content)
    changed["probe"][name] = value
    path.write_text(json.dumps(changed))
    try:
        made, note = plan(capsys)
    finally:
        path.write_bytes(content)
    assert made.cluster.devices[0].measured_on is None
    assert note.startswith(f"note: the calibration {path} cannot be read and is ignored: ")
    assert f"{said} were measured" in note


def test_a_calibration_that_no_device_reaches_is_not_kept(
    calibrated: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(calibrated)
    before = path.read_bytes()
    probe = json.loads(before)["probe"] | {"matrix_flops": {"fp32": 6.3e15}}

    def probed(_kind: str, _ranks: int, _module: str, words: list[str], **_: object) -> int:
        Path(words[words.index("--out") + 1]).write_text(json.dumps(probe))
        return 0

    monkeypatch.setattr(measure.local, "start_ranks", probed)  # here every device is a real one
    assert run(["measure", "--calibrate", "--device", "cpu", "--gpus", "2"]) == 1
    said = capsys.readouterr().err
    assert "is not kept" in said and "6,300 TFLOP/s were measured, and 5,000 are the most possible" in said
    assert path.read_bytes() == before


WRONG = {
    "nothing": (
        [], "there is no plan to measure\n\nhint: make one with `frugal plan -o DIR`, or add --calibrate\n"
    ),
    "a cap for no plan": (
        ["--calibrate", "--capped"], "--capped was given without a plan\n\nhint: measure one: frugal measure PLAN\n"
    ),
    "a device beside a plan": (
        ["plan.json", "--device", "cpu"],
        "--device was given together with a plan\n\nhint: leave --device out: the plan says it\n",
    ),
    "GPUs that are not here": (
        ["--calibrate", "--device", "cuda", "--gpus", "99"], None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_each_mistake_has_its_message(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG[case]
    assert run(["measure", *arguments]) == 2
    said = capsys.readouterr().err
    assert (
        said == f"error: {message}" if message else said.startswith("error: 99 GPUs are to be calibrated, there are ")
    )
