"""A loss of one's own is trained as any other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frugal.models.objectives import SummedLoss


def regression() -> tuple[nn.Module, SummedLoss]:
    torch.manual_seed(0)
    objective = SummedLoss(
        lambda model, batch: F.mse_loss(model(batch["x"]).squeeze(-1), batch["y"], reduction="sum"),
        example={"x": torch.ones(4), "y": torch.zeros(())},
    )
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), objective


def test_an_own_loss_counts_samples_unless_told_otherwise() -> None:
    model, objective = regression()
    samples = [{"x": torch.randn(4), "y": torch.randn(())} for _ in range(5)]
    batch = objective.collate(samples)
    expected = sum(float((model(s["x"]) - s["y"]) ** 2) for s in samples)
    assert objective.count(batch) == 5
    assert objective.loss_sum(model, batch).item() == pytest.approx(expected, rel=5 * 2**-23)  # five sums of fp32


def test_an_own_loss_gets_a_dummy_from_its_example() -> None:
    model, objective = regression()
    batch = objective.collate([objective.dummy()])
    loss = objective.loss_sum(model, batch)
    loss.backward()
    assert objective.count(batch) == 0
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_an_own_example_may_depend_on_the_sequence_length() -> None:
    objective = SummedLoss(
        lambda model, batch: model(batch["x"]).sum(),
        example=lambda seq_len: {"x": torch.zeros(seq_len)},
        count=lambda batch: batch["x"].numel(),
    )
    assert objective.example(3, 7)["x"].shape == (3, 7)
    assert objective.count(objective.example(3, 7)) == 21
