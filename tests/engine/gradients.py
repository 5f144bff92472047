"""The gradient that DeepSpeed applied, read off one step of SGD, how far it is from another, and how far it may be.

A bound of rounding is measured where the test runs: kernels sum in another order on another processor.
"""

import copy
import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from bench.runs import TINY
from frugal.config.learning_rate import Curve
from frugal.config.optimizers import Optimizer
from frugal.engine.engine import Engine
from frugal.models.objectives import CausalLM, Objective

LEARNING_RATE = 1024.0  # so large that the rounding of weights hides nothing of the gradient
SGD = {
    "optimizer": Optimizer(name="sgd"), "learning_rate": LEARNING_RATE, "weight_decay": 0.0, "gradient_clipping": 0.0,
}  # fmt: skip
"""What a request needs so that a step takes off the gradient alone."""

Gradient = dict[str, torch.Tensor]
Of = TypeVar("Of")

ROUNDINGS = 4.0
"""How many times as far off as plain fp32 a right answer may be: its sums have another order and other kernels."""

ULP = torch.finfo(torch.float32).eps
"""The least that plain fp32 is said to be off: one number may be right by chance."""


def weights(model: nn.Module) -> Gradient:
    """A copy of what the model starts with, fp64."""
    return {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}


def whole(engine: Engine) -> Gradient:
    """Return a copy of all parameters in fp64, whole; of what is trained in bf16 the fp32 weights. Runs on ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in engine.module.named_parameters():
        held = safe_get_full_fp32_param(parameter)
        if held is None:
            with engine.zero.gathered(parameter):
                held = parameter.detach().clone()
        found[name] = held.double().view(engine.zero.shape(parameter)).clone()
    return found


def applied(engine: Engine, before: Gradient) -> Gradient:
    """(before - after) / learning rate, each parameter whole. Runs on ranks."""
    return {name: (before[name] - after) / LEARNING_RATE for name, after in whole(engine).items()}


def relative_error(gradient: Gradient, reference: Gradient) -> float:
    """The norm of the difference, by that of the reference."""
    difference = sum(float(((gradient[n] - reference[n]) ** 2).sum()) for n in reference)
    return float((difference / sum(float((g**2).sum()) for g in reference.values())) ** 0.5)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model of transformers in another dtype; kernels of experts in groups know no fp64."""
    copied: Any = copy.deepcopy(model).to(dtype)
    if dtype == torch.float64:
        copied.set_experts_implementation("eager")
    return copied


def plain_gradient(model: nn.Module, samples: Sequence[Any], micro_batch: int = 1) -> Gradient:
    """Return the gradient of the mean loss of a language model by PyTorch alone, in one process, sample by sample."""
    objective = CausalLM()
    batches = [objective.collate(samples[at : at + micro_batch]) for at in range(0, len(samples), micro_batch)]
    targets = sum(map(objective.count, batches))
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        (torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def plain_loss(model: nn.Module, samples: Sequence[Any]) -> tuple[float, int]:
    """Return the mean loss of a language model by PyTorch alone, sample by sample, and the number of its targets."""
    loss, targets = 0.0, 0
    for sample in samples:
        labels = torch.tensor(sample["labels"])[1:]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sample["input_ids"]])).logits[0, :-1]
        loss += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        targets += int((labels != -100).sum())
    return loss / targets, targets


def bound_by(short: Any, exact: Any) -> float:
    """Return how far a right answer in fp32 may be from `exact`, relative, by how far plain PyTorch's `short` is."""
    return ROUNDINGS * max(_difference(short, exact), ULP)


def _difference(short: Any, exact: Any) -> float:
    """Return the largest relative difference of gradients, losses, or tuples and lists of both."""
    if isinstance(exact, dict):
        return relative_error({name: part.double() for name, part in short.items()}, exact)
    if isinstance(exact, (list, tuple)):
        return max(_difference(*pair) for pair in zip(short, exact, strict=True))
    return abs(short - exact) / abs(exact)


def with_bound(plain: Callable[..., Of], *args: Any) -> tuple[Of, float]:
    """Return what `plain(*args, dtype=)` of PyTorch alone gets in fp64, and how far a right answer in fp32 may be."""
    exact, short = (plain(*args, dtype=dtype) for dtype in (torch.float64, torch.float32))
    return exact, bound_by(short, exact)


def bound_of_losses(
    model: Callable[[], nn.Module],
    batches: Iterable[Sequence[Any]],
    objective: Objective | None = None,
    *,
    learning_rate: float,
) -> float:
    """Return how far any loss of two right runs with AdamW in fp32 may be apart on this machine, relative."""
    return bounds_of_run(model, batches, objective, learning_rate=learning_rate)[0]


def bounds_of_run(
    model: Callable[[], nn.Module],
    batches: Iterable[Sequence[Any]],
    objective: Objective | None = None,
    *,
    learning_rate: float,
    schedule: Callable[[int], float] = lambda step: 1.0,
) -> tuple[float, float, float]:
    """Return how far losses, norms of gradients and last weights of two right runs with AdamW in fp32 may be apart.

    All are relative. Each may be as far as `bound_by` says from the run in fp64, by PyTorch in two orders of sums.
    """
    global_batches, goal = list(batches), objective or CausalLM()

    def trained(dtype: torch.dtype, micro_batch: int) -> tuple[list[float], list[float], Gradient]:
        trainee, losses, norms = model().to(dtype), [], []
        parameters = [parameter for parameter in trainee.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        for step, samples in enumerate(global_batches):
            optimizer.param_groups[0]["lr"] = learning_rate * schedule(step)
            cut = [goal.collate(samples[at : at + micro_batch]) for at in range(0, len(samples), micro_batch)]
            parts = [goal.loss_sum(trainee, each) / sum(map(goal.count, cut)) for each in cut]
            torch.stack(parts).sum().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(part.item() for part in parts))
        return losses, norms, weights(trainee)

    exact = trained(torch.float64, 1)
    runs = [trained(torch.float32, size) for size in (1, max(map(len, global_batches)))]
    of_losses, of_norms, of_weights = (2 * max(bound_by(run[part], exact[part]) for run in runs) for part in range(3))
    return of_losses, of_norms, of_weights


@functools.cache
def bound_of_command(num_steps: int, learning_rate: float, global_batch: int = 8) -> float:
    """Return `bound_of_losses` under a cosine for the model of `bench.runs` without dropout, on text as there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def model() -> nn.Module:
        torch.manual_seed(0)
        return GPT2LMHeadModel(
            GPT2Config(**{name: value for name, value in TINY.items() if name != "model_type"})
        ).eval()

    texts = [f"line {i}: " + "to be or not to be, " * (i % 7) for i in range(num_steps * global_batch)]
    random.Random(0).shuffle(texts)
    samples = [{"input_ids": list(text.encode())[:64]} for text in texts]
    batches = [samples[at : at + global_batch] for at in range(0, len(samples), global_batch)]
    cosine = Curve(peak=learning_rate, schedule="cosine", warmup_steps=0, total_steps=num_steps).factor
    return bounds_of_run(model, batches, learning_rate=learning_rate, schedule=cosine)[0]
