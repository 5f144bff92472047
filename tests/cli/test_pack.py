"""`frugal train --pack` from end to end: packed documents are the same ones after a stop, under any launcher."""

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.runs import command, environment, frugal_train, prepared, records, torchrun

STEPS = 150
RUN = (
    "--data", "text.jsonl", "--steps", STEPS, "--eval-every", 50, "--save-every", 0, "--validation-data", "10%",
    "--warmup", 5,
)  # fmt: skip


def trajectory(path: Path) -> list[tuple[Any, ...]]:
    """Return what was measured of each step and evaluation, to the last bit."""
    return [
        (record["event"], record["step"], record["loss"], record["targets"], record.get("grad_norm"))
        for record in records(path)
        if "loss" in record
    ]


@pytest.mark.exhaustive
def test_a_packed_run_that_was_stopped_goes_on_under_torchrun_as_if_it_had_not_been(tmp_path: Path) -> None:
    prepared(tmp_path, documents=300)
    code, output, errors = frugal_train(
        tmp_path, "--device", "cpu", "--gpus", 2, "--mem", "1G",
        "--model", "config.json", "--seq-len", 64, "--global-batch", 8,
        "--precision", "fp32", "--pack", *RUN, "--out", "whole",
    )  # fmt: skip
    assert (code, errors) == (0, "")
    assert "; samples are packed with documents and 9" in output
    process = subprocess.Popen(
        command("--plan", "whole/plan.json", *RUN, "--out", "stopped"), cwd=tmp_path, env=environment(tmp_path),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    while not process.stdout.readline().startswith(f"step 4/{STEPS}  loss "):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, "")
    assert "told to stop: step " in output
    assert len(trajectory(tmp_path / "stopped")) < STEPS
    done = torchrun(tmp_path, "--plan", "whole/plan.json", *RUN, "--resume", "--out", "stopped")
    assert done.returncode == 0, done.stderr
    assert trajectory(tmp_path / "stopped") == trajectory(tmp_path / "whole")
