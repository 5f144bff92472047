"""`frugal rehearse`: what a step holds, for a plan or a model, against what the plan promised."""

import json
from pathlib import Path

import pytest

from frugal.cli import run
from frugal.planning.plan import Plan

CONFIG = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 128,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
ASKED = ["--gpus", "2", "--mem", "2G", "--seq-len", "64"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model's config.json, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def frugal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_takes_what_it_promised(device: str, capsys: pytest.CaptureFixture[str], here: Path) -> None:
    asked = [*ASKED, "--device", device, "--model", "config.json", "--micro-batch", "4", "--zero-stage", "2"]
    asked += ["--activation-checkpointing", "off", "--loss", "plain", "--offload", "none"]  # one candidate is enough
    frugal(capsys, "plan", *asked, "--global-batch", "16", "-o", ".")
    plan = Plan.read(here / "plan.json")
    code, out, _ = frugal(capsys, "rehearse", "plan.json", "--json")
    found = json.loads(out)
    assert code == 0
    assert sum(found["categories"].values()) == found["peak_allocated_bytes"] == max(found["phases"].values())
    assert found["peak_allocated_bytes"] - found["categories"].get("rounding", 0) == plan.memory.live_bytes
    assert found["smallest_capacity_bytes"] == plan.memory.total_bytes - plan.memory.context
    assert found["peak_allocated_bytes"] <= found["smallest_capacity_bytes"] <= found["peak_reserved_bytes"]
    assert (found["phase"], found["operator"]) == (plan.memory.phase, plan.memory.operator)
    assert found["notes"] == []


def test_a_model_is_rehearsed_as_pinned_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    pins = ["--micro-batch", "4", "--zero-stage", "3", "--activation-checkpointing", "full", "--global-batch", "16"]
    code, out, _ = frugal(capsys, "rehearse", "config.json", *ASKED, *pins, "--explain", "parameters")
    assert code == 0
    assert out.startswith(
        "config.json in bf16, samples of 64 tokens\n"
        "ZeRO-3, activation checkpointing full\n"
        "2 GPUs, micro-batch 4, 2 accumulation steps\n\nat its peak, in "
    )
    assert "\n\nit fits\n\nparameters at the peak, by the module that made them\n" in out


def test_what_does_not_fit_is_rehearsed_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--device", "cpu", "--gpus", "1", "--mem", "2M", "--seq-len", "64", "--micro-batch", "8"]
    code, out, _ = frugal(capsys, "rehearse", "config.json", *asked)
    assert code == 0
    assert "\n\nit does not fit: " in out


MASKS = """
import torch
from torch import nn
from frugal.training.loss import SummedLoss

class Masks(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.router(x)
        return self.last(x[x[:, 0] > 0])

def masks():
    loss = lambda model, batch: model(batch["x"].to(model.last.weight.dtype)).square().sum()
    return Masks(), SummedLoss(loss, example={"x": torch.zeros(8, device="cpu")})
"""


def test_what_is_assumed_is_said(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "masked.py").write_text(MASKS)
    code, out, _ = frugal(capsys, "rehearse", "masked.py:masks", *ASKED, "--device", "cpu")
    assert code == 0
    assert out.endswith(
        "\n\nassumed, because it depends on data\n"
        "  what a mask selects depends on data: counted as if it selected everything\n"
    )


WRONG = {
    "no such plan": (
        ["none.json"], 2,
        "error: cannot read the plan none.json\n  because No such file or directory\n\n"
        "hint: make one with `frugal plan -o DIR`\n",
    ),
    "a plan of another schema": (
        ["other.json"], 4,
        "error: other.json has schema 9, this frugal reads schema 1\n\n"
        "hint: make a new one with `frugal plan -o DIR`\n",
    ),
    "a plan and a flag": (
        ["other.json", "--gpus", "3"], 2,
        "error: other.json was given together with --gpus\n  because a plan is a decision already made\n\n"
        "hint: leave one of them out\n",
    ),
    "two models": (
        ["gpt2", "--model", "t5-small"], 2,
        "error: gpt2 was given together with --model\n\nhint: leave one of them out\n",
    ),
    "nothing": ([], 2, "error: missing argument 'PLAN|MODEL'\n\nhint: see `frugal rehearse --help`\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_each_mistake_has_its_message(case: str, capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "other.json").write_text('{"schema": 9}')
    arguments, code, message = WRONG[case]
    assert frugal(capsys, "rehearse", *arguments) == (code, "", message)
