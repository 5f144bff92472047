"""Models in which samples choose the parameters that they use, and the same training in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.gradients import Gradient, weights

KINDS = ("heads", "experts", "adapters", "order", "skip")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "learning_rate": 0.02, "weight_decay": 0.0},
    "momentum": {"optimizer": "sgd", "learning_rate": 0.02, "weight_decay": 0.01, "momentum": 0.9},
    "adamw": {
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "adam_epsilon": 1e-3,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
    },
}
WIDTH, NUM_WAYS = 24, 3


class Routed(nn.Module):
    """A first layer, what `kind` says of the ways between, and a last layer; each sample goes its own way.

    heads: the last layer is the way's own. experts: of each way one, by the sample's numbers. adapters: a bottleneck
    of each way beside the path. order: a sample meets two blocks in the order of its way. skip: it meets as many.
    """

    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        self.first = nn.Linear(16, WIDTH)
        self.ways = nn.ModuleList(
            nn.Linear(WIDTH, 3)
            if kind == "heads"
            else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(NUM_WAYS)
        )
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, way: Tensor) -> Tensor:
        """`(samples, 16)` and the way of each to `(samples, 3)`."""
        hidden = torch.tanh(self.first(x))
        if self.kind == "experts":
            way = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        result = torch.zeros(len(x), 3, dtype=x.dtype)
        for number in way.unique().tolist():
            rows = (way == number).nonzero().squeeze(1)
            result = result.index_add(0, rows, self._out(hidden[rows], number))
        return result

    def _out(self, hidden: Tensor, number: int) -> Tensor:
        if self.kind == "heads":
            return self.ways[number](hidden)
        if self.kind == "order":
            for block in self.ways[:2] if number % 2 else reversed(self.ways[:2]):
                hidden = hidden + block(hidden)
        elif self.kind == "skip":
            for block in self.ways[: number + 1]:
                hidden = hidden + block(hidden)
        else:
            hidden = hidden + self.ways[number](hidden)
        return self.last(hidden)


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Summed over the samples."""
    return ((model(batch["x"], batch["way"]) - batch["y"]) ** 2).sum()


def routed_points(ways: str, seed: int = 0) -> list[dict[str, Tensor]]:
    """A sample for each digit of `ways`; its numbers lead an expert's router the same way."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for way in map(int, ways):
        x = torch.randn(16, generator=generator)
        x[0], x[1] = x[0].abs() * (1 if way > 0 else -1), x[1].abs() * (1 if way > 1 else -1)
        samples.append({"x": x, "y": torch.randn(3, generator=generator), "way": torch.tensor(way)})
    return samples


def plain(kind: str, batches: list[str], optimizer: str, dtype: torch.dtype = torch.float64) -> Gradient:
    """The weights after plain PyTorch took a step on each batch, one sample at a time."""
    model = Routed(kind).to(dtype)
    settings = OPTIMIZERS[optimizer]
    how = {"lr": settings["learning_rate"], "weight_decay": settings["weight_decay"]}
    if settings["optimizer"] == "sgd":
        inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), momentum=settings.get("momentum", 0), **how)
    else:
        inner = torch.optim.AdamW(model.parameters(), eps=settings["adam_epsilon"], **how)
    for step, ways in enumerate(batches):
        samples = routed_points(ways, seed=step)
        inner.zero_grad(set_to_none=True)
        for sample in samples:
            batch = {name: tensor[None].to(dtype) if name != "way" else tensor[None] for name, tensor in sample.items()}
            (squared_error(model, batch) / len(samples)).backward()
        inner.step()
    return weights(model)


def update_error(after: Gradient, reference: Gradient, kind: str) -> float:
    """The norm of the difference, by that of what the reference has changed."""
    before = weights(Routed(kind))
    apart = sum(float(((after[name] - reference[name]) ** 2).sum()) for name in reference)
    changed = sum(float(((reference[name] - before[name]) ** 2).sum()) for name in reference)
    return float((apart / changed) ** 0.5)
