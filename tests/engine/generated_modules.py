"""Modules as people write them, drawn at random from a seed, with the batches that they are trained on.

Which blocks run, in what order and how often depends on each sample's `route`; parameters are tied, frozen, left out,
of odd shapes, layouts and types. The output for a sample depends on that sample alone, and so does its loss, but for
the parts in `COMPARING`. All is tiny, on the CPU, and the same for the same seed in every process.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from frugal.config.optimizers import Optimizer
from frugal.models.objectives import SummedLoss

INPUTS, OUTPUTS = 8, 3

COMPARING = frozenset({"batch norm", "spectral norm", "contrastive", "mean of the micro-batch"})
"""Parts that make the gradient depend on how a global batch is cut."""


class Skip(nn.Module):
    """Parameters and modules of its own; half of what `use` makes of them is added to the input."""

    def __init__(self, use: Callable[..., Tensor], **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self.use = use
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(samples, width)`, as all blocks do."""
        return x + 0.5 * self.use(self, x)


class Experts(nn.Module):
    """Experts of which each runs on the samples that chose it, and not at all where there is none."""

    def __init__(self, width: int, number: int, *, by_value: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, number)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(number))
        self.by_value = by_value

    def forward(self, x: Tensor) -> Tensor:
        """Add what the expert of the highest score says, weighted by its probability."""
        scores = self.gate(x)
        weights, chosen = scores.softmax(1).max(1)
        out = torch.zeros_like(x)
        order: Sequence[int] = chosen.unique().tolist() if self.by_value else dict.fromkeys(chosen.tolist())
        for number in order:
            rows = (chosen == number).nonzero().flatten()
            out = out.index_add(0, rows, self.experts[number](x[rows]) * weights[rows, None])
        return x + out


class Recomputed(nn.Module):
    """A block under torch's activation checkpointing."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Run the block again in backward."""
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


Make = Callable[[int, random.Random], nn.Module]


def linear(width: int, *, bias: bool = True) -> Skip:
    """Return a linear layer."""
    return Skip(lambda own, x: torch.tanh(own.inner(x)), inner=nn.Linear(width, width, bias=bias))


def _through(inner: nn.Module) -> Skip:
    return Skip(lambda own, x: own.inner(x), inner=inner)


def _matrix(weight: Tensor) -> Skip:
    """Multiply in the type of the weight."""
    return Skip(lambda own, x: torch.tanh(x.to(own.weight.dtype) @ own.weight).to(x.dtype), weight=0.3 * weight)


def _old_style(width: int) -> Skip:
    """Return parameters made as was usual before 2020, filled in place."""
    gain, shift = torch.Tensor(width).uniform_(0.8, 1.2), torch.FloatTensor(1).zero_()
    return Skip(lambda own, x: x * own.gain + own.shift, gain=gain, shift=shift)


def _empty(width: int, *, used: bool) -> Skip:
    """Return a parameter without elements, used or not."""
    return Skip(lambda own, x: (x @ own.prompts.t()).sum(1, keepdim=True) if used else x, prompts=torch.randn(0, width))


def _conv(width: int) -> Skip:
    """See the values as small images, with the weight in channels_last."""
    inner = nn.Conv2d(width // 4, width // 4, 3, padding=1).to(memory_format=torch.channels_last)
    return Skip(lambda own, x: own.inner(x.view(len(x), -1, 2, 2)).flatten(1), inner=inner)


def _positions(inner: nn.Module, number: int) -> Skip:
    """See the values as four positions; functions outside their modules use the parameters."""
    return Skip(lambda own, x: own.inner(*[x.view(len(x), 4, -1)] * number)[0].flatten(1), inner=inner)


def _lookup(width: int, **how: Any) -> Skip:
    """Look up the number of positive ones among the first five values; some rows are never looked up."""
    return Skip(lambda own, x: own.inner((x[:, :5] > 0).sum(1)), inner=nn.Embedding(6, width, **how))


def _listed(width: int) -> Skip:
    """Return parameters in a ParameterList and a ParameterDict."""
    return Skip(
        lambda own, x: sum(own.many, x) * own.named["gain"] + own.named["bias"],
        many=nn.ParameterList([torch.randn(width) * 0.1 for _ in range(3)]),
        named=nn.ParameterDict({"gain": torch.ones(width), "bias": torch.zeros(width)}),
    )


def _of_linear(use: Callable[..., Tensor]) -> Make:
    return lambda width, _: Skip(use, inner=nn.Linear(width, width))


BLOCKS: dict[str, tuple[float, Make]] = {
    "linear": (12, lambda width, draw: linear(width, bias=draw.random() < 0.7)),
    "norm": (4, lambda width, _: _through(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)))),
    "0-dim": (3, lambda *_: Skip(lambda own, x: x * own.scale.exp(), scale=torch.tensor(0.1))),
    "non-contiguous": (2, lambda width, _: _matrix(torch.randn(width, width).t() / width**0.5)),
    "expanded": (1, lambda width, _: _matrix(torch.randn(width, 2 * width)[:, ::2] / width**0.5)),
    "fp64": (2, lambda width, _: _matrix(torch.randn(width, width, dtype=torch.float64) / width**0.5)),
    "torch.Tensor(n)": (3, lambda width, _: _old_style(width)),
    "empty": (2, lambda width, draw: _empty(width, used=draw.random() < 0.5)),
    "channels_last": (2, lambda width, _: _conv(width)),
    "attention": (2, lambda width, _: _positions(nn.MultiheadAttention(width // 4, 1, batch_first=True), 3)),
    "gru": (1, lambda width, _: _positions(nn.GRU(width // 4, width // 4, batch_first=True), 1)),
    "embedding": (2, lambda width, draw: _lookup(width, padding_idx=0 if draw.random() < 0.5 else None)),
    "experts": (4, lambda width, draw: Experts(width, draw.choice((2, 3, 5)), by_value=draw.random() < 0.5)),
    "lists": (2, lambda width, _: _listed(width)),
    # its forward is never called: the weight is used transposed, as autoencoders with tied weights do
    "borrowed": (2, _of_linear(lambda own, x: torch.tanh(F.linear(x, own.inner.weight.t(), own.inner.bias)))),
    "detached": (2, _of_linear(lambda own, x: own.inner(x).detach())),
    "weight norm": (1, lambda width, _: _through(parametrizations.weight_norm(nn.Linear(width, width)))),
    # each sample twice: it may be a single one, and that changes no statistics
    "batch norm": (
        0.5, lambda width, _: Skip(lambda own, x: own.inner(torch.cat([x, x]))[: len(x)], inner=nn.BatchNorm1d(width))
    ),
    "spectral norm": (0.5, lambda width, _: _through(parametrizations.spectral_norm(nn.Linear(width, width)))),
    "mean of the micro-batch": (0.7, _of_linear(lambda own, x: own.inner(x - x.mean(0)))),
    "sparse": (0.2, lambda width, _: _lookup(width, sparse=True)),
    "complex": (
        0.2,
        lambda width, _: Skip(
            lambda own, x: 0.2 * (x * own.phase).real, phase=torch.randn(width, dtype=torch.complex64)
        ),
    ),
}  # fmt: skip
"""Blocks by name: how often each is drawn, and what makes it of a width."""


class Net(nn.Module):
    """Blocks between two linear layers; the route of a sample says which, in which order, and which head."""

    def __init__(self, width: int, blocks: Sequence[nn.Module], paths: Sequence[Sequence[int]], **how: bool) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(blocks)
        heads = len(paths) if how["own_heads"] else 1
        self.heads = nn.ModuleList(nn.Linear(width, OUTPUTS, bias=i > 0) for i in range(heads))
        self.paths, self.how = dict(enumerate(paths)), how  # there is no route -1
        self.auxiliary = nn.Linear(width, 2) if how["unused_output"] else None
        self.unused = nn.Parameter(torch.ones(5)) if how["unused"] else None

    def forward(self, x: Tensor, route: Tensor) -> dict[str, Tensor]:
        """Return `out` of shape `(samples, OUTPUTS)` and `hidden (samples, width)`, rows in the order of `x`."""
        hidden = self.first(x.to(self.first.weight.dtype))
        order = dict.fromkeys(route.tolist()) if self.how["by_appearance"] else sorted(set(route.tolist()))
        rows, ends, outs = [], [], []
        for number in order:
            own = (route == number).nonzero().flatten()
            end = hidden[own]
            for block in self.paths[number]:
                end = self.blocks[block](end)
            rows.append(own)
            ends.append(end)
            outs.append(self.heads[number % len(self.heads)](end))
        back = torch.cat(rows).argsort()
        hidden = torch.cat(ends)[back]
        made = {"out": torch.cat(outs)[back], "hidden": hidden}
        return made if self.auxiliary is None else made | {"auxiliary": self.auxiliary(hidden)}


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the error summed over the samples."""
    return ((model(batch["x"], batch["route"])["out"] - batch["y"].to(batch["x"].dtype)) ** 2).sum()


def contrastive(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss that tells each sample from the others of its micro-batch."""
    made = model(batch["x"], batch["route"])
    scores = made["hidden"] @ made["hidden"].t()
    return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum") + made["out"].square().sum()


def regularised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the error with the weights' own norm, once for each sample."""
    norm = sum(parameter.square().sum() for name, parameter in model.named_parameters() if "first.weight" in name)
    return squared_error(model, batch) + 0.1 * len(batch["x"]) * norm


def scaled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the error in units of a weight's size, which is read as a constant."""
    weight = next(iter(model.parameters())).detach()
    return squared_error(model, batch) * weight.square().mean() * 10


def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the error with the norm of its gradient at the inputs."""
    x = batch["x"].requires_grad_()
    error = squared_error(model, batch | {"x": x})
    (slope,) = torch.autograd.grad(error, x, create_graph=True)
    return error + 0.1 * slope.square().sum()


LOSSES: dict[str, tuple[float, Callable[..., Tensor]]] = {
    "squared error": (30, squared_error),
    "contrastive": (1, contrastive),
    "regularised": (1, regularised),
    "scaled": (0.6, scaled),
    "gradient penalty": (0.6, penalised),
}  # fmt: skip
"""Losses by name, summed over samples: how often each is drawn, and the function."""


_PLAIN, _REENTRANT = "", " recomputed reentrantly"


@dataclass(frozen=True)
class Case:
    """A module, its batches, and how it is trained.

    Attributes:
        parts: what it is made of, in words.
        steps: samples of the global batch of each optimizer step.
        freezes_after: optimizer steps after which `first` is frozen; None: never.
    """

    seed: int
    parts: tuple[str, ...]
    world_size: int
    zero_stage: int
    global_batch: int
    micro_batch: int
    request: dict[str, Any]
    strategy: dict[str, Any]
    steps: list[list[dict[str, Tensor]]]
    loss: Callable[..., Tensor]
    make: Callable[[], nn.Module]
    freezes_after: int | None

    @property
    def compares(self) -> bool:
        """Return whether the gradient depends on the cut, by what it is made of."""
        return not COMPARING.isdisjoint(self.parts)

    def objective(self) -> SummedLoss:
        """Return the loss and its samples, as a user gives them."""
        return SummedLoss(self.loss, example=self.steps[0][0])

    def __str__(self) -> str:
        words = [
            f"{self.world_size} ranks, ZeRO-{self.zero_stage}, {self.global_batch} samples by {self.micro_batch}",
            " ".join(f"{name}={value}" for name, value in (self.request | self.strategy).items()),
            ", ".join(self.parts),
        ]
        return "; ".join(words)


def draw_case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(seed)
    width = draw.choice((8, 12, 16, 20))
    names = draw.choices(list(BLOCKS), [weight for weight, _ in BLOCKS.values()], k=draw.randint(2, 5))
    routes, paths = _paths(draw, len(names))
    how = {
        "own_heads": routes > 1 and draw.random() < 0.5,
        "by_appearance": draw.random() < 0.5,
        "unused_output": draw.random() < 0.15,
        "unused": draw.random() < 0.15,
    }
    loss = draw.choices(list(LOSSES), [weight for weight, _ in LOSSES.values()])[0]
    wraps = [draw.choice((_PLAIN, _PLAIN, _PLAIN, _PLAIN, " recomputed", _REENTRANT)) for _ in names]
    if loss == "gradient penalty":  # which torch refuses under reentrant checkpointing
        wraps = [_PLAIN if wrap == _REENTRANT else wrap for wrap in wraps]
    tied, frozen = draw.random() < 0.15, draw.random() < 0.15
    chosen = draw.randrange(len(names))

    def make() -> nn.Module:
        torch.manual_seed(seed)
        again = random.Random(seed)
        blocks = []
        for name, wrap in zip(names, wraps, strict=True):
            block = BLOCKS[name][1](width, again)
            blocks.append(Recomputed(block, reentrant=wrap == _REENTRANT) if wrap else block)
        if frozen:
            blocks[chosen].requires_grad_(False)
        if tied:
            blocks += [linear(width), linear(width)]
            blocks[-1].inner.weight = blocks[-2].inner.weight  # type: ignore[union-attr]  # a linear one's
        ends = [len(names), len(names) + 1] if tied else []
        return Net(width, blocks, [[*path, *ends] for path in paths], **how)

    world_size, zero_stage = draw.choice((1, 2, 2, 3, 3)), draw.randrange(4)
    micro_batch, accumulation = draw.randint(1, 4), draw.randint(1, 3)
    most = world_size * micro_batch * accumulation
    global_batch = draw.randint(max(2, most - world_size * micro_batch + 1), max(2, most))
    by_step = draw.random() < 0.4
    generator = torch.Generator().manual_seed(seed)

    def sample(route: int) -> dict[str, Tensor]:
        x = torch.randn(INPUTS, generator=generator)
        return {"x": x, "y": x[:OUTPUTS].sin() + 0.3 * route, "route": torch.tensor(route)}

    steps = []
    for _ in range(draw.choice((3, 3, 4, 5))):
        of_all = draw.randrange(routes)
        steps.append([sample(of_all if by_step else draw.randrange(routes)) for _ in range(global_batch)])
    freezes_after = 1 if draw.random() < 0.05 else None
    parts = [
        *(name + wrap for name, wrap in zip(names, wraps, strict=True)),
        f"paths {paths}" + (" by step" if by_step else ""), loss, *(name for name, on in how.items() if on),
        *(["tied"] if tied else []), *([f"block {chosen} frozen"] if frozen else []),
        *(["freezes later"] if freezes_after else []),
    ]  # fmt: skip
    request, strategy = _ways(draw, zero_stage)
    if "sparse" in names:  # with others torch has no step
        request |= {"optimizer": Optimizer(name="sgd"), "weight_decay": 0.0, "gradient_clipping": 0.0}
    return Case(
        seed=seed, parts=(*dict.fromkeys((*parts, *names)),), world_size=world_size, zero_stage=zero_stage,
        global_batch=global_batch, micro_batch=micro_batch, request=request, strategy=strategy, steps=steps,
        loss=LOSSES[loss][1], make=make, freezes_after=freezes_after,
    )  # fmt: skip


def _paths(draw: random.Random, num_blocks: int) -> tuple[int, list[list[int]]]:
    """Return how many routes there are, and the blocks of each, in their order."""
    every = list(range(num_blocks))
    match draw.choice(("one", "one", "order", "depth", "subset", "twice", "subset")):
        case "one":
            paths = [every]
        case "order":
            paths = [draw.sample(every, num_blocks) for _ in range(3)]
        case "depth":
            paths = [every[: i + 1] for i in every]
        case "twice":
            paths = [[*every, draw.choice(every)] for _ in range(draw.choice((1, 2)))]
        case _:
            paths = [sorted(draw.sample(every, draw.randint(1, num_blocks))) for _ in range(draw.choice((2, 3)))]
    return len(paths), paths


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": Optimizer(name="sgd"), "learning_rate": 0.05, "weight_decay": 0.0},
    "momentum": {"optimizer": Optimizer(name="sgd", momentum=0.9), "learning_rate": 0.05, "weight_decay": 0.0},
    "adamw": {
        "optimizer": Optimizer(name="adamw", epsilon=1e-3, beta1=0.9, beta2=0.99), "learning_rate": 0.01,
        "weight_decay": 0.1,
    },
}  # fmt: skip


def _ways(draw: random.Random, zero_stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a request and of a strategy."""
    decay = draw.choice((0.0, 0.1))
    name, optimizer = draw.choice(list(OPTIMIZERS.items()))
    if name == "sgd":
        optimizer = {**optimizer, "weight_decay": decay}
    half = draw.random() < 0.1 and zero_stage in (2, 3)
    request = {**optimizer, "gradient_clipping": draw.choice((0.0, 0.0, 1.0)), "precision": "bf16" if half else "fp32"}
    strategy: dict[str, Any] = {"reduce_bucket_elements": draw.choice((1_000_000, 2000, 300))}
    if half:
        strategy["gradient_accumulation_dtype"] = "fp32"
    if zero_stage and draw.random() < 0.15:
        strategy["offload_optimizer"] = "cpu"
    if zero_stage == 3:
        strategy["sub_group_elements"] = draw.choice((1_000_000_000, 500))
        strategy["persistence_threshold_elements"] = draw.choice((0, 100, 100_000))
    if draw.random() < 0.04:
        strategy["activation_checkpointing"] = "full"
    return request, strategy
