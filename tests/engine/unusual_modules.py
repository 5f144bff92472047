"""Modules whose parameters are not what most are: shapes, strides, dtypes, names and ways of use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from frugal.models.objectives import SummedLoss
from tests.engine.small_models import points


class Plain(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 3)

    def between(self, x: Tensor) -> Tensor:
        """`(samples, 8)` to the same, as of all kinds."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        """`(samples, 16)` to `(samples, 3)`."""
        return self.last(self.between(torch.tanh(self.first(x.to(self.first.weight.dtype)))))


class Unusual(Plain):
    """An odd number of parameters: without dimensions, strided, tied, of other dtypes, frozen integers, legacy ones."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.randn(8, 24) / 3
        self.scalar = nn.Parameter(torch.tensor(1.3))
        self.transposed = nn.Parameter((torch.randn(8, 8) / 3).t())
        self.strided = nn.Parameter(rows[:, 8::2])
        self.view = nn.Parameter(rows[1, :8])
        self.expanded = nn.Parameter(torch.randn(8, 1).expand(8, 8))
        self.legacy = nn.Parameter(torch.Tensor(8))
        nn.init.normal_(self.legacy)
        self.fp64 = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.fp16 = nn.Parameter(torch.randn(8, dtype=torch.float16))
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.tied, self.same = nn.Linear(8, 7, bias=False), nn.Linear(8, 7, bias=False)
        self.same.weight = self.tied.weight
        scalars = [nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(1.1))]
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(8)), *scalars])
        self.named = nn.ParameterDict({"x": nn.Parameter(torch.randn(8)), "y": nn.Parameter(torch.randn(1))})
        self.places = nn.Parameter(torch.arange(8).flip(0), requires_grad=False)
        self.small = nn.Parameter(torch.arange(8, dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(8) == 5, requires_grad=False)
        self.octets = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("shorts", torch.arange(8, dtype=torch.int16))
        self.register_buffer("ones", torch.ones(8, dtype=torch.bool))
        self.register_buffer("none", torch.zeros(0))

    def between(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x + torch.tanh((x * self.scalar.exp()) @ self.transposed @ self.strided @ self.expanded)
        x = (x * self.view * self.legacy * self.fp64 * self.fp16).to(dtype)
        x = x + self.conv(x.view(-1, 2, 2, 2)).flatten(1) + F.linear(self.same(self.tied(x)[:, :7] @ self.same.weight),
                                                                    self.tied.weight.t())  # fmt: skip
        x = x * self.listed[0] * self.listed[1] * self.listed[2] + self.named["x"] * self.named["y"]
        numbers = (self.small + self.shorts + self.octets.sum()).to(dtype) / 30
        return (x[:, self.places].masked_fill(self.mask, 0.5) * numbers).masked_fill(~self.ones, 0)


class GradientPenalty(Plain):
    """Its loss differentiates its output, see `loss`."""


class Sparse(Plain):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8, sparse=True)

    def between(self, x: Tensor) -> Tensor:
        return x * self.table((x[:, 0] > 0).long())


class Complex(Plain):
    """A complex parameter."""

    def __init__(self, *, is_trained: bool = True) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64), requires_grad=is_trained)

    def between(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) * self.phase).abs().to(x.dtype)


class FrozenComplex(Complex):
    """A complex parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__(is_trained=False)


class Empty(Plain):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))

    def between(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


class SharedMemory(Plain):
    """Two parameters, the second of which is the first one's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = nn.Parameter(self.one.weight.t())

    def between(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


class WithInner(Plain):
    """A small network inside, used in the plain way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def between(self, x: Tensor) -> Tensor:
        return self.inner(x)


class SameFunctional(WithInner):
    """Called with its own parameters."""

    def between(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.inner, dict(self.inner.named_parameters()), (x,))


class OtherFunctional(WithInner):
    """Called with tensors made of its parameters."""

    def between(self, x: Tensor) -> Tensor:
        changed = {name: parameter * 1.5 for name, parameter in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, changed, (x,))


class Vmapped(WithInner):
    """Gradients by sample."""

    def between(self, x: Tensor) -> Tensor:
        return x + torch.func.vmap(torch.func.grad(lambda row: self.inner(row).sum()))(x)


class TwiceDifferentiated(WithInner):
    """A gradient of which another is taken, inside the forward."""

    def between(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)[0]


class Compiled(WithInner):
    """Inside a wrapper of torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(self.inner, backend="eager")  # type: ignore[assignment]  # a wrapper of it


class Scripted(WithInner):
    """With a part that torch.jit has compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(self.inner)


class MadeInForward(Plain):
    """A parameter that the first forward makes."""

    def between(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(8, device=x.device))
        return x * self.late


_compiled = torch.compile(lambda x: x * 0.5 * (1 + torch.erf(x / 1.4)), backend="eager")


class CompiledFunction(WithInner):
    """With a free function that torch.compile has wrapped."""

    def between(self, x: Tensor) -> Tensor:
        return _compiled(self.inner(x))


class CompiledInPlace(WithInner):
    """Compiled without a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.compile(backend="eager")


@dataclass(frozen=True)
class Output:
    """The output of `InObjects`, frozen."""

    value: Tensor
    places: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Slots:
    """The output of `InSlots`: without attributes by name."""

    value: Tensor


class Returning(nn.Module):
    """A weight, and a product with it that is returned in what `put` makes of it."""

    def __init__(self, put: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.put = put

    def forward(self, x: Tensor) -> Any:
        """`(samples, 8)` to the same, in an object."""
        return self.put(torch.tanh(x @ self.weight))


class InObjects(Plain):
    """Parts that return objects with tensors in their attributes, also inside of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = Returning(Output)
        self.plain = Returning(lambda value: SimpleNamespace(value=value))
        self.listed = Returning(lambda value: {"outputs": [Output(value), None]})
        self.deep = Returning(lambda value: Output(value.detach(), {"value": value}))
        self.drawn = Returning(lambda value: torch.distributions.Normal(value, 1.0))

    def between(self, x: Tensor) -> Tensor:
        x = self.plain(self.frozen(x).value).value
        x = self.listed(x)["outputs"][0].value
        return self.drawn(self.deep(x).places["value"]).mean


class Hidden(Plain):
    """Parts whose results reach others in objects within objects, closures, attributes, and a list of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = Returning(lambda value: SimpleNamespace(inner=[SimpleNamespace(value=value)]))
        self.closure = Returning(lambda value: lambda: value)
        self.partial = Returning(lambda value: partial(torch.mul, value))
        self.distribution = Returning(
            lambda value: torch.distributions.Independent(torch.distributions.Normal(value, 1.0), 1)
        )
        self.keeping, self.adding = Keeping(), Adding()

    def between(self, x: Tensor) -> Tensor:
        x = self.distribution(self.partial(self.closure(self.deep(x).inner[0].value)())(1.5)).mean
        self.keeping(x)
        added: list[Tensor] = []
        return self.adding(self.keeping.kept, added) + added[0]


class Keeping(Returning):
    """A part that leaves its result in an attribute."""

    def __init__(self) -> None:
        super().__init__(lambda value: setattr(self, "kept", value))


class Adding(Returning):
    """A part that adds to a list."""

    def __init__(self) -> None:
        super().__init__(lambda value: value)

    def forward(self, x: Tensor, added: list[Tensor]) -> Tensor:
        """Return the product, and add its double to `added`."""
        added.append(2 * x)
        return super().forward(x)


class OutsideItself(WithInner):
    """A part that runs a module which is not its own, in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Returning(lambda value: value + self.inner(value))

    def between(self, x: Tensor) -> Tensor:
        return self.part(x)


class WrittenElsewhere(Plain):
    """A part whose result goes into a dict that it is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Returning(lambda value: value)

    def between(self, x: Tensor) -> Tensor:
        found: dict[str, Tensor] = {}
        self.part.put = lambda value: found.update(value=value)
        self.part(x)
        return found["value"]


class ByName(WithInner):
    """Parameters of a part, found by their names."""

    def between(self, x: Tensor) -> Tensor:
        named = dict(self.inner.named_parameters())
        return F.linear(x, named["0.weight"], named["0.bias"])


class InferenceMode(WithInner):
    """A part that runs in inference mode."""

    def between(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = self.inner(x)
        return x * scale.clone()


class KeptProducts(WithInner):
    """A part under torch's own selective activation checkpointing."""

    def between(self, x: Tensor) -> Tensor:
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        kept = partial(create_selective_checkpoint_contexts, products)
        return checkpoint(self.inner, x[:, None], use_reentrant=False, context_fn=kept)[:, 0]


class InSlots(Plain):
    """A part that returns an object whose attributes have no names to be found by."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Returning(Slots)

    def between(self, x: Tensor) -> Tensor:
        return self.part(x).value


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The squared error summed over the samples; a gradient penalty besides, for `GradientPenalty`."""
    x = batch["x"]
    if not isinstance(getattr(model, "module", model), GradientPenalty):
        return (model(x).to(batch["y"].dtype) - batch["y"]).square().sum()
    x = x.detach().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return (output - batch["y"]).square().sum() + gradient.square().sum()


OBJECTIVE = SummedLoss(loss, example=points(1)[0])


def reference(make: Callable[[], nn.Module], number: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The gradient of the mean loss over `number` samples: plain torch, every sample by itself."""
    model = make()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for sample in points(number):
        batch = {name: value[None].to(dtype) for name, value in sample.items()}
        (loss(model, batch) / number).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
