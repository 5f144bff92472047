"""A model of images from a factory is planned and trained; what depends on the split is said, and can be mended."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.runs import environment

SCRIPT = """
import sys
import torch
from torch import nn
import frugal
from frugal.models.objectives import SummedLoss

def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
    def loss(model, batch):
        logits = model(pixel_values=batch["x"]).logits.float()
        return nn.functional.cross_entropy(logits, batch["y"], reduction="sum")
    return ResNetForImageClassification(config), SummedLoss(loss, example={"x": torch.zeros(3, 32, 32), "y": 0})

if __name__ == "__main__":
    plan = frugal.plan(
        model="images.py:resnet", global_batch=8, micro_batch=2, device="cpu", gpus=1, mem="2G", precision="fp32",
        batch_norm=None if sys.argv[1] == "None" else sys.argv[1],
    )
    torch.manual_seed(0)
    rows = [{"x": torch.randn(3, 32, 32), "y": i % 4} for i in range(8)]
    engine = frugal.initialize(*resnet()[:1], plan, resnet()[1])
    losses = [engine.train_step(rows).loss for _ in range(8)]
    assert losses[-1] < losses[0] and engine.evaluate(rows).loss > 0
    print(*plan.warnings, sep="\\n")
"""
NOTE = "the gradient depends on how a global batch is split: in 6 BatchNorm2d (the first is `resnet.embedder.embedder."


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch_norm", [None, "frozen"])
def test_plan_and_training_say_that_batch_norm_depends_on_the_split(batch_norm: str | None, tmp_path: Path) -> None:
    (tmp_path / "images.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "images.py", str(batch_norm)], cwd=tmp_path, env=environment(tmp_path), capture_output=True,
        text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    planned, logged = done.stdout, done.stderr
    if batch_norm is None:
        for text in (planned, logged):
            assert text.count(NOTE) == 1
            assert text.count("with --batch-norm frozen, which uses running statistics, they do not") == 1
    else:
        assert "the gradient depends" not in planned + logged
