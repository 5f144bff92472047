"""Probes of what a model's gradient depends on besides its samples, by running a small one of its kind.

Five questions, each of one micro-batch cut or filled up in two ways, with every random draw replaced by its mean:

- Does it matter how a batch is split? With statistics over a micro-batch (BatchNorm), experts of limited capacity or a
  loss that compares samples it does: samples change each other's outputs.
- Does it matter how many forwards there are? With power iterations (spectral norm), queues and moving averages that a
  forward changes it does.
- Do random draws decide which parameters are used? With LayerDrop they do, and ranks then use other ones.
- Does padding matter? Where no mask keeps it out, a sample's gradient depends on the longest one beside it.
- Do later tokens change what a model says of earlier ones? Then it cannot be trained to predict the next token.
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from frugal.models.objectives import TARGETS, Batch, Objective, Sample, SummedLoss
from frugal.torch_internals import tensors_in
from frugal.units import IGNORED

NUM_SAMPLES, FEW_SAMPLES = 8, 2
"""Samples of a whole batch, and of the micro-batches it is cut into."""

MOST_TOKENS = 32
"""The most tokens of a sample. All samples' are more than a small model's experts have room for."""

MOST_DIFFERENCE = 1e-3
"""The largest relative difference that rounding explains."""

MOST_CARRIED = 1e-5
"""The same for gradients of one micro-batch before and after others, which are computed alike, bit for bit."""

MOVED = 0.1
"""The part of their size by which weights are moved before forwards are counted: a power iteration has converged for
weights that have not moved."""

MOST_LEAKAGE = 1e-4
"""The most that later tokens may change the output for earlier ones, as a part of their largest effect."""

MOST_FLOPS = 100e9
"""The most FLOP of a trial: a few seconds on one core."""

Gradient = dict[str, Tensor]


@dataclass(frozen=True)
class Dependence:
    """A difference between gradients of the same samples, relative to their norm, and the modules that cause it.

    `modules`: the qualified name and class of the first, and how many there are of this class; None where no module's
    output shows it.
    """

    difference: float
    modules: tuple[str, str, int] | None = None

    def __bool__(self) -> bool:
        return self.difference > MOST_DIFFERENCE


# Draws are held still, and what modules keep from one forward to the next


Kept = list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]


def kept_by(module: nn.Module) -> Kept:
    """Return what a module keeps between forwards: each place, its values, and copies of those that can change."""
    return [
        (
            place,
            dict(place),
            {
                name: value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
                for name, value in place.items()
                if not (place is vars(module) and name.startswith("_"))
                and isinstance(value, Tensor | bool | int | float | list | deque)
            },
        )
        for place in (module._parameters, module._buffers, vars(module))
    ]


def kept(model: nn.Module) -> dict[str, Kept]:
    """Return what each module keeps, by its name."""
    return {name: kept_by(module) for name, module in model.named_modules()}


def put(module: nn.Module, kept: Kept) -> None:
    """Have a module keep what it kept."""
    with torch.no_grad():
        for place, values, copies in kept:
            place.clear()
            place.update(values)
            for name, was in copies.items():
                if isinstance(was, Tensor) and place[name].shape == was.shape:
                    place[name].data.copy_(was)
                elif isinstance(was, Tensor):
                    place[name].data = was.clone()
                elif isinstance(was, list | deque):
                    place[name] = copy.copy(was)


def differs(before: Kept, after: Kept) -> bool:
    """Tell whether a module keeps other values; a parameter that an optimizer moves is not among them."""
    return any(
        one.keys() != other.keys() or any(not _is_same(value, other[name]) for name, value in one.items())
        for (_, _, one), (_, _, other) in zip(before, after, strict=True)
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | deque) and isinstance(other, list | deque):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and (one is other or (isinstance(one, bool | int | float) and one == other))


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Leave behind the parameters, buffers and other values of `model` that were there."""
    values, modules = kept(model), dict(model.named_modules())
    try:
        yield
    finally:
        for name, each in values.items():
            put(modules[name], each)


class FixedDraws(TorchFunctionMode):
    """Every random draw gives the number below which `share` of all draws are, dropout its input.

    `has_dropout`: whether that would have been another. `has_draws`: whether more than one number was drawn at once.
    `left_out`: what cross entropies took for no target.
    """

    has_dropout = has_draws = False

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.left_out: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self.has_dropout |= bool(_argument(args, kwargs, 4, 0.0, "dropout_p"))
            by_name = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            return func(**by_name | kwargs | {"dropout_p": 0.0})
        if "dropout" in name:
            is_training = _argument(args, kwargs, 2, True, "training", "train")
            self.has_dropout |= bool(is_training and _argument(args, kwargs, 1, 0.5, "p"))
            return args[0] if args else kwargs["input"]
        if name in ("cross_entropy", "nll_loss"):
            self.left_out.add(_argument(args, kwargs, 4, IGNORED, "ignore_index"))
        if name == "ctc_loss" and not 0 <= args[1].min() <= args[1].max() < args[0].shape[-1]:
            raise IndexError("a target is none of the classes")  # torch writes beyond its memory instead
        if name == "multinomial":
            return _argument(args, kwargs, 0, None, "input").topk(_argument(args, kwargs, 1, 1, "num_samples")).indices
        result = func(*args, **kwargs)
        if name in _DRAWS:
            self.has_draws |= result.numel() > 1
            result.copy_(_DRAWS[name](self.share, result, *args, **kwargs))
        return result


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, default: Any, *names: str) -> Any:
    """Return the argument of a torch function for a parameter that is spelt in one of several ways."""
    return args[index] if index < len(args) else next((kwargs[name] for name in names if name in kwargs), default)


def _normal(share: float, mean: Any = 0.0, std: Any = 1.0) -> Any:
    """Return nearly the number below which `share` of a normal distribution is."""
    return torch.as_tensor(mean) + 3 * (2 * share - 1) * torch.as_tensor(std)


def _whole(share: float, *bounds: Any, **named: Any) -> Tensor:
    """Return what `torch.randint` gives, of its arguments."""
    low, high = (0, *(each for each in bounds if isinstance(each, int)))[-2:]
    low, high = named.get("low", low), named.get("high", high)
    return torch.tensor(low + int(share * (high - low)))


_DRAWS: dict[str, Callable[..., Tensor]] = {
    "rand": lambda share, *_, **__: torch.tensor(share),
    "rand_like": lambda share, *_, **__: torch.tensor(share),
    "randn": lambda share, *_, **__: _normal(share),
    "randn_like": lambda share, *_, **__: _normal(share),
    "uniform_": lambda share, _, __, low=0.0, high=1.0, **named: torch.tensor(
        named.get("from", low) + share * (named.get("to", high) - named.get("from", low))
    ),
    "normal_": lambda share, _, __, mean=0.0, std=1.0, **___: _normal(share, mean, std),
    "normal": lambda share, _, mean, std=1.0, *__, **___: _normal(share, mean, std),
    "exponential_": lambda share, _, __, lambd=1.0, **___: torch.tensor(2 * share / lambd),
    "bernoulli": lambda share, _, p, *__, **___: p > share,
    "bernoulli_": lambda share, _, __, p=0.5, **___: torch.as_tensor(p) > share,
    "randint": lambda share, _, *bounds, **named: _whole(share, *bounds, **named),
    "randint_like": lambda share, _, __, *bounds, **named: _whole(share, *bounds, **named),
    "randperm": lambda _, result, *__, **___: torch.arange(len(result)).flip(0),
    "poisson": lambda _, __, rate, *___: rate,
    "_standard_gamma": lambda _, __, alpha, *___: alpha,
    "_sample_dirichlet": lambda _, __, alpha, *___: alpha / alpha.sum(-1, keepdim=True),
}
"""Functions from the share, the real draw and the arguments of a torch function to what is drawn."""


@contextmanager
def without_randomness(share: float | None = 0.5) -> Iterator[None]:
    """Take random numbers out of forwards inside the `with` block: samples alone make their outputs.

    Draws are what `share` of all draws are below, 0.5 makes them their means; None: they are real, of the same seed.
    What cannot be replaced is drawn from the same seed. Generators are left as they were.
    """

    def filled(size: Any = None, low: float = 0.0, high: float = 1.0) -> Any:
        value = low + share * (high - low)  # type: ignore[operator]  # not called where it is None
        return value if size is None or size == () else np.full(size, value)

    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # models draw from the global one
        if share is not None:
            stack.enter_context(
                patch.multiple(random, random=filled, uniform=lambda low, high: filled(None, low, high))
            )
            stack.enter_context(
                patch.multiple(
                    np.random,
                    random=filled,
                    random_sample=filled,
                    rand=lambda *size: filled(size),
                    uniform=lambda low=0.0, high=1.0, size=None: filled(size, low, high),
                )
            )
            stack.enter_context(FixedDraws(share))
        yield


# The questions


def on_split(model: nn.Module, objective: Objective, batch: Batch) -> Dependence:
    """Compare the gradient of `batch`, of `NUM_SAMPLES` samples, with that of micro-batches of `FEW_SAMPLES`.

    Raises:
        RuntimeError: that takes more than `MOST_FLOPS`.
    """
    parts = _parts(batch)
    with FlopCounterMode(display=False) as counter, suppress(RuntimeError):  # it bears no `autograd.grad` in a forward
        _forward(model, objective, parts[0])
    # every sample twice, forward and backward, which takes twice as long
    flops = counter.get_total_flops() * 3 * 2 * NUM_SAMPLES / FEW_SAMPLES
    if flops > MOST_FLOPS:
        raise RuntimeError(f"that takes {flops / 1e9:.0f} GFLOP, too many for a trial")
    apart = difference(gradient(model, objective, [batch]), gradient(model, objective, parts))
    if apart <= MOST_DIFFERENCE:
        return Dependence(apart)
    return Dependence(apart, _responsible(model, objective, batch, parts))


def on_forwards(model: nn.Module, objective: Objective, batch: Batch) -> Dependence:
    """Compare the gradients of a micro-batch before and after those of others, with the same weights.

    Where nothing that a module keeps changes in a forward they are not computed again. Modules whose parameters a
    forward changes are named also where the gradient does not depend on them.
    """
    generator, first, *others = torch.Generator().manual_seed(0), *_parts(batch)
    with restored(model):
        with torch.no_grad():
            for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise * MOVED * parameter.square().mean().sqrt())
        before, modules = kept(model), dict(model.named_modules())
        was = gradient(model, objective, [first], restore=False)
        changed = [name for name, now in kept(model).items() if differs(before[name], now)]
        if not changed:
            return Dependence(0.0)
        gradient(model, objective, others, restore=False)
        after = kept(model)
        apart = difference(was, gradient(model, objective, [first]))
        for kind in dict.fromkeys(type(modules[name]) for name in changed) if apart > MOST_CARRIED else ():
            alike = [name for name in changed if type(modules[name]) is kind]
            for name, module in modules.items():
                put(module, (after if name in alike else before)[name])
            if difference(was, gradient(model, objective, [first])) > MOST_CARRIED:
                return Dependence(apart, (alike[0], kind.__name__, len(alike)))
    moved = [  # whose parameters change, such as averages
        (name, type(modules[name]).__name__) for name in changed if differs(before[name][:1], after[name][:1])
    ]
    return Dependence(apart, (*moved[0], sum(kind == moved[0][1] for _, kind in moved)) if moved else None)


def on_draws(model: nn.Module, objective: Objective, batch: Batch) -> list[str]:
    """Return the parameters that get a gradient with some random draws and none with others."""
    used = []
    for share in (0.001, 0.999, None):
        with suppress(Exception):  # extreme draws may be senseless for a model
            used.append(gradient(model, objective, _parts(batch)[:1], share=share).keys())
    return [name for name, _ in model.named_parameters() if len({name in each for each in used}) > 1]


def on_padding(model: nn.Module, objective: Objective, samples: Sequence[Sample]) -> Dependence:
    """Compare the gradient of `samples` of different lengths in one micro-batch with that of each alone."""
    alone = [objective.collate([sample]) for sample in samples]
    together = objective.collate(samples)
    return Dependence(difference(gradient(model, objective, [together]), gradient(model, objective, alone)))


def on_later_tokens(model: nn.Module, tokens: Tensor, vocab_size: int) -> float:
    """Measure how other tokens in the second half of `tokens (samples, positions)` change logits of the first half.

    As a part of the largest change of any logit.
    """
    half = tokens.shape[1] // 2
    changed = tokens.clone()
    changed[:, half:] = (changed[:, half:] + 1 + torch.arange(tokens.shape[1] - half)) % vocab_size
    with torch.no_grad(), restored(model), without_randomness():
        model.eval()
        before, after = (model(input_ids=each).logits.float() for each in (tokens, changed))
    difference = (after - before).abs()
    return float(difference[:, :half].max() / difference.max().clamp_min(torch.finfo(torch.float32).tiny))


def watch(model: nn.Module, objective: Objective, batch: Batch) -> FixedDraws:
    """Return what a forward in training draws, and which targets its cross entropies leave out."""
    with torch.no_grad(), restored(model), FixedDraws(0.5) as fixed:
        objective.loss_sum(model, batch)
    return fixed


def arrivals(model: nn.Module, objective: Objective, batch: Batch) -> dict[str, int]:
    """Count how often the gradient of each trained parameter is complete in one backward.

    More than once: reentrant activation checkpointing runs a backward of its own for each use of a module. Never: the
    batch does not use it.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    arrived: list[str] = []
    with ExitStack() as hooks:
        for name, parameter in trained.items():
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name)))
        gradient(model, objective, [batch])
    return {name: arrived.count(name) for name in trained}


def examples(model: nn.Module, objective: Objective, seq_len: int) -> list[Batch]:
    """Return batches of `NUM_SAMPLES` that differ in their numbers, as far as the model and its loss take them.

    A second one has few targets, in half of the samples twice as many as in the others, where `IGNORED` is taken.
    """
    generator, example = torch.Generator().manual_seed(0), objective.example(NUM_SAMPLES, seq_len)
    numbers_of_samples = {
        name: each for name, each in example.items() if each.is_floating_point() and each.shape[:1] == (NUM_SAMPLES,)
    }
    sizes = torch.linspace(0.2, 1, NUM_SAMPLES)  # samples of one size would hide a mean under a root
    # some losses take numbers from 0 to 1 alone, and masks are of zeros and ones, here three of four
    draws: list[Callable[..., Tensor]] = [
        lambda *a, **b: (torch.randn(*a, **b).transpose(0, -1) * sizes).transpose(0, -1),
        lambda *a, **b: (torch.rand(*a, **b).transpose(0, -1) * sizes).transpose(0, -1),
        lambda *a, **b: torch.rand(*a, **b).sqrt().round(),
    ]
    for draw in draws:
        noisy = {
            name: tensor + draw(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
            for name, tensor in numbers_of_samples.items()
        }
        batch = _first_that_runs(model, objective, example, [noisy])
        if batch is not example:
            break
    batch = example | noisy if batch is example else batch  # to fail: samples that are all alike show nothing
    for name in whole_numbers(batch):
        tensor = batch[name]
        numbers = torch.randint(0, 16, tensor.shape, generator=generator)
        if tensor.ndim == 1:  # a class or a mark, so that micro-batches have other shares of them
            numbers = torch.tensor(([0, 1, 1, 1] if name == PART else [0, 1, 0, 0]) * (NUM_SAMPLES // 4))
        ways = [tensor + added.to(tensor.dtype) for added in (numbers, numbers % 2, -(numbers % 2))]
        # ones may be a mask, and a number of a sample its length, of which the example has the largest
        if (tensor == 1).all() or (tensor.ndim == 1 and (tensor > 1).all()):
            ways.reverse()
        ways = [numbers % 2 == 0] if tensor.dtype == torch.bool else ways
        batch = _first_that_runs(model, objective, batch, ({name: each} for each in ways))
    ignoring, values = batch, left_out(model, objective, batch)
    for name in whole_numbers(batch):
        changes = []
        for value in values:
            tensor = batch[name].clone(memory_format=torch.contiguous_format)
            rows = tensor.view(NUM_SAMPLES, -1)
            few = min(4, rows.shape[1] // 2)  # many would hide a count that leaves the first one out
            rows[: NUM_SAMPLES // 2, few:] = rows[NUM_SAMPLES // 2 :, 2 * few or rows.shape[1] :] = value
            if value != IGNORED or (tensor.ndim > 1 and (name in TARGETS or not (example[name] == 1).all())):
                changes.append({name: tensor})
        ignoring = _first_that_runs(model, objective, ignoring, changes)
    return [batch] if ignoring is batch else [batch, ignoring]


def lacking(model: nn.Module, objective: Objective, batch: Batch) -> Iterator[tuple[str, Batch]]:
    """Yield each value that some samples may lack, `IGNORED` or NaN, with a batch in which they do."""
    for name, tensor in batch.items():
        is_class = name in whole_numbers(batch) and tensor.ndim == 1
        if is_class or (tensor.is_floating_point() and tensor.shape[:1] == (NUM_SAMPLES,)):
            without = [{name: tensor.index_fill(0, torch.tensor([1, 2]), IGNORED if is_class else torch.nan)}]
            if (changed := _first_that_runs(model, objective, batch, without)) is not batch:
                yield name, changed


PART = "frugal part"
"""The name of a number by which the length of a sample is divided, where an objective collates samples itself."""


def by_samples(objective: Objective) -> Objective:
    """Return the objective, or where it collates samples itself one whose batches are those samples, stacked.

    So each micro-batch is made of its samples as in training, whatever shape that gives it.
    """
    if not isinstance(objective, SummedLoss) or not objective.collates:
        return objective
    shown = objective.sample(MOST_TOKENS)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        return objective.loss_sum(model, objective.collate([_sample(row, shown) for row in rows]))

    with suppress(TypeError, ValueError, RuntimeError):  # of what is no number
        return SummedLoss(loss, example={n: torch.as_tensor(each) for n, each in {PART: 1, **shown}.items()})
    return objective


def _sample(row: Batch, shown: Sample) -> dict[str, Any]:
    """Return a sample of a row's values, of the types that they have in the one `shown`, cut to its part."""
    longest = max((len(each) for each in row.values() if each.ndim), default=0)
    length = longest // int(row.pop(PART))
    cut = {name: each[:length] if each.ndim and len(each) == longest else each for name, each in row.items()}
    return {name: each if isinstance(shown[name], Tensor) else each.tolist() for name, each in cut.items()}


def _first_that_runs(model: nn.Module, objective: Objective, batch: Batch, changes: Iterable[Batch]) -> Batch:
    """Return `batch` with the first of some changes with which its loss is a finite number; itself: there is none."""
    for change in changes:
        with suppress(Exception):  # what is out of range raises in many ways
            if _forward(model, objective, batch | change).isfinite():
                return batch | change
    return batch


def left_out(model: nn.Module, objective: Objective, batch: Batch) -> list[int]:
    """Return what is no target to the model: what its cross entropies leave out, and `IGNORED`."""
    return [*sorted(watch(model, objective, batch).left_out - {IGNORED}), IGNORED]


def whole_numbers(batch: Batch) -> list[str]:
    """Return the names of the whole numbers and truth values of which each sample has its own."""
    return [
        name
        for name, each in batch.items()
        if each.ndim and len(each) == NUM_SAMPLES and not (each.is_floating_point() or each.is_complex())
    ]


def _forward(model: nn.Module, objective: Objective, batch: Batch) -> Tensor:
    """Return the loss of a batch, and leave the model and the random number generators as they were."""
    with torch.no_grad(), restored(model), without_randomness():
        return objective.loss_sum(model, batch)


def _parts(batch: Batch) -> list[Batch]:
    """Cut a batch into micro-batches of `FEW_SAMPLES`; what has no value for each sample is in all of them."""
    of_samples = {name for name, tensor in batch.items() if tensor.ndim and len(tensor) == NUM_SAMPLES}
    return [
        {name: tensor[at : at + FEW_SAMPLES] if name in of_samples else tensor for name, tensor in batch.items()}
        for at in range(0, NUM_SAMPLES, FEW_SAMPLES)
    ]


def gradient(
    model: nn.Module, objective: Objective, batches: Sequence[Batch], *, share: float | None = 0.5, restore: bool = True
) -> Gradient:
    """Return the gradient of the loss summed over `batches`; `share`: see `without_randomness`.

    `restore`: each starts from the buffers and other values that the model's modules keep now, and leaves them so.
    """
    model.zero_grad(set_to_none=True)
    for batch in batches:
        with restored(model) if restore else nullcontext(), without_randomness(share):
            objective.loss_sum(model, batch).backward()
    gradient = {
        name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return gradient


def difference(one: Gradient, other: Gradient) -> float:
    """Return the norm of the difference of two gradients, divided by that of the larger.

    Raises:
        RuntimeError: both are zero, which shows nothing.
    """
    zero = torch.zeros(())
    apart = sum(float((one.get(n, zero) - other.get(n, zero)).square().sum()) for n in one.keys() | other.keys())
    largest = max(sum(float(tensor.square().sum()) for tensor in gradient.values()) for gradient in (one, other))
    if not largest:
        raise RuntimeError("the loss of random samples has no gradient")
    return (apart / largest) ** 0.5


def _responsible(
    model: nn.Module, objective: Objective, batch: Batch, parts: Sequence[Batch]
) -> tuple[str, str, int] | None:
    """Return the first module that ends with other outputs for a whole batch than for its parts."""
    whole = _outputs(model, objective, batch)
    in_parts = [_outputs(model, objective, part) for part in parts]
    modules = dict(model.named_modules())
    for call, outputs in whole.items():
        for output, *pieces in zip(outputs, *(part.get(call, ()) for part in in_parts), strict=False):
            rows = [len(piece) for piece in pieces if piece.ndim and piece.shape[1:] == output.shape[1:]]
            if len(rows) < len(pieces) or output.shape[:1] != (sum(rows),) or not output.numel():
                continue
            if float((torch.cat(pieces) - output).abs().max()) > MOST_DIFFERENCE * float(output.abs().max()):
                kind = type(modules[call[0]])
                return call[0], kind.__name__, sum(type(module) is kind for module in modules.values())
    return None


def _outputs(model: nn.Module, objective: Objective, batch: Batch) -> dict[tuple[str, int], list[Tensor]]:
    """Return the outputs of every call of every module, by its name and number, in the order in which they end."""
    outputs: dict[tuple[str, int], list[Tensor]] = {}

    def keep(name: str, _module: nn.Module, _inputs: Any, returned: Any) -> None:
        number = sum(each == name for each, _ in outputs)
        values = list(returned.values()) if isinstance(returned, dict) else returned  # an output of transformers
        outputs[name, number] = [tensor.detach().double().clone() for tensor in tensors_in(values)]

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        _forward(model, objective, batch)
    return outputs
