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

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from frugal.models.objectives import TARGETS, Batch, Objective, Sample
from frugal.models.trials import held_still
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


class TooCostlyError(Exception):
    """A trial would take more than `MOST_FLOPS`."""


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


def on_split(model: nn.Module, objective: Objective, batch: Batch) -> Dependence:
    """Compare the gradient of `batch`, of `NUM_SAMPLES` samples, with that of micro-batches of `FEW_SAMPLES`."""
    parts = _parts(batch)
    _refuse_costly(model, objective, parts[0])
    apart = difference(gradient(model, objective, [batch]), gradient(model, objective, parts))
    if apart <= MOST_DIFFERENCE:
        return Dependence(apart)
    return Dependence(apart, _responsible(model, objective, batch, parts))


def on_forwards(model: nn.Module, objective: Objective, batch: Batch) -> Dependence:
    """Compare the gradients of a micro-batch before and after those of others, with the same weights.

    Where nothing that a module keeps changes in a forward they are not computed again.
    """
    generator, first, *others = torch.Generator().manual_seed(0), *_parts(batch)
    with held_still.restored(model):
        with torch.no_grad():
            for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise * MOVED * parameter.square().mean().sqrt())
        before = held_still.kept(model)
        was = gradient(model, objective, [first], restore=False)
        changed = {
            name
            for name, module in model.named_modules()
            if held_still.differs(before[name], held_still.kept_by(module))
        }
        if not changed:
            return Dependence(0.0)
        gradient(model, objective, others, restore=False)
        after = held_still.kept(model)
        apart = difference(was, gradient(model, objective, [first]))
        if apart <= MOST_CARRIED:
            return Dependence(apart)
        modules = dict(model.named_modules())
        for name in (name for name in modules if name in changed):
            alike = [other for other in changed if type(modules[other]) is type(modules[name])]
            for other in modules:
                held_still.put(modules[other], (after if other in alike else before)[other])
            if difference(was, gradient(model, objective, [first])) > MOST_CARRIED:
                return Dependence(apart, (name, type(modules[name]).__name__, len(alike)))
    return Dependence(apart)


def on_draws(model: nn.Module, objective: Objective, batch: Batch) -> list[str]:
    """Return the parameters that get a gradient with some random draws and none with others."""
    used = []
    part = _parts(batch)[0]
    for share in (0.001, 0.999, None):
        try:
            used.append(gradient(model, objective, [part], share=share).keys())
        except Exception:  # extreme draws may be senseless for a model
            continue
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
    with torch.no_grad(), held_still.restored(model), held_still.without_randomness():
        model.eval()
        before, after = (model(input_ids=each).logits.float() for each in (tokens, changed))
    difference = (after - before).abs()
    whole = float(difference.max())
    return float(difference[:, :half].max()) / whole if whole else 0.0


def watch(model: nn.Module, objective: Objective, batch: Batch) -> held_still.FixedDraws:
    """Return what a forward in training draws, and which targets its cross entropies leave out."""
    with torch.no_grad(), held_still.restored(model), held_still.FixedDraws(0.5) as fixed:
        objective.loss_sum(model, batch)
    return fixed


def arrivals(model: nn.Module, objective: Objective, batch: Batch) -> dict[str, int]:
    """Count how often the gradient of each trained parameter is complete in one backward.

    More than once: reentrant activation checkpointing runs a backward of its own for each use of a module. Never: the
    batch does not use it.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    arrived = Counter(dict.fromkeys(trained, 0))

    def note(name: str, _parameter: Tensor) -> None:
        arrived[name] += 1

    with ExitStack() as hooks:
        for name, parameter in trained.items():
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(partial(note, name)))
        gradient(model, objective, [batch])
    return arrived


def examples(model: nn.Module, objective: Objective, seq_len: int) -> list[Batch]:
    """Return batches of `NUM_SAMPLES` that differ in their numbers, as far as the model and its loss take them.

    A second one has targets of `IGNORED` in some samples, where they are taken.
    """
    generator, example = torch.Generator().manual_seed(0), objective.example(NUM_SAMPLES, seq_len)
    for draw in (torch.randn, torch.rand):  # the second: some losses take numbers from 0 to 1 alone
        batch = {
            name: tensor + draw(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
            if tensor.is_floating_point() and tensor.ndim
            else tensor
            for name, tensor in example.items()
        }
        if _can_run(model, objective, batch):
            break
    whole = whole_numbers(batch)
    for name in whole:
        tensor = batch[name]
        numbers = torch.randint(0, 16, tensor.shape, generator=generator)
        if tensor.ndim == 1:  # a class or a mark, so that micro-batches have other shares of them
            numbers = torch.tensor([0, 1, 0, 0] * (NUM_SAMPLES // 4))
        ways = [numbers, numbers % 2, -(numbers % 2)]
        # ones may be a mask, and a number of a sample its length, of which the example has the largest
        for added in reversed(ways) if (tensor == 1).all() or (tensor.ndim == 1 and (tensor > 1).all()) else ways:
            changed = numbers % 2 == 0 if tensor.dtype == torch.bool else tensor + added.to(tensor.dtype)
            if _can_run(model, objective, batch | {name: changed}):
                batch = batch | {name: changed}
                break
    ignoring = batch
    for name in whole:
        for value in left_out(model, objective, batch):
            tensor = batch[name].clone(memory_format=torch.contiguous_format)
            tensor.view(NUM_SAMPLES, -1)[1:3, tensor[0].numel() // 2 :] = value
            is_none = value != IGNORED or (tensor.ndim > 1 and (name in TARGETS or not (example[name] == 1).all()))
            if is_none and _can_run(model, objective, ignoring | {name: tensor}):
                ignoring = ignoring | {name: tensor}
                break
    return [batch] if ignoring is batch else [batch, ignoring]


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


def _can_run(model: nn.Module, objective: Objective, batch: Batch) -> bool:
    """Tell whether the loss of a batch is a finite number."""
    try:
        return bool(_forward(model, objective, batch).isfinite())
    except Exception:  # what is out of range raises in many ways
        return False


def _forward(model: nn.Module, objective: Objective, batch: Batch) -> Tensor:
    """Return the loss of a batch, and leave the model and the random number generators as they were."""
    with torch.no_grad(), held_still.restored(model), held_still.without_randomness():
        return objective.loss_sum(model, batch)


def _refuse_costly(model: nn.Module, objective: Objective, part: Batch) -> None:
    """Raises: TooCostlyError."""
    with FlopCounterMode(display=False) as counter:
        _forward(model, objective, part)
    # every sample twice, forward and backward, which takes twice as long
    flops = counter.get_total_flops() * 3 * 2 * NUM_SAMPLES / FEW_SAMPLES
    if flops > MOST_FLOPS:
        raise TooCostlyError(f"that takes {flops / 1e9:.0f} GFLOP")


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
    """Return the gradient of the loss summed over `batches`; `share`: see `held_still.without_randomness`.

    `restore`: each starts from the buffers and other values that the model's modules keep now, and leaves them so.
    """
    model.zero_grad(set_to_none=True)
    for batch in batches:
        with ExitStack() as stack:
            if restore:
                stack.enter_context(held_still.restored(model))
            stack.enter_context(held_still.without_randomness(share))
            objective.loss_sum(model, batch).backward()
    gradient = {
        name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return gradient


def difference(one: Gradient, other: Gradient) -> float:
    """Return the norm of the difference of two gradients, divided by that of the larger."""
    zero = torch.zeros(())
    names = one.keys() | other.keys()
    apart = sum(float((one.get(name, zero) - other.get(name, zero)).square().sum()) for name in names)
    largest = max(sum(float(tensor.square().sum()) for tensor in gradient.values()) for gradient in (one, other))
    return (apart / largest) ** 0.5 if largest else 0.0


def _responsible(
    model: nn.Module, objective: Objective, batch: Batch, parts: Sequence[Batch]
) -> tuple[str, str, int] | None:
    """Return the first module that ends with other outputs for a whole batch than for its parts."""
    whole = _outputs(model, objective, batch)
    in_parts = [_outputs(model, objective, part) for part in parts]
    modules = dict(model.named_modules())
    for call, outputs in whole.items():
        for output, *pieces in zip(outputs, *(part.get(call, ()) for part in in_parts), strict=False):
            if any(piece.ndim == 0 or piece.shape[1:] != output.shape[1:] for piece in pieces):
                continue
            joined = torch.cat(pieces)
            if joined.shape != output.shape or not output.numel():
                continue
            if float((joined - output).abs().max()) > MOST_DIFFERENCE * float(output.abs().max()):
                kind = type(modules[call[0]])
                return call[0], kind.__name__, sum(type(module) is kind for module in modules.values())
    return None


def _outputs(model: nn.Module, objective: Objective, batch: Batch) -> dict[tuple[str, int], list[Tensor]]:
    """Return the outputs of every call of every module, by its name and number, in the order in which they end."""
    outputs: dict[tuple[str, int], list[Tensor]] = {}
    calls: dict[str, int] = {}

    def keep(name: str, _module: nn.Module, _inputs: Any, returned: Any) -> None:
        number = calls[name] = calls.get(name, -1) + 1
        values = list(returned.values()) if isinstance(returned, dict) else returned  # an output of transformers
        outputs[name, number] = [tensor.detach().double().clone() for tensor in tensors_in(values)]

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        _forward(model, objective, batch)
    return outputs
