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

from frugal.models.objectives import SummedLoss

INPUTS, OUTPUTS = 8, 3

COMPARING = frozenset({"batch norm", "spectral norm", "contrastive", "mean of the micro-batch"})
"""Parts that make the gradient depend on how a global batch is cut."""


class Linear(nn.Module):
    """A linear layer with a skip connection."""

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(samples, width)`, as all blocks do."""
        return x + 0.5 * torch.tanh(self.inner(x))


class Through(nn.Module):
    """A module with a skip connection."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of `x` and half of what the inner module makes of it."""
        return x + 0.5 * self.inner(x)


class Scale(nn.Module):
    """A factor of no dimension, as CLIP's `logit_scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` times a factor near 1."""
        return x * self.scale.exp()


class Matrix(nn.Module):
    """A parameter of its own that is multiplied with the input: not contiguous, or of another type."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * weight)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in the type of the weight."""
        return x + torch.tanh(x.to(self.weight.dtype) @ self.weight).to(x.dtype)


class OldStyle(nn.Module):
    """A parameter made as was usual before 2020, filled in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.Tensor(width))
        self.shift = nn.Parameter(torch.FloatTensor(1).zero_())
        with torch.no_grad():
            self.gain.uniform_(0.8, 1.2)

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift."""
        return x * self.gain + self.shift


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(width, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        """Turn and take the real part."""
        return x + 0.1 * (x * self.phase).real


class Empty(nn.Module):
    """A parameter without elements, used or not."""

    def __init__(self, width: int, *, used: bool) -> None:
        super().__init__()
        self.prompts = nn.Parameter(torch.randn(0, width))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        """Add what the prompts, of which there are none, say of the samples."""
        return x + (x @ self.prompts.t()).sum(1, keepdim=True) if self.used else x


class Conv(nn.Module):
    """A convolution with its weight in channels_last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(width // 4, width // 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """See the values as small images."""
        return x + 0.5 * self.inner(x.view(len(x), -1, 2, 2)).flatten(1)


class Sequence2(nn.Module):
    """Attention or a GRU over four positions, whose parameters are used by functions outside their modules."""

    def __init__(self, width: int, *, recurrent: bool) -> None:
        super().__init__()
        size = width // 4
        self.inner: nn.Module = (
            nn.GRU(size, size, batch_first=True) if recurrent else nn.MultiheadAttention(size, 1, batch_first=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """See the values as four positions."""
        each = x.view(len(x), 4, -1)
        out = self.inner(each)[0] if isinstance(self.inner, nn.GRU) else self.inner(each, each, each)[0]
        return x + 0.5 * out.flatten(1)


class Lookup(nn.Module):
    """An embedding of a number made of the input; some rows are not looked up, and one may be padding."""

    def __init__(self, width: int, *, padding: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.inner = nn.Embedding(6, width, padding_idx=0 if padding else None, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        """Look up the number of positive ones among the first five values."""
        return x + 0.3 * self.inner((x[:, :5] > 0).sum(1))


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


class Listed(nn.Module):
    """Parameters in a ParameterList and a ParameterDict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(width) * 0.1 for _ in range(3)])
        self.named = nn.ParameterDict({"gain": torch.ones(width), "bias": torch.zeros(width)})

    def forward(self, x: Tensor) -> Tensor:
        """Add all of one and scale by the other."""
        for each in self.many:
            x = x + each
        return x * self.named["gain"] + self.named["bias"]


class Borrowed(nn.Module):
    """A linear layer whose weight is used by a function, its forward never being called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Use the transposed weight, as autoencoders with tied weights do."""
        return x + 0.5 * torch.tanh(F.linear(x, self.inner.weight.t(), self.inner.bias))


class Detached(nn.Module):
    """A block that is run, but gets no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the inner layer says, as a constant."""
        return x + 0.5 * self.inner(x).detach()


class Recomputed(nn.Module):
    """A block under torch's activation checkpointing."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Run the block again in backward."""
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Normed(nn.Module):
    """A BatchNorm that may be given a single sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Show each sample twice, which changes no statistics."""
        return x + 0.5 * self.inner(torch.cat([x, x]))[: len(x)]


class MeanOfAll(nn.Module):
    """A block in which samples change each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Leave out the mean over the micro-batch."""
        return x + 0.5 * self.inner(x - x.mean(0))


Make = Callable[[int, random.Random], nn.Module]

BLOCKS: dict[str, tuple[float, Make]] = {
    "linear": (12, lambda width, draw: Linear(width, bias=draw.random() < 0.7)),
    "norm": (4, lambda width, _: Through(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)))),
    "0-dim": (3, lambda *_: Scale()),
    "non-contiguous": (2, lambda width, _: Matrix(torch.randn(width, width).t() / width**0.5)),
    "expanded": (1, lambda width, _: Matrix(torch.randn(width, 2 * width)[:, ::2] / width**0.5)),
    "fp64": (2, lambda width, _: Matrix(torch.randn(width, width, dtype=torch.float64) / width**0.5)),
    "torch.Tensor(n)": (3, lambda width, _: OldStyle(width)),
    "empty": (2, lambda width, draw: Empty(width, used=draw.random() < 0.5)),
    "channels_last": (2, lambda width, _: Conv(width)),
    "attention": (2, lambda width, _: Sequence2(width, recurrent=False)),
    "gru": (1, lambda width, _: Sequence2(width, recurrent=True)),
    "embedding": (2, lambda width, draw: Lookup(width, padding=draw.random() < 0.5)),
    "experts": (4, lambda width, draw: Experts(width, draw.choice((2, 3, 5)), by_value=draw.random() < 0.5)),
    "lists": (2, lambda width, _: Listed(width)),
    "borrowed": (2, lambda width, _: Borrowed(width)),
    "detached": (2, lambda width, _: Detached(width)),
    "weight norm": (1, lambda width, _: Through(parametrizations.weight_norm(nn.Linear(width, width)))),
    "batch norm": (0.5, lambda width, _: Normed(width)),
    "spectral norm": (0.5, lambda width, _: Through(parametrizations.spectral_norm(nn.Linear(width, width)))),
    "mean of the micro-batch": (0.7, lambda width, _: MeanOfAll(width)),
    "sparse": (0.2, lambda width, _: Lookup(width, sparse=True)),
    "complex": (0.2, lambda width, _: Complex(width)),
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
            blocks += [Linear(width), Linear(width)]
            blocks[-1].inner.weight = blocks[-2].inner.weight  # type: ignore[union-attr]  # a Linear's
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
        request |= {"optimizer": "sgd", "weight_decay": 0.0, "gradient_clipping": 0.0}
        request = {name: value for name, value in request.items() if not name.startswith(("momentum", "adam_"))}
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


def _ways(draw: random.Random, zero_stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a request and of a strategy."""
    optimizer = draw.choice(
        (
            {"optimizer": "sgd", "learning_rate": 0.05, "weight_decay": draw.choice((0.0, 0.1))},
            {"optimizer": "sgd", "learning_rate": 0.05, "weight_decay": 0.0, "momentum": 0.9},
            {
                "optimizer": "adamw",
                "learning_rate": 0.01,
                "weight_decay": 0.1,
                "adam_epsilon": 1e-3,
                "adam_beta1": 0.9,
                "adam_beta2": 0.99,
            },
        )
    )
    half = draw.random() < 0.1 and zero_stage in (2, 3)
    request = {
        **optimizer,
        "gradient_clipping": draw.choice((0.0, 0.0, 1.0)),
        "precision": "bf16" if half else "fp32",
    }
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
