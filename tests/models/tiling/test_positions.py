"""Modules that leave positions apart are told from those that do not, without running them on data."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal.models.tiling.positions import PositionsMeetError, widths

WIDTH = 16


class Gated(nn.Module):
    """A gated MLP with a norm before it, which may do one thing more."""

    def __init__(self, kind: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH) if kind != "rms" else nn.RMSNorm(WIDTH)
        self.both, self.down = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """`(samples, positions, 16)` to the same."""
        gate, up = self.both(self.norm(x)).chunk(2, dim=-1)
        y = self.down(F.silu(gate) * up)
        match self.kind:
            case "mean":
                y = y - y.mean(1, keepdim=True)
            case "attention":
                y = (y @ y.transpose(1, 2)).softmax(-1) @ y
            case "shift":
                y = y + y.roll(1, 1)
            case "positions":
                y = y * torch.arange(y.shape[1], device=y.device)[:, None]
            case "softmax over positions":
                y = y.softmax(1)
            case "softmax over the width":
                y = y.softmax(-1)
            case "norm by hand":
                y = y * (y.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
            case "buffer":
                self.seen += y.sum()
            case "heads":
                y = y.view(*y.shape[:-1], 4, 4).transpose(-1, -2).flatten(-2)
        return x + self.dropout(y)


@pytest.mark.parametrize("kind", ["", "rms", "softmax over the width", "norm by hand", "heads"])
def test_an_mlp_leaves_positions_apart(kind: str) -> None:
    module = Gated(kind)
    assert widths(module) == (WIDTH, 6 * WIDTH)
    x = torch.randn(2, 7, WIDTH)
    changed = x.clone()
    changed[0, 3] += 1
    is_same = (module(x) == module(changed)).all(-1)
    assert is_same.sum() == 13 and not is_same[0, 3]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mean", "mean"), ("attention", "transpose"), ("shift", "roll"), ("positions", "mul"),
        ("softmax over positions", "_softmax"), ("buffer", "sum"),
    ],
)  # fmt: skip
def test_positions_that_meet_are_noticed(kind: str, why: str) -> None:
    with pytest.raises(PositionsMeetError) as caught:
        widths(Gated(kind))
    assert str(caught.value) == f"{why} is not known to leave positions apart"


class Normed(Gated):
    """With statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`(samples, positions, 16)` to the same."""
        return self.batch(super().forward(x).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("module", "why"), [(Gated(dropout=0.1), "draws random numbers, as a dropout does"), (Normed(), "")]
)
def test_dropout_and_statistics_of_the_batch_are_refused(module: nn.Module, why: str) -> None:
    with pytest.raises(PositionsMeetError, match=why):
        widths(module)
