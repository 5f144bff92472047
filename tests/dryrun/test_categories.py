"""What a storage is for follows from whose code made it, wherever that code lies."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.plans import plan_by_hand
from frugal.dryrun.messages import DryRun
from frugal.models.objectives import SummedLoss
from tests.dryrun.test_truth import dry_run_of

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)) * torch.ones_like(self.inner(x)))
"""

MICRO_BATCH = 512


def net_in(folder: Path) -> Any:
    """The class of a file in `folder`."""
    folder.mkdir(parents=True)
    path = folder / "net.py"
    path.write_text(NET)
    spec = importlib.util.spec_from_file_location(f"net_in_{folder.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Net


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().sum()


def dry_run_in(folder: Path) -> DryRun:
    plan = plan_by_hand(world_size=2, global_batch=2 * MICRO_BATCH, micro_batch=MICRO_BATCH, zero_stage=2)
    return dry_run_of(plan, net_in(folder), lambda: SummedLoss(loss, example={"x": torch.ones(64)}), kind="cuda")


@pytest.mark.parametrize("folder", ["deepspeed", "deepspeed/runtime", "torch", "frugal/dryrun", "transformers"])
def test_a_model_below_a_folder_of_a_librarys_name_is_a_model(folder: str, tmp_path: Path) -> None:
    plain, named = dry_run_in(tmp_path / "plain"), dry_run_in(tmp_path / folder)
    assert named.timeline.peak(MICRO_BATCH).categories == plain.timeline.peak(MICRO_BATCH).categories
    assert plain.timeline.peak(MICRO_BATCH).categories["activations"] > 0
    assert named.counts == plain.counts
