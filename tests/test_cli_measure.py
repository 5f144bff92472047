"""`frugal measure`: two real steps through DeepSpeed's launcher, beside their rehearsal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from frugal.cli import run
from frugal.dryrun.measurement import Measurement
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
    assert found["peak_allocated_bytes"] == max(found["phases"].values()) == found["phases"][found["phase"]]
    assert found["predicted"]["peak_allocated_bytes"] == pytest.approx(found["peak_allocated_bytes"], rel=0.005)
    assert found["predicted"].keys() >= {"peak_reserved_bytes", "smallest_capacity_bytes", "categories", "phases"}
    assert found["host_before_bytes_per_node"] > found["host_bytes_per_node"] > found["peak_allocated_bytes"]
    (record,) = (tmp_path / "measured").iterdir()
    (tmp_path / "config.json").unlink()  # a record needs nothing but itself
    kept = Measurement.read(record)
    assert (kept.plan_digest, kept.measured.peak_allocated_bytes) == (plan.digest, found["peak_allocated_bytes"])
    assert (kept.strategy, kept.batch, kept.cluster) == (plan.strategy, plan.batch, plan.cluster)
    assert kept.command.endswith(" plan.json --json --record measured")


def test_cpu_ranks_cannot_be_capped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_by_hand(world_size=1, global_batch=4, micro_batch=4, zero_stage=0)
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    assert run(["measure", str(tmp_path / "plan.json"), "--capped"]) == 2
    assert capsys.readouterr().err == (
        "error: --capped was given, but the plan is for CPU ranks\n"
        "  because only the caching allocator of a GPU can be given less memory than there is\n\n"
        "hint: leave --capped out\n"
    )


def test_a_missing_plan_is_said_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure", "none.json"]) == 2
    assert capsys.readouterr().err == (
        "error: cannot read the plan none.json\n  because No such file or directory\n\n"
        "hint: make one with `frugal plan -o DIR`\n"
    )
