"""The modules that compute what a fused kernel does: a trial of each on random numbers, against a formula.

Names of classes say nothing: a user's own norm is recognised, and one that is called like Llama's and computes
something else is not. A norm is tried with a random weight of its width, an MLP with small projections in the place of
its own, a rotation as the function that it is; all on the CPU, forward and gradients, with inputs from small to large,
so that a clamp or another epsilon shows. The formulas are those of Liger's kernels, which tests hold to them.

Not recognised, and left as they are: `LayerNorm` and torch's own `RMSNorm`, which are one kernel in torch already;
modules with hooks on their parts, which would see what a kernel overwrites; GELU that is not approximated by tanh.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal import torch_internals

Casting = Literal["llama", "gemma"]
"""Where a norm in half precision rounds: before the product with its weight, or after it."""

Activation = Literal["silu", "gelu"]

MOST_COLUMNS = 65536
"""The widest row that Liger's kernels take."""

_TOLERANCE = 1e-5
_SCALES = (1e-3, 1.0, 30.0)


@dataclass(frozen=True)
class RMSNorm:
    """A norm `x / sqrt(mean(x^2) + epsilon) * (offset + weight)`."""

    epsilon: float
    offset: float
    casting: Casting

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of `x (..., width)`."""
        rows = x.float()
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.casting == "llama":
            return rows.to(x.dtype) * (self.offset + weight)
        return (rows * (self.offset + weight.float())).to(x.dtype)


@dataclass(frozen=True)
class GatedMLP:
    """An MLP `down(activation(gate(x)) * up(x))`, by the names of its projections."""

    gate: str
    up: str
    down: str
    activation: Activation


def activated(activation: Activation, gate: Tensor) -> Tensor:
    """Return the activation of a gate."""
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(samples, heads, positions, size)` rotated by angles `(samples or 1, positions, size)`, whose halves are
    the same: the first half of each head with the second."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turned(q), turned(k)


def kind(module: nn.Module) -> tuple[Any, ...]:
    """Return a value that is equal for modules of the same classes, sizes, settings and hooks."""
    return tuple(
        (
            name,
            type(each),
            tuple((key, _shape(p), p.dtype) for key, p in each.named_parameters(recurse=False)),
            tuple((key, value) for key, value in sorted(vars(each).items()) if isinstance(value, int | float | str)),
            "forward" in vars(each),
            _has_hooks(each),
        )
        for name, each in module.named_modules()
    )


def rms_norm(module: nn.Module) -> RMSNorm | None:
    """Return the norm that a module is; None: none of those that Liger has."""
    own = dict(module.named_parameters())
    if len(own) != 1 or isinstance(module, nn.RMSNorm) or _is_special(module) or any(True for _ in module.buffers()):
        return None
    ((name, weight),) = own.items()
    shape = _shape(weight)
    if len(shape) != 1 or shape[0] > MOST_COLUMNS or name not in module._parameters:
        return None
    (width,) = shape
    epsilons = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2]
    trial = _Trial()

    def theirs(x: Tensor, weight: Tensor) -> Any:
        return _run(_like(module, _parameters={name: weight}), x)

    for epsilon in dict.fromkeys(epsilons):
        for offset in (0.0, 1.0):
            norm = RMSNorm(epsilon, offset, "llama")
            if trial.are_alike(theirs, norm, (2, 3, width), (width,)):
                return _with_casting(norm, theirs, trial, weight.dtype, width)
    return None


def _with_casting(
    norm: RMSNorm, theirs: Callable[..., Any], trial: "_Trial", dtype: torch.dtype, width: int
) -> RMSNorm | None:
    """Return a norm with its casting in `dtype`: results must be the same but for rare roundings.

    One in fp32 is tried in bf16, which DeepSpeed may turn it into.
    """
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    x, weight = (trial.random(shape, 1.0).to(dtype) for shape in ((8, width), (width,)))
    with torch.no_grad():
        result = theirs(x, nn.Parameter(weight))
        for casting in get_args(Casting):
            rounding = replace(norm, casting=casting)
            if result.dtype == dtype and (result != rounding(x, weight)).double().mean() < 0.01:
                return rounding
    return None


def gated_mlp(module: nn.Module) -> GatedMLP | None:
    """Return the gated MLP that a module is; None: none of those that Liger has."""
    children = dict(module.named_children())
    sizes = {name: size for name, child in children.items() if (size := _sizes(child))}
    others = [child for name, child in children.items() if name not in sizes]
    has_own = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    if len(sizes) != 3 or has_own or _is_special(module) or any(map(_has_tensors, others)):
        return None
    if any(_has_hooks(each) for each in module.modules() if each is not module):
        return None
    widths = sorted({size for pair in sizes.values() for size in pair})
    shapes = {name: tuple(8 + 4 * widths.index(size) for size in pair[::-1]) for name, pair in sizes.items()}
    trial = _Trial()

    def theirs(x: Tensor, *weights: Tensor) -> Any:
        projections = {name: _Projection(weight) for name, weight in zip(sizes, weights, strict=True)}
        return _run(_like(module, _modules=children | projections), x)

    def formula(mlp: GatedMLP, x: Tensor, *weights: Tensor) -> Tensor:
        by_name = dict(zip(sizes, weights, strict=True))
        gate, up = (F.linear(x, by_name[name]) for name in (mlp.gate, mlp.up))
        return F.linear(activated(mlp.activation, gate) * up, by_name[mlp.down])

    for gate, up, down in permutations(sizes):
        if sizes[gate] != sizes[up] or sizes[down] != sizes[gate][::-1] or sizes[gate][1] > MOST_COLUMNS:
            continue
        for activation in get_args(Activation):
            mlp = GatedMLP(gate, up, down, activation)
            if trial.are_alike(theirs, partial(formula, mlp), (2, 3, shapes[gate][1]), *shapes.values()):
                return mlp
    return None


def rotation(module: nn.Module) -> str | None:
    """Return the name of the function in its file by which a module's forward rotates queries and keys; None: none."""
    if "forward" in vars(module):
        return None
    forward: Any = inspect.unwrap(type(module).forward)
    for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
        function = forward.__globals__.get(name)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # it is no function
            continue
        if [each.name for each in parameters if each.default is each.empty] != ["q", "k", "cos", "sin"]:
            continue

        shapes = ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 4))
        if _Trial().are_alike(partial(_rotated_by, function), partial(_rotated_by, rotated), *shapes):
            return name
    return None


def _rotated_by(rotate: Callable[..., Any], q: Tensor, k: Tensor, angles: Tensor) -> Tensor:
    halves = torch.cat((angles, angles), -1)
    return torch.cat(tuple(rotate(q, k, halves.cos(), halves.sin())), 1)


def angles_have_equal_halves(model: nn.Module) -> bool:
    """Return whether all modules of a model that compute cosines and sines of positions repeat them in both halves."""
    makers = [module for module in model.modules() if "inv_freq" in dict(module.named_buffers(recurse=False))]
    return bool(makers) and all(map(_have_equal_halves, makers))


def _have_equal_halves(module: nn.Module) -> bool:
    trial = _Trial()
    buffers = {name: trial.random(_shape(each), 1.0) for name, each in module.named_buffers(recurse=False)}
    try:
        with torch_internals.without_modes(), torch.no_grad():
            angles = _run(_like(module, _buffers=buffers), torch.zeros(1, 3, 8), torch.arange(3)[None])
            return all(torch.equal(*each.chunk(2, -1)) for each in angles) and len(angles) == 2
    except Exception:  # whatever a module trips over that is given what it does not expect
        return False


class _Projection(nn.Module):
    """A projection without bias."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.own = [weight]  # no parameter, as gradients are asked of the tensor itself

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.own[0])


class _Trial:
    """Random numbers of its own, so that no others are drawn differently."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(20)

    def random(self, shape: tuple[int, ...], scale: float) -> Tensor:
        """Return random numbers on the CPU."""
        return torch.randn(shape, generator=self._generator, device="cpu") * scale

    def are_alike(self, theirs: Callable[..., Any], ours: Callable[..., Tensor], *shapes: tuple[int, ...]) -> bool:
        """Return whether two functions of tensors of these shapes have the same results and gradients."""
        state = torch.default_generator.get_state()  # of which a dropout draws
        try:
            with torch_internals.without_modes(), torch.enable_grad():
                return all(self._are_alike(theirs, ours, scale, shapes) for scale in _SCALES)
        except Exception:  # whatever a module trips over that is given what it does not expect
            return False
        finally:
            torch.default_generator.set_state(state)

    def _are_alike(
        self, theirs: Callable[..., Any], ours: Callable[..., Tensor], scale: float, shapes: tuple[tuple[int, ...], ...]
    ) -> bool:
        first, *others = shapes
        inputs = [self.random(first, scale), *(self.random(shape, 0.5) for shape in others)]
        results = []
        for function in (ours, theirs):
            given = [nn.Parameter(each.clone()) for each in inputs]
            result = function(*given)
            if not isinstance(result, Tensor):
                return False
            weights = torch.arange(result.numel()).view(result.shape).cos()
            results.append((result, *torch.autograd.grad(result, given, weights)))
        return all(a.shape == b.shape and _is_close(a, b) for a, b in zip(*results, strict=True))


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= _TOLERANCE * ours.abs().max())


def _run(module: nn.Module, *inputs: Tensor) -> Any:
    """Run a module's own forward, without its hooks."""
    return type(module).forward(module, *inputs)


def _like(module: nn.Module, **replaced: dict[str, Any]) -> nn.Module:
    """Return a shallow copy of a module with others of its parts."""
    copied = copy.copy(module)
    vars(copied).update(replaced)
    return copied


def _is_special(module: nn.Module) -> bool:
    """Return whether something has replaced the forward of this one module."""
    return "forward" in vars(module)


def _has_hooks(module: nn.Module) -> bool:
    """Return whether somebody looks at what a module takes or returns; frugal's own hooks, as a dry run's, do not."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("frugal.") for hook in hooks)


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))  # of a parameter that ZeRO-3 has divided


def _sizes(module: nn.Module) -> tuple[int, ...]:
    """Return the elements of a projection's input and output; nothing: it is none."""
    sizes = tuple(getattr(module, name, None) for name in ("in_features", "out_features"))
    return tuple(size for size in sizes if isinstance(size, int))
