"""`frugal train --calibrate`: the plan after a run begins with the way that the run has measured to be the fastest."""

from pathlib import Path

import pytest

from frugal.cli import run
from frugal.planning.plan import Plan

MODELS = """
import time
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

def sleep(module, args, kwargs):
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if tokens.device.type != "meta":
        time.sleep(0.004 * len(tokens) ** 3)  # what no plan foresees: large micro-batches are slow

def llama():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=2048, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192,
        num_hidden_layers=6, max_position_embeddings=256, use_cache=False, bos_token_id=0, eos_token_id=1,
        pad_token_id=2,
    ))
    model.register_forward_pre_hook(sleep, with_kwargs=True)
    return model
"""
ASKED = ["--model", "models.py:llama", "--device", "cpu", "--gpus", "2", "--mem", "32M", "--precision", "fp32",
         "--seq-len", "128", "--global-batch", "16", "--pack", "--data", "stdlib", "--tokenizer", "byte", "--limit",
         "20"]  # fmt: skip


@pytest.mark.exhaustive
def test_a_plan_begins_with_what_a_run_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    for name in ("config", "cache"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
    predicted = planned(tmp_path / "before")
    assert run(["train", *ASKED, "--steps", "70", "--tune", "--calibrate", "--eval-every", "0", "--out", "run"]) == 0
    assert "ways are kept in " in capfd.readouterr().out
    tuned = Plan.read(tmp_path / "run" / "plan.json")
    assert tuned.batch.largest_micro_batch < predicted.batch.largest_micro_batch
    after = planned(tmp_path / "after")
    assert (after.strategy, after.batch.micro_batch) == (tuned.strategy, tuned.batch.micro_batch)
    assert after.why[0].startswith("measured fastest on this machine on ") and not after.alternatives
    assert planned(tmp_path / "ignored", "--set", "calibration=false") == predicted
    assert run(["train", *ASKED, "--steps", "5", "--no-tune", "--eval-every", "0", "--out", "next"]) == 0
    assert Plan.read(tmp_path / "next" / "plan.json").batch == after.batch


def planned(folder: Path, *more: str) -> Plan:
    """What `frugal plan` writes."""
    assert run(["plan", *ASKED, *more, "-o", str(folder)]) == 0
    return Plan.read(folder / "plan.json")
