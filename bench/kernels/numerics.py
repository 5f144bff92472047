"""`python -m bench.kernels.numerics`: how far fused kernels in bf16 are from fp64, beside torch's own operators.

On a machine with a GPU the kernels run there; elsewhere by Triton's interpreter on the CPU, which rounds after each
operation (`bench.kernels.interpreter`): a GPU may round less often, as where it takes a product and a sum in one.
torch runs what transformers' models do. Shapes, scales and numbers are drawn from seeds. Errors are relative to fp64,
by norms, of the output and of all gradients. Needs liger-kernel and triton; kept in `bench/results/numerics.json`,
those of a GPU in `numerics-gpu.json`.
"""

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from bench.environment import environment
from frugal.models.fused import liger_internals, replacement
from frugal.models.losses import cross_entropy
from frugal.units import IGNORED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    from bench.kernels import interpreter  # noqa: F401 - before Triton's kernels are imported

RESULTS = Path(__file__).parents[1] / "results" / ("numerics.json" if DEVICE == "cpu" else "numerics-gpu.json")
SEEDS = 50

Function = Callable[..., Tensor]
Case = tuple[Function, Function, tuple[Tensor, ...]]
"""What torch computes, what a kernel computes of the same, and of which tensors, fp32."""


def norm(kind: type[nn.Module], draw: torch.Generator) -> Case:
    """An RMSNorm of `(rows, width)`."""
    rows, width = number(draw, 3, 24), number(draw, 8, 300)
    module = kind(width, eps=1e-6)
    found = replacement.rms_norm(module)
    assert found is not None
    weight = 0.3 * torch.randn(width, generator=draw) + 1 - found.offset

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(module, {"weight": weight}, x)
        return result

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        how = found.epsilon, found.offset, found.casting, False
        result: Tensor = liger_internals.library().rms_norm(x, weight, *how)
        return result

    return theirs, ours, (scaled(draw, rows, width), weight)


def product(activation: replacement.Activation, draw: torch.Generator) -> Case:
    """A gated product of `(rows, width)`."""
    shape = number(draw, 3, 24), number(draw, 8, 300)

    def theirs(gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def ours(gate: Tensor, up: Tensor) -> Tensor:
        result: Tensor = getattr(liger_internals.library(), activation)(gate.clone(), up.clone())  # it writes to them
        return result

    return theirs, ours, (scaled(draw, *shape), scaled(draw, *shape))


def rotation(draw: torch.Generator) -> Case:
    """A rotation of queries and keys, as one tensor; angles are not differentiated."""
    samples, length, size = number(draw, 1, 3), number(draw, 2, 12), 2 * number(draw, 4, 32)
    key_heads = number(draw, 1, 3)
    heads = key_heads * number(draw, 1, 3)
    angles = torch.outer(torch.arange(length).float(), 10_000.0 ** -(torch.arange(0, size, 2) / size))
    angles = torch.cat((angles, angles), -1)[None]

    def run(rotate: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor) -> Tensor:
        cos, sin = (each.to(torch.bfloat16).to(q.dtype) for each in (angles.cos(), angles.sin()))
        return torch.cat(rotate(q, k, cos, sin), 1)

    tensors = scaled(draw, samples, heads, length, size), scaled(draw, samples, key_heads, length, size)
    return partial(run, apply_rotary_pos_emb), partial(run, replacement._Rotation.apply), tensors


class _OwnLoss(torch.autograd.Function):
    """The loss of the kernel, whose gradient stands in place of the logits."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits: Tensor, labels: Tensor) -> Tensor:
        gradient = logits.clone()
        losses = cross_entropy.losses(gradient, labels, rows_at_once=4, with_gradient=True, kernels="liger")
        ctx.save_for_backward(gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]  # torch has it untyped
        return gradient * grads[0].to(gradient.dtype), None


def loss(draw: torch.Generator) -> Case:
    """The summed cross entropy of `(rows, classes)`, some of whose labels are left out."""
    rows, classes = number(draw, 3, 24), number(draw, 8, 700)
    labels = torch.randint(classes, (rows,), generator=draw)
    labels[torch.rand(rows, generator=draw) < 0.2] = IGNORED
    labels[0] = 0

    def theirs(logits: Tensor) -> Tensor:
        in_fp32 = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(in_fp32, labels, ignore_index=IGNORED, reduction="sum")

    return theirs, lambda logits: _OwnLoss.apply(logits, labels), (scaled(draw, rows, classes),)


CASES: dict[str, Callable[[torch.Generator], Case]] = {
    "RMSNorm (Llama)": partial(norm, LlamaRMSNorm),
    "RMSNorm (Gemma)": partial(norm, GemmaRMSNorm),
    "SwiGLU": partial(product, "silu"),
    "GeGLU": partial(product, "gelu"),
    "RoPE": rotation,
    "cross entropy": loss,
}


def number(draw: torch.Generator, least: int, most: int) -> int:
    """A whole number."""
    return int(torch.randint(least, most + 1, (), generator=draw))


def scaled(draw: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers of a scale between a tenth and ten, each one of bf16."""
    scale = 10 ** (2 * torch.rand((), generator=draw) - 1)
    return (torch.randn(shape, generator=draw) * scale).to(torch.bfloat16).float()


def errors(name: str, seed: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return, of output and of gradients, the error of torch's operators in bf16, and that of the kernel."""
    draw = torch.Generator(DEVICE).manual_seed(seed)
    theirs, ours, tensors = CASES[name](draw)
    tensors = tuple(each.to(torch.bfloat16).float() for each in tensors)
    shape = theirs(*tensors).shape
    grad = torch.randn(shape, generator=draw).to(torch.bfloat16).double() if shape else torch.ones(()).double()
    exact, by_torch, by_kernel = (
        _result(function, tensors, grad, dtype)
        for function, dtype in ((theirs, torch.float64), (theirs, torch.bfloat16), (ours, torch.bfloat16))
    )
    of_output, of_gradients = (
        (_distance(by_torch[part], exact[part]), _distance(by_kernel[part], exact[part])) for part in (0, 1)
    )
    return of_output, of_gradients


def _result(function: Function, tensors: tuple[Tensor, ...], grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The output, and the gradients of all tensors as one, fp64."""
    inputs = [each.to(dtype).requires_grad_() for each in tensors]
    output = function(*inputs)
    gradients = torch.autograd.grad(output, inputs, grad.to(output.dtype))
    parts = output.reshape(-1), torch.cat([each.reshape(-1) for each in gradients])
    return [part.detach().double() for part in parts]


def _distance(result: Tensor, exact: Tensor) -> float:
    return ((result - exact).norm() / exact.norm()).item()


def table(kept: dict[str, list[list[list[float]]]]) -> str:
    """Medians of the errors, torch's and the kernel's."""
    lines = ["| kernel | output: torch | kernel | gradients: torch | kernel |", "| --- | --- | --- | --- | --- |"]
    for name, of_seeds in kept.items():
        columns = [statistics.median(seed[part][who] for seed in of_seeds) for part in (0, 1) for who in (0, 1)]
        lines.append(f"| {name} | {' | '.join(f'{each:.2g}' for each in columns)} |")
    return "\n".join(lines)


def main() -> int:
    """Draw, compute, keep, and print the table."""
    torch.set_default_device(DEVICE)
    kept = {name: [errors(name, seed) for seed in range(SEEDS)] for name in CASES}
    result = environment("python -m bench.kernels.numerics") | {"errors": kept}
    if DEVICE == "cuda":
        result["device"] = torch.cuda.get_device_properties(0).name
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(table(json.loads(RESULTS.read_text())["errors"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
