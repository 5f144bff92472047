"""What a model's gradient depends on besides its samples: a small one of its kind is run, no list of names consulted.

Three questions, each of one micro-batch cut or filled up in two ways, with every random draw replaced by its mean:

- Does it matter how a batch is split? With statistics over a micro-batch (BatchNorm) or experts of limited capacity it
  does: samples change each other's outputs.
- Does padding matter? Where no mask keeps it out, a sample's gradient depends on the longest one beside it.
- Do later tokens change what a model says of earlier ones? Then it cannot be trained to predict the next token.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from frugal.training.measure.memory_watch import tensors_in
from frugal.training.objectives import Batch, Objective, Sample

NUM_SAMPLES, FEW_SAMPLES = 8, 2
"""Samples of a batch that is run whole, and of the micro-batches it is cut into."""

MOST_TOKENS = 32
"""Of a sample. Together they are more than a small model's experts have room for."""

MOST_DIFFERENCE = 1e-3
"""Relative; what more is no rounding."""

MOST_LEAKAGE = 1e-4
"""What later tokens may change in what is said of earlier ones, as a part of what they change at all."""

MOST_FLOPS = 100e9
"""Of a trial: a few seconds on one core."""

Gradient = dict[str, Tensor]


class TooCostlyError(Exception):
    """A trial would take more than `MOST_FLOPS`."""


@dataclass(frozen=True)
class Dependence:
    """How far the gradients of the same samples are apart, relative to their norm, and the modules that cause it.

    `modules`: the qualified name and class of the first, and how many there are of this class; None where no module's
    output shows it.
    """

    difference: float
    modules: tuple[str, str, int] | None = None

    def __bool__(self) -> bool:
        return self.difference > MOST_DIFFERENCE


def on_split(model: nn.Module, objective: Objective, batch: Batch) -> Dependence:
    """How the gradient of `batch`, of `NUM_SAMPLES` samples, changes in micro-batches of `FEW_SAMPLES`."""
    parts = [_slice(batch, start, start + FEW_SAMPLES) for start in range(0, NUM_SAMPLES, FEW_SAMPLES)]
    _refuse_costly(model, objective, parts[0])
    apart = difference(gradient(model, objective, [batch]), gradient(model, objective, parts))
    if apart <= MOST_DIFFERENCE:
        return Dependence(apart)
    return Dependence(apart, _responsible(model, objective, batch, parts))


def on_padding(model: nn.Module, objective: Objective, samples: Sequence[Sample]) -> Dependence:
    """How the gradient of `samples`, of different lengths, changes where each is a micro-batch of its own."""
    alone = [objective.collate([sample]) for sample in samples]
    together = objective.collate(samples)
    return Dependence(difference(gradient(model, objective, [together]), gradient(model, objective, alone)))


def on_later_tokens(model: nn.Module, tokens: Tensor, vocab_size: int) -> float:
    """What other tokens in the second half of `tokens (samples, positions)` change in the logits of the first half.

    As a part of the largest change of any logit.
    """
    half = tokens.shape[1] // 2
    changed = tokens.clone()
    changed[:, half:] = (changed[:, half:] + 1 + torch.arange(tokens.shape[1] - half)) % vocab_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), without_randomness():
            before, after = (model(input_ids=each).logits.float() for each in (tokens, changed))
    finally:
        model.train(was_training)
    difference = (after - before).abs()
    whole = float(difference.max())
    return float(difference[:, :half].max()) / whole if whole else 0.0


def draws_masks(model: nn.Module, objective: Objective, batch: Batch) -> bool:
    """Whether dropout leaves anything out in training."""
    with torch.no_grad(), _Means() as means:
        objective.loss_sum(model, batch)
    return means.has_dropout


def example(objective: Objective, seq_len: int) -> Batch:
    """A batch of `NUM_SAMPLES` that differ in their numbers; whole numbers are those of the objective's example."""
    generator = torch.Generator().manual_seed(0)
    batch = objective.example(NUM_SAMPLES, seq_len)
    return {
        name: tensor + torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
        if tensor.is_floating_point() and tensor.ndim
        else tensor
        for name, tensor in batch.items()
    }


def _refuse_costly(model: nn.Module, objective: Objective, part: Batch) -> None:
    """Raises: TooCostlyError."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), without_randomness():
        objective.loss_sum(model, part)
    # every sample twice, forward and backward, which takes twice as long
    flops = counter.get_total_flops() * 3 * 2 * NUM_SAMPLES / FEW_SAMPLES
    if flops > MOST_FLOPS:
        raise TooCostlyError(f"that takes {flops / 1e9:.0f} GFLOP")


def _slice(batch: Batch, start: int, end: int) -> Batch:
    """Some samples of a batch; what is not one a sample stays."""
    return {
        name: tensor[start:end] if tensor.ndim and len(tensor) == NUM_SAMPLES else tensor
        for name, tensor in batch.items()
    }


def gradient(model: nn.Module, objective: Objective, batches: Sequence[Batch]) -> Gradient:
    """Of the loss summed over `batches`."""
    model.zero_grad(set_to_none=True)
    with without_randomness():
        for batch in batches:
            objective.loss_sum(model, batch).backward()
    gradient = {
        name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return gradient


def unused(model: nn.Module, objective: Objective, batch: Batch) -> tuple[str, ...]:
    """The trained parameters that get no gradient from `batch`."""
    used = gradient(model, objective, [batch])
    return tuple(name for name, each in model.named_parameters() if each.requires_grad and name not in used)


def difference(one: Gradient, other: Gradient) -> float:
    """The norm of the difference of two gradients, by that of the larger."""
    zero = torch.zeros(())
    names = one.keys() | other.keys()
    apart = sum(float((one.get(name, zero) - other.get(name, zero)).square().sum()) for name in names)
    largest = max(sum(float(tensor.square().sum()) for tensor in gradient.values()) for gradient in (one, other))
    return (apart / largest) ** 0.5 if largest else 0.0


def _responsible(
    model: nn.Module, objective: Objective, batch: Batch, parts: Sequence[Batch]
) -> tuple[str, str, int] | None:
    """The first module that ends with other outputs for a whole batch than for its parts."""
    whole = _outputs(model, objective, batch)
    in_parts = [_outputs(model, objective, part) for part in parts]
    modules = dict(model.named_modules())
    for call, outputs in whole.items():
        for index, output in enumerate(outputs):
            pieces = [part[call][index] for part in in_parts if index < len(part.get(call, ()))]
            if len(pieces) < len(parts) or any(piece.ndim == 0 for piece in pieces):
                continue
            if any(piece.shape[1:] != output.shape[1:] for piece in pieces):
                continue
            joined = torch.cat(pieces)
            if joined.shape != output.shape or not output.numel():
                continue
            if float((joined - output).abs().max()) > MOST_DIFFERENCE * float(output.abs().max()):
                kind = type(modules[call[0]])
                return call[0], kind.__name__, sum(type(module) is kind for module in modules.values())
    return None


def _outputs(model: nn.Module, objective: Objective, batch: Batch) -> dict[tuple[str, int], list[Tensor]]:
    """The tensors that every call of every module returns, by its name and number, in the order in which they end."""
    outputs: dict[tuple[str, int], list[Tensor]] = {}
    calls: dict[str, int] = {}

    def keep(name: str, returned: Any) -> None:
        number = calls[name] = calls.get(name, -1) + 1
        values = list(returned.values()) if isinstance(returned, dict) else returned  # an output of transformers
        outputs[name, number] = [tensor.detach().double().clone() for tensor in tensors_in(values)]

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, returned, name=name: keep(name, returned))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad(), without_randomness():
            objective.loss_sum(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


class _Means(TorchFunctionMode):
    """Every random draw gives its mean, and dropout its input; `has_dropout`: whether that would have been another."""

    has_dropout = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self.has_dropout |= bool(_argument(args, kwargs, 4, 0.0, "dropout_p"))
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            return func(*args, **(kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})))
        if "dropout" in name:
            is_training = _argument(args, kwargs, 2, True, "training", "train")
            self.has_dropout |= bool(is_training and _argument(args, kwargs, 1, 0.5, "p"))
            return args[0] if args else kwargs["input"]
        if name == "bernoulli":
            return (args[0] if args else kwargs["input"]).round()
        result = func(*args, **kwargs)
        if name in _MEANS:
            result.fill_(_MEANS[name](*args[1:], **kwargs))
        return result


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, default: Any, *names: str) -> Any:
    """What a function of torch was given for a parameter, which it may spell in one of several ways."""
    return args[index] if index < len(args) else next((kwargs[name] for name in names if name in kwargs), default)


_MEANS: dict[str, Callable[..., float]] = {
    "rand": lambda *_, **__: 0.5,
    "rand_like": lambda *_, **__: 0.5,
    "randn": lambda *_, **__: 0.0,
    "randn_like": lambda *_, **__: 0.0,
    "uniform_": lambda low=0.0, high=1.0, **named: (named.get("from", low) + named.get("to", high)) / 2,
    "normal_": lambda mean=0.0, std=1.0, **_: mean,
    "exponential_": lambda lambd=1.0, **_: 1 / lambd,
}
"""What is drawn, and its mean by the arguments after the first."""


def without_randomness() -> AbstractContextManager[Any]:
    """Inside, no random numbers make a forward differ from another: samples alone make its outputs."""
    return _Means()
