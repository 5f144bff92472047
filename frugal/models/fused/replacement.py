"""Modules run Liger's kernels in the place of their own forward, where they compute the same.

A replacement keeps the module: its parameters, names and hooks are as before, so that checkpoints, adapters, packed
weights and ZeRO-3 see no difference. Projections of an MLP still run as modules; only what is between them is fused.

A kernel overwrites only what nobody else has: the gate and the product's other factor, which are results of projections
that their MLP alone sees. Gradients that come from outside are copied, and so are queries and keys, whose projections
selective activation checkpointing may keep.

At each call: where a kernel cannot take the tensors (another device, weights in another type than activations, as norms
in fp32 inside a model in bf16), the module's own forward runs.

Names of classes say nothing: a user's own norm is recognised, and one that is called like Llama's and computes
something else is not. A norm is tried with a random weight of its width, an MLP with small projections in the place of
its own, an activation as it is, a rotation as the function that it is; all on the CPU, forward and gradients, in
training and evaluation, with inputs from small to large, so that dropout, a clamp or another epsilon shows. The
formulas are those of Liger's kernels, which tests hold to them, and of torch's one kernel for GELU with tanh.

Not recognised, and left as they are: `LayerNorm` and torch's own `RMSNorm`, which are one kernel in torch already;
modules with hooks on their parts, which would see what a kernel overwrites; GELU that is not approximated by tanh.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal import torch_internals
from frugal.models.fused import liger_internals

Casting = Literal["llama", "gemma"]
"""Where a norm in half precision rounds: before the product with its weight, or after it."""

Activation = Literal["silu", "gelu"]

MOST_COLUMNS = 65536
"""The widest row that Liger's kernels take."""

_TOLERANCE = 1e-5
_SCALES = (1e-3, 1.0, 30.0, 1e4)


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


TANH_GELU = partial(F.gelu, approximate="tanh")
"""The activation `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`, torch's one kernel for it."""

Fused = RMSNorm | GatedMLP | partial[Tensor] | str
"""A norm, a gated MLP, an activation, or the name of the function by which a forward rotates."""


def apply(model: nn.Module) -> None:
    """Have the modules of `model` that compute what Liger's kernels do run these.

    Raises:
        RequestError: Liger is not installed, or lacks what is used of it.
    """
    liger_internals.library()
    runs: dict[type, Callable[..., Any]] = {
        RMSNorm: _norm, GatedMLP: _gated, str: _rotating, partial: lambda _own, _module, gelu, x: gelu(x),
    }  # fmt: skip
    for module, fused in _recognised(model):
        module.forward = partial(runs[type(fused)], module.forward, module, fused)


def names(model: nn.Module) -> tuple[str, ...]:
    """Return what `apply` would replace, in words: `33 RMSNorm`, `16 SwiGLU`, `16 RoPE`."""
    known = {RMSNorm: "RMSNorm", partial: "GELU", str: "RoPE", "silu": "SwiGLU", "gelu": "GeGLU"}
    counted = Counter(known[getattr(fused, "activation", type(fused))] for _, fused in _recognised(model))
    return tuple(f"{number} {name}" for name, number in counted.items())


def _recognised(model: nn.Module) -> Iterator[tuple[nn.Module, Fused]]:
    """Yield the modules to replace. Those that are alike are tried once."""
    known: dict[Any, Fused | None] = {}
    can_rotate = angles_have_equal_halves(model)
    for module in model.modules():
        key = kind(module)
        if key not in known:
            known[key] = (
                rms_norm(module) or gated_mlp(module) or tanh_gelu(module) or (rotation(module) if can_rotate else None)
            )
        if (recognised := known[key]) is not None:
            yield module, recognised


def _norm(own: Callable[..., Tensor], module: nn.Module, norm: RMSNorm, *given: Any, **named: Any) -> Any:
    x, *others = (*given, *named.values())
    (weight,) = module.parameters(recurse=False)
    fits = weight.dtype == x.dtype and x.shape[-1:] == weight.shape  # not heads that the module divides itself
    if others or not fits or not liger_internals.can_launch(x):
        return own(*given, **named)
    # not in place: the gradient may be another module's, too, as where a residual is added
    return liger_internals.library().rms_norm(x, weight, norm.epsilon, norm.offset, norm.casting, False)


def _gated(own: Callable[..., Tensor], module: nn.Module, mlp: GatedMLP, *given: Any, **named: Any) -> Any:
    x, *others = (*given, *named.values())
    if others or not liger_internals.can_launch(x):
        return own(*given, **named)
    gate, up = (module.get_submodule(name)(x) for name in (mlp.gate, mlp.up))
    fused = getattr(liger_internals.library(), mlp.activation)
    product = fused(gate, up) if gate.dtype == up.dtype else activated(mlp.activation, gate) * up
    del gate, up
    return module.get_submodule(mlp.down)(product)


def _rotating(own: Callable[..., Any], module: nn.Module, name: str, *inputs: Any, **options: Any) -> Any:
    """Run a module's own forward, in which the function `name` of its file is Liger's meanwhile."""
    scope: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    theirs = scope[name]
    scope[name] = partial(_rotated, theirs)
    try:
        return own(*inputs, **options)
    finally:
        scope[name] = theirs


def _rotated(theirs: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *options: Any) -> Any:
    """Rotate queries and keys `(samples, heads, positions, size)`."""
    is_usual = not options and q.dim() == 4 and cos.dim() == 3 and q.shape[-1] == k.shape[-1] == cos.shape[-1]
    fits = is_usual and q.dtype == k.dtype == cos.dtype and q.shape[2] == cos.shape[1] and liger_internals.can_launch(q)
    return _Rotation.apply(q, k, cos, sin) if fits else theirs(q, k, cos, sin, *options)


class _Rotation(torch.autograd.Function):
    """Liger's rotation, which writes to its inputs, on copies of them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = liger_internals.library().rotate(_copied(q), _copied(k), cos, sin)
        ctx.save_for_backward(cos, sin)
        return q, k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_q, grad_k = map(_copied, grads)
        grad_q, grad_k = liger_internals.library().rotate_back(grad_q, grad_k, *ctx.saved_tensors)
        return grad_q, grad_k, None, None


def _copied(tensor: Tensor) -> Tensor:
    """Return a tensor that the kernel may write to; it copies itself what does not lie as it needs it."""
    lying = tensor.transpose(1, 2)
    return lying.clone().transpose(1, 2) if lying.is_contiguous() else tensor


# How modules are recognised


def activated(activation: Activation, gate: Tensor) -> Tensor:
    """Return the activation of a gate."""
    return F.silu(gate) if activation == "silu" else TANH_GELU(gate)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(samples, heads, positions, size)` rotated by angles `(samples or 1, positions, size)`, whose halves are
    the same: the first half of each head with the second."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    (q, q_1, q_2), (k, k_1, k_2) = ((x, *x.chunk(2, -1)) for x in (q, k))
    return q * cos + torch.cat((-q_2, q_1), -1) * sin, k * cos + torch.cat((-k_2, k_1), -1) * sin


_OF_EVERY_MODULE = vars(nn.Module())


def kind(module: nn.Module) -> tuple[Any, ...]:
    """Return a value that is equal for modules of the same classes, sizes, settings and hooks.

    Settings that are no numbers or words, such as an activation, are the same if they are the same object.
    """
    return tuple(
        (
            name,
            type(each),
            tuple((key, _shape(p), p.dtype) for key, p in each.named_parameters(recurse=False)),
            tuple(
                (key, value if isinstance(value, int | float | str) else id(value))
                for key, value in vars(each).items()
                if key not in _OF_EVERY_MODULE
            ),
            "forward" in vars(each),
            _has_hooks(each),
        )
        for name, each in module.named_modules()
    )


def rms_norm(module: nn.Module) -> RMSNorm | None:
    """Return the norm that a module is; None: none of those that Liger has."""
    own = dict(module.named_parameters())
    if (
        len(own) != 1
        or isinstance(module, nn.RMSNorm)
        or "forward" in vars(module)
        or any(True for _ in module.buffers())
    ):
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
    # a module may trip over half precision
    with suppress(Exception), torch_internals.without_modes(), torch.device("cpu"), torch.no_grad():
        x, weight = (trial.random(shape, 1.0).to(dtype) for shape in ((8, width), (width,)))
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
    others = {name: child for name, child in children.items() if name not in sizes}
    alone = _like(module, _modules=others)
    if (
        len(sizes) != 3
        or [*alone.parameters(), *alone.buffers()]
        or "forward" in vars(module)
        or any(_has_hooks(each) for each in module.modules() if each is not module)
    ):
        return None
    widths = sorted({size for pair in sizes.values() for size in pair})
    shapes = {name: tuple(8 + 4 * widths.index(size) for size in pair[::-1]) for name, pair in sizes.items()}
    trial = _Trial()

    def theirs(x: Tensor, *weights: Tensor) -> Any:
        projections = {name: _projection(weight) for name, weight in zip(sizes, weights, strict=True)}
        return _run(_like(module, _modules=copy.deepcopy(others) | projections), x)

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


def tanh_gelu(module: nn.Module) -> partial[Tensor] | None:
    """Return the activation that a module is in many operators; None: another one, or one kernel already."""

    def theirs(x: Tensor) -> Any:
        result = _run(_like(module), x)
        return None if type(result.grad_fn).__name__ == "GeluBackward0" else result

    is_bare = not [*module.parameters(), *module.buffers(), *module.children()] and "forward" not in vars(module)
    return TANH_GELU if is_bare and _Trial().are_alike(theirs, TANH_GELU, (4, 32)) else None


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
        both = partial(_rotated_by, function), partial(_rotated_by, rotated)
        if _Trial().are_alike(*both, (2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 4)):
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
    # a module may trip over what it does not expect
    with suppress(Exception), torch_internals.without_modes(), torch.no_grad():
        angles = _run(_like(module, _buffers=buffers), torch.zeros(1, 3, 8), torch.arange(3)[None])
        return all(torch.equal(*each.chunk(2, -1)) for each in angles) and len(angles) == 2
    return False


def _projection(weight: Tensor) -> nn.Module:
    """Return a projection without bias; its weight is no parameter, as gradients are asked of the tensor itself."""
    projection = nn.Module()
    projection.forward = partial(F.linear, weight=weight)
    return projection


class _Trial:
    """Random numbers of its own, so that no others are drawn differently."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(20)

    def random(self, shape: tuple[int, ...], scale: float) -> Tensor:
        """Return random numbers on the CPU."""
        return torch.randn(shape, generator=self._generator, device="cpu") * scale

    def are_alike(self, theirs: Callable[..., Any], ours: Callable[..., Tensor], *shapes: tuple[int, ...]) -> bool:
        """Return whether two functions of tensors of these shapes have the same results and gradients."""
        state, alike = torch.default_generator.get_state(), False  # of which a dropout draws
        # a module may trip over what it does not expect
        with suppress(Exception), torch_internals.without_modes(), torch.device("cpu"), torch.enable_grad():
            alike = all(self._are_alike(theirs, ours, scale, shapes) for scale in _SCALES)
        torch.default_generator.set_state(state)
        return alike

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
        return all(
            a.shape == b.shape and bool((a - b).abs().max() <= _TOLERANCE * a.abs().max())
            for a, b in zip(*results, strict=True)
        )


def _run(module: nn.Module, *inputs: Tensor) -> Any:
    """Run a module's own forward, without its hooks; None if training and evaluation differ, as with dropout."""
    results = [type(module).forward(module.train(is_training), *inputs) for is_training in (True, False)]
    return results[0] if isinstance(results[0], tuple) or torch.equal(*results) else None


def _like(module: nn.Module, **replaced: dict[str, Any]) -> nn.Module:
    """Return a shallow copy of a module with others of its parts, and copies of its children unless they are given."""
    copied = copy.copy(module)
    vars(copied).update(replaced if "_modules" in replaced else {"_modules": copy.deepcopy(module._modules)} | replaced)
    return copied


def _has_hooks(module: nn.Module) -> bool:
    """Return whether somebody looks at what a module takes or returns; frugal's own hooks, as a dry run's, do not."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("frugal.") for hook in hooks)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))  # of a parameter that ZeRO-3 has divided


def _sizes(module: nn.Module) -> tuple[int, ...]:
    """Return the elements of a projection's input and output; nothing: it is none."""
    sizes = tuple(getattr(module, name, None) for name in ("in_features", "out_features"))
    return tuple(size for size in sizes if isinstance(size, int))
