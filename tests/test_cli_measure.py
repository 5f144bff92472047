"""`frugal measure`: two real steps through DeepSpeed's launcher, beside their rehearsal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from frugal.cli import run
from tests.plans import plan_by_hand

CONFIG = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 128,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def test_two_ranks_take_what_was_planned_and_it_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plan = plan_by_hand(
        world_size=2, global_batch=16, micro_batch=4, zero_stage=2, request={"model": "config.json", "seq_len": 32}
    )
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    command = [sys.executable, "-m", "frugal", "measure", "plan.json", "--json", "--record", "measured"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peak_allocated_bytes"] == max(found["phases"].values())
    assert found["planned"]["peak_allocated_bytes"] == pytest.approx(found["peak_allocated_bytes"], rel=0.005)
    (record,) = (tmp_path / "measured").iterdir()
    kept = json.loads(record.read_text())
    assert (kept["plan_digest"], kept["measured_bytes"]) == (plan.digest, found["peak_allocated_bytes"])
    assert (kept["world_size"], kept["micro_batch"], kept["accumulation_steps"]) == (2, 4, 2)


def test_a_missing_plan_is_said_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure", "none.json"]) == 2
    assert capsys.readouterr().err == (
        "error: cannot read the plan none.json\n  because No such file or directory\n\n"
        "hint: make one with `frugal plan -o DIR`\n"
    )
