"""`frugal measure --calibrate`: two real ranks are probed, and the next plan uses what was found and says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frugal.cli import measure, run
from frugal.planning.plan import Plan
from tests.cli.test_measure import CONFIG
from tests.commands import Capture, frugal

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


def plan(capsys: Capture, *more: str) -> tuple[Plan, str]:
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


def test_a_plan_without_it_takes_longer_or_shorter_in_the_same_memory(
    calibrated: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, _ = plan(capsys)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(calibrated / "none"))
    assumed, _ = plan(capsys)
    assert assumed.cluster.devices[0].measured_on is None
    assert not any("measured" in line for line in assumed.warnings)
    assert measured.time != assumed.time
    assert measured.memory == assumed.memory


def test_a_damaged_calibration_is_told_and_left_out(calibrated: Path, capsys: Capture) -> None:
    path = kept(calibrated)
    content = path.read_bytes()
    path.write_bytes(content[:100])
    try:
        made, said = plan(capsys)
    finally:
        path.write_bytes(content)
    assert made.cluster.devices[0].measured_on is None
    assert said.startswith(f"note: the calibration {path} cannot be read and is ignored: ")


def test_a_calibration_that_no_device_reaches_is_not_kept(
    calibrated: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is no plan to measure\n\nhint: make one with `frugal plan -o DIR`, or add --calibrate\n"),
        (["--calibrate", "--capped"], "--capped was given without a plan\n\nhint: measure one: frugal measure PLAN\n"),
        (["plan.json", "--device", "cpu"], "--device was given together with a plan\n\nhint: leave --device out"),
        (["--calibrate", "--device", "cuda", "--gpus", "99"], "99 GPUs are to be calibrated, there are "),
    ],
)
def test_each_mistake_has_its_message(arguments: list[str], said: str, capsys: Capture) -> None:
    code, out, error = frugal(capsys, "measure", *arguments)
    assert (code, out) == (2, "") and error.startswith(f"error: {said}")
