"""What a run leaves in the end is a model as any other."""

import json
import os
from pathlib import Path

import pytest
import torch

from bench.ranks import Ranks
from frugal.checkpoint import saving
from frugal.checkpoint.saving import save_model
from frugal.engine.train_step import evaluate
from tests.engine.checkpoints import plan_for, started, steps
from tests.engine.gradients import bound_by, plain_loss
from tests.engine.small_models import ragged_samples


class Reversed:
    """A stand-in for a tokenizer."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def trained_and_saved(folder: Path, zero_stage: int, precision: str) -> tuple[float, bool]:
    """Loss of the trained model before saving it; runs on ranks."""
    with started(plan_for(zero_stage, precision)) as engine:
        steps(engine, 0, 3)
        save_model(engine, folder, Reversed())
        loss = evaluate(engine, ragged_samples(5)).loss
        save_model(engine, folder, Reversed())  # in place of the first
        tied = engine.module.get_input_embeddings().weight is engine.module.get_output_embeddings().weight
    return loss, tied


def loss_of_pretrained(folder: Path, precision: torch.dtype, dtype: torch.dtype = torch.float64) -> float:
    """The loss of the saved model in one process, plain PyTorch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.dtype == precision
    return plain_loss(model.to(dtype), ragged_samples(5))[0]


@pytest.mark.parametrize(
    ("zero_stage", "precision"),
    [(3, "bf16"), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((0, "fp32"), (2, "bf16")))],
)
def test_the_final_model_loads_with_from_pretrained_and_has_the_same_loss(
    zero_stage: int, precision: str, tmp_path: Path, two_ranks: Ranks
) -> None:
    folder = tmp_path / "model"
    (loss, tied), _ = two_ranks.run(trained_and_saved, folder, zero_stage, precision)
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert tied
    exact = loss_of_pretrained(folder, expected)
    bound = bound_by(loss_of_pretrained(folder, expected, expected), exact)
    assert loss == pytest.approx(exact, rel=bound)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "written.json"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


def test_a_model_is_on_the_disk_before_the_one_before_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        done.append(("flush", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        done.append(("rename", path.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    module = torch.nn.Linear(3, 2)
    for _ in range(2):
        done.clear()
        saving.write_model(module, dict(module.state_dict()), tmp_path / "model", None)
    before = [name.partition(".tmp-")[0] for what, name in done[: done.index(("rename", "model"))] if what == "flush"]
    assert {"model.safetensors", "model"} <= set(before)
    assert done[-1] == ("flush", tmp_path.name)
