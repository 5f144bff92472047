"""`frugal dryrun`: what a step holds, for a plan or a model, against what the plan promised."""

import csv
import json
import re
from pathlib import Path

import msgspec
import pytest

from frugal.planning.memory import timeline_files
from frugal.planning.plan import Plan
from tests.commands import Capture, frugal

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


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.exhaustive), "cuda"])
def test_a_plan_takes_what_it_promised(device: str, capsys: Capture, here: Path) -> None:
    asked = [*ASKED, "--device", device, "--model", "config.json", "--micro-batch", "4", "--zero-stage", "2"]
    asked += ["--activation-checkpointing", "off", "--loss", "plain", "--offload", "none"]  # one candidate is enough
    frugal(capsys, "plan", *asked, "--global-batch", "16", "-o", ".")
    plan = Plan.read(here / "plan.json")
    code, out, _ = frugal(capsys, "dryrun", "plan.json", "--json")
    found = json.loads(out)
    assert code == 0
    assert sum(found["categories"].values()) == found["peak_allocated_bytes"] == max(found["phases"].values())
    assert found["peak_allocated_bytes"] - found["categories"].get("rounding", 0) == plan.memory.live_bytes
    assert found["smallest_capacity_bytes"] == plan.memory.total_bytes - plan.memory.context
    assert found["peak_allocated_bytes"] <= found["smallest_capacity_bytes"] <= found["peak_reserved_bytes"]
    assert (found["phase"], found["operator"]) == (plan.memory.phase, plan.memory.operator)
    assert found["notes"] == []
    assert found["interval"] == msgspec.to_builtins(plan.memory.interval)
    assert found["interval"]["lower_bytes"] < plan.memory.total_bytes < found["interval"]["upper_bytes"]


def test_a_model_is_dry_run_as_pinned_and_explained(capsys: Capture) -> None:
    pins = ["--micro-batch", "4", "--zero-stage", "3", "--activation-checkpointing", "full", "--global-batch", "16"]
    code, out, _ = frugal(capsys, "dryrun", "config.json", *ASKED, *pins, "--explain", "parameters")
    assert code == 0
    assert out.startswith(
        "config.json in bf16, samples of 64 tokens\n"
        "ZeRO-3, activation checkpointing full, expandable segments\n"
        "2 GPUs, micro-batch 4, 2 accumulation steps\n\nat its peak, in "
    )
    explained = out.partition("\n\nit fits\n\n")[2].splitlines()
    assert explained[0] == "parameters at the peak, by the module that made them"
    assert re.fullmatch(r" +[\d.]+ MiB         total", explained[-1])


def test_what_holds_activations_adds_up_and_the_timeline_passes_through_the_peak(capsys: Capture, here: Path) -> None:
    own_vocabulary = {**CONFIG, "vocab_size": 300}  # 256 are the MLP's width, whose activations would pass for logits
    (here / "config.json").write_text(json.dumps(own_vocabulary))
    pins = ["--micro-batch", "4", "--zero-stage", "2", "--activation-checkpointing", "off", "--loss", "plain"]
    asked = ["dryrun", "config.json", *ASKED, *pins, "--global-batch", "16", "--explain", "activations"]
    code, out, _ = frugal(capsys, *asked, "--timeline", "curve.csv", "--json")
    found = json.loads(out)
    held, categories = found["explained"], found["categories"]
    assert code == 0
    assert sum(held.values()) == categories["activations"] > 0
    for name in ("attn", "mlp.act", "ln_1"):
        assert held[f"transformer.h.0.{name}"] == held[f"transformer.h.1.{name}"] > 0
    # a gelu keeps its input and what it makes of it: samples x tokens x 4 widths, in bf16
    assert held["transformer.h.0.mlp.act"] >= 2 * (4 * 64 * 4 * 64)
    with (here / "curve.csv").open() as file:
        events = list(csv.DictReader(file))
    assert tuple(events[0]) == timeline_files.COLUMNS
    peak = max(events, key=lambda event: int(event["total"]))
    live = {name: size for name, size in categories.items() if name != "rounding"}
    assert int(peak["total"]) == sum(live.values()) == found["peak_allocated_bytes"] - categories["rounding"]
    assert {name: int(peak[name]) for name in live} == live
    assert (peak["phase"], peak["operator"]) == (found["phase"], found["operator"])
    assert [event["phase"] for event in events[:1]] == ["initialisation"]
    assert {event["phase"] for event in events} == set(found["phases"])


@pytest.mark.exhaustive
def test_layers_that_differ_in_their_number_are_one_line(capsys: Capture, here: Path) -> None:
    code, out, _ = frugal(capsys, "dryrun", "config.json", *ASKED, "--explain", "activations")
    assert code == 0
    (line,) = (line for line in out.splitlines() if "ln_1" in line)
    assert re.fullmatch(r" +[\d.]+ MiB +[\d.]+%  transformer\.h\.\*\.ln_1 +2 x [\d.]+ MiB", line)


MASKS = """
import torch
from torch import nn
from frugal.models.objectives import SummedLoss

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


def test_what_does_not_fit_is_dry_run_all_the_same_and_what_is_assumed_is_said(capsys: Capture, here: Path) -> None:
    (here / "masked.py").write_text(MASKS)
    asked = ["--device", "cpu", "--gpus", "1", "--mem", "1K", "--micro-batch", "8"]
    code, out, _ = frugal(capsys, "dryrun", "masked.py:masks", *asked)
    assert code == 0
    assert "\n\nit does not fit: " in out
    assert out.endswith(
        "\n\nassumed, because it depends on data\n"
        "  what a mask selects depends on data: counted as if it selected everything\n"
    )


WRONG: dict[str, tuple[list[str], int, str]] = {
    "a plan of another schema": (["other.json"], 4, "other.json has schema 9, this frugal reads schema 6"),
    "a plan and a flag": (["other.json", "--gpus", "3"], 2, "other.json was given together with --gpus"),
    "two models": (["gpt2", "--model", "t5-small"], 2, "gpt2 was given together with --model"),
    "a timeline of another kind": (
        ["config.json", "--timeline", "curve.png"], 2, "a timeline cannot be written to curve.png",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_each_mistake_has_its_message(case: str, capsys: Capture, here: Path) -> None:
    (here / "other.json").write_text('{"schema": 9}')
    arguments, code, what = WRONG[case]
    found, out, error = frugal(capsys, "dryrun", *arguments)
    assert (found, out) == (code, "")
    assert error.startswith(f"error: {what}\n") and "\nhint: " in error
