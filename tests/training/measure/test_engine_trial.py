"""A run that restarts to try another ZeRO stage trains the same, keeps what is faster, and survives what befalls it.

Plans name the alternative, with micro-batches that make it surely faster or surely slower, as the clock that steps are
timed with goes by forward passes, whatever else the machine does; `--tune` has it tried whatever a restart costs.
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.plans import plan_by_hand
from bench.runs import command, environment, frugal_train, prepared, records, torchrun
from frugal.planning.batch import BatchPlan
from frugal.planning.plan import Alternative, Plan
from frugal.planning.search import measured_ways
from frugal.training.checkpoint import manifest
from tests.training.gradients import bound_of_command

STEPS = 24
OFTEN = pytest.mark.exhaustive
RUN = ("--data", "text.jsonl", "--steps", STEPS, "--tune")
TRYING, KEPT, NOT_KEPT = "tuning: restarting to try ZeRO-3", "from here on", "restarting to go on as before"
MODEL = """
import json, os, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from frugal.training.objectives import CausalLM

class Model(GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        DO
        return super().forward(*args, **kwargs)

def make():
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Model(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=260, n_positions=64, **none)), CausalLM()
"""
CLOCK = """
passes, perf_counter = 0, time.perf_counter
time.perf_counter = lambda: passes + 1e-6 * perf_counter()
"""
COUNTS = """global passes
        passes += 1"""
FAILS = """is_trial = json.loads(os.environ.get("FRUGAL_REPLACED") or "{}").get("is_trial")
        if is_trial and os.environ["RANK"] == "1" and self.calls > WHEN:
            raise ValueError("no luck here")"""


def a_plan(folder: Path, world_size: int, micro_batch: int, other: int, model: str = "model.py:make") -> Plan:
    """ZeRO-0, and an alternative with ZeRO-3 and another micro-batch."""
    plan = plan_by_hand(
        world_size=world_size, global_batch=64, micro_batch=micro_batch, zero_stage=0,
        request={"model": str(folder / model), "learning_rate": 2.5e-3},
    )  # fmt: skip
    of_other = Alternative(
        strategy=replace(plan.strategy, zero_stage=3),
        batch=BatchPlan.of(64, (other,) * world_size),
        memory=plan.memory,
        time=plan.time,
    )
    made = replace(plan, alternatives=(of_other,))
    return msgspec.convert(msgspec.to_builtins(made), Plan).sealed()  # numbers as a file has them


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, text, and plans whose alternative is faster, or slower."""
    made = prepared(tmp_path_factory.mktemp("trials"))
    (made / "model.py").write_text(MODEL.replace("DO", COUNTS) + CLOCK)
    (made / "faster.json").write_bytes(a_plan(made, 2, 1, 32).to_json())
    (made / "slower.json").write_bytes(a_plan(made, 2, 32, 1).to_json())
    (made / "faster1.json").write_bytes(a_plan(made, 1, 1, 64).to_json())
    return made


@pytest.fixture(scope="module")
def untuned(folder: Path) -> list[float]:
    """The losses of a run that stays as planned."""
    plan = ("--plan", "slower.json", "--data", "text.jsonl", "--steps", STEPS, "--no-tune", "--save-every", 0)
    code, output, errors = frugal_train(folder, *plan, "--out", "untuned")
    assert (code, errors) == (0, "") and "tuning" not in output
    return losses(folder / "untuned")


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run) if record["event"] == "step"]


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in records(run) if record["event"] == kind]


def assert_kept(folder: Path, out: str, plan: str, untuned: list[float]) -> None:
    run, kept = folder / out, Plan.read(folder / out / "plan.json")
    assert losses(run) == pytest.approx(untuned, rel=bound_of_command(STEPS, 2.5e-3, 64))
    assert (kept.strategy.zero_stage, kept.tuned_from, kept.alternatives) == (3, Plan.read(folder / plan).digest, ())
    assert "takes" in kept.why[0] and "less time" in kept.why[0]
    assert [start["resumed"] for start in of_kind(run, "start")] == [False, True]
    (end,) = of_kind(run, "tuned")
    assert end["plan_digest"] == kept.digest and end["gain"] > 0.1 and end["step"] == 20
    newest = manifest.newest_checkpoint(run / "checkpoints")
    assert newest is not None
    assert (manifest.read(newest).zero_stage, manifest.read(newest).plan_digest) == (3, kept.digest)


def test_a_faster_stage_is_kept_and_the_run_is_the_untuned_one(
    folder: Path, untuned: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "settings"))
    code, output, errors = frugal_train(folder, "--plan", "faster.json", *RUN, "--calibrate", "--out", "kept")
    assert (code, errors) == (0, "")
    assert TRYING in output
    assert re.search(r"ZeRO-3.* takes \d+\.\d % less time than before; the restart took \d+ s;", output), output
    assert_kept(folder, "kept", "faster.json", untuned)
    plan = Plan.read(folder / "faster.json")
    (measured,), notes = measured_ways.known(plan.request, plan.cluster)
    before, after = measured.ways
    assert [way.strategy.zero_stage for way in measured.ways] == [0, 3] and not notes
    assert before.seconds > 1.1 * after.seconds and before.error is not None and after.error is not None


@OFTEN
def test_what_was_kept_goes_on_when_resumed_and_nothing_is_tried_again(folder: Path, untuned: list[float]) -> None:
    run = ("--plan", "faster.json", *RUN, "--out", "resumed")
    assert frugal_train(folder, *run)[0] == 0
    kept = (folder / "resumed" / "plan.json").read_bytes()
    run = ("--plan", "faster.json", "--data", "text.jsonl", "--tune", "--out", "resumed")
    code, output, errors = frugal_train(folder, *run, "--steps", STEPS + 14, "--resume")
    assert (code, errors) == (0, "") and "tuning" not in output
    assert (folder / "resumed" / "plan.json").read_bytes() == kept


@OFTEN
def test_a_slower_stage_is_tried_and_the_run_goes_back(folder: Path, untuned: list[float]) -> None:
    code, output, errors = frugal_train(folder, "--plan", "slower.json", *RUN, "--out", "back")
    assert (code, errors) == (0, "")
    assert TRYING in output and NOT_KEPT in output, output
    assert_gone_back(folder / "back", folder / "slower.json", untuned, "more time than before")
    assert len(of_kind(folder / "back", "start")) == 3


def assert_gone_back(run: Path, plan: Path, untuned: list[float], why: str) -> None:
    kept, own = Plan.read(run / "plan.json"), Plan.read(plan)
    assert losses(run) == pytest.approx(untuned, rel=bound_of_command(STEPS, 2.5e-3, 64))
    assert (kept.strategy, kept.batch, kept.tuned_from, kept.alternatives) == (own.strategy, own.batch, own.digest, ())
    assert why in kept.why[0]
    assert of_kind(run, "tuned")[-1]["gain"] == 0


@OFTEN
@pytest.mark.parametrize("more", ["faster1", "torchrun", "deepspeed"])
def test_it_is_so_under_every_launcher_and_on_one_rank(more: str, folder: Path, untuned: list[float]) -> None:
    plan = "faster1.json" if more == "faster1" else "faster.json"
    run = ("--plan", plan, *RUN, "--out", more)
    if more == "faster1":
        code, _, errors = frugal_train(folder, *run)
    elif more == "torchrun":
        done = torchrun(folder, *run)
        code, errors = done.returncode, done.stderr
    else:
        words = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", 2, "--module", "frugal.training.run", *run]
        done = subprocess.run(
            list(map(str, words)), cwd=folder, capture_output=True, text=True, timeout=280,
            env=environment(folder) | {"DS_ACCELERATOR": "cpu", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        )  # fmt: skip
        code, errors = done.returncode, done.stderr
    assert code == 0, errors
    assert_kept(folder, more, plan, untuned)


@OFTEN
@pytest.mark.parametrize("when", [0, 3], ids=["in its first step", "in the midst"])
def test_a_trial_that_fails_on_a_rank_goes_on_as_before(when: int, folder: Path) -> None:
    (folder / f"failing{when}.py").write_text(MODEL.replace("DO", FAILS.replace("WHEN", str(when))))
    path = folder / f"failing{when}.json"
    path.write_bytes(a_plan(folder, 2, 8, 32, f"failing{when}.py:make").to_json())
    run = ("--plan", path, "--data", "text.jsonl", "--steps", STEPS, "--save-every", 50)
    assert frugal_train(folder, *run, "--no-tune", "--out", f"as-planned{when}")[0] == 0
    code, output, errors = frugal_train(folder, *run, "--tune", "--out", f"failed{when}")
    assert (code, errors) == (0, "")
    assert "cannot be trained here: ValueError: no luck here; the run goes on as before" in output
    expected = losses(folder / f"as-planned{when}")
    assert_gone_back(folder / f"failed{when}", path, expected, "was tried and failed: ValueError: no luck here")


def started(folder: Path, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command(*arguments), cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def until(child: "subprocess.Popen[str]", text: str) -> str:
    """What the run says, up to a line with this text."""
    assert child.stdout is not None
    said = ""
    for line in child.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"no {text!r} in:\n{said}")


def kill_all(child: "subprocess.Popen[str]") -> None:
    child.send_signal(signal.SIGKILL)  # its ranks end with it


def end_softly(child: "subprocess.Popen[str]") -> None:
    child.send_signal(signal.SIGTERM)


MOMENTS = [("slower", TRYING, 0.0), ("slower", TRYING, 3.0), ("slower", "step 15/", 0.0), ("slower", NOT_KEPT, 0.0),
           ("slower", NOT_KEPT, 3.0), ("faster", KEPT, 0.0)]  # fmt: skip


@OFTEN
@pytest.mark.parametrize("end", [kill_all, end_softly])
@pytest.mark.parametrize(("plan", "text", "seconds"), MOMENTS)
def test_a_run_that_is_ended_at_any_moment_of_it_can_be_resumed(
    plan: str, text: str, seconds: float, end: Callable[..., None], folder: Path, untuned: list[float], tmp_path: Path
) -> None:
    run = ("--plan", f"{plan}.json", *RUN, "--save-every", 6, "--out", tmp_path / "run")
    child = started(folder, *run)
    until(child, text)
    time.sleep(seconds)
    end(child)
    assert child.stdout is not None
    said = child.stdout.read()
    child.wait(280)
    time.sleep(1)  # ranks end with their command, a moment later
    if end is end_softly and of_kind(tmp_path / "run", "step")[-1]["step"] != STEPS:
        assert child.returncode == 0, said
        assert "is saved in" in said
    if losses(tmp_path / "run")[STEPS - 1 :]:
        return
    code, output, errors = frugal_train(folder, *run, "--resume")
    assert (code, errors) == (0, "") and TRYING not in output
    assert losses(tmp_path / "run") == pytest.approx(untuned, rel=bound_of_command(STEPS, 2.5e-3, 64))
    assert (tmp_path / "run" / "model").exists()
