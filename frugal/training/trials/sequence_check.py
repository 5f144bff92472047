"""A check that a model's samples can be split over ranks: a small one of its kind is run in parts and whole.

What mixes positions outside attention (convolutions, recurrences, biases of its own) or depends on the number of a head
makes the gradient of the parts another. The parts are rows of one batch here, so no ranks are needed.

A model may also count the positions of a part, though it gets them as input, and use them in a way that shows for long
samples only, as Llama 4's attention temperature does. So a model that counts as far as a part reaches is refused, too.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from frugal.training.models import transformers_internals
from frugal.training.models.sequence import attention, checks
from frugal.training.models.sequence.parts import parts_of
from frugal.training.models.spec import ModelSpec
from frugal.training.objectives import CausalLM
from frugal.training.trials import probe
from frugal.training.trials.probe import Dependence
from frugal.training.trials.small_model import NoSmallModelError, tried

NUM_PARTS = 2

LENGTHS = (38, 27)
"""Tokens of the samples that are run, the longer one a multiple of the parts. A part has as many as nothing else."""

MOST_DIFFERENCE = 1e-4
"""The largest relative difference of gradients: rounding is below 1e-6, a window that ends at a border above 1e-2."""


def check_sequence_parallel(spec: ModelSpec, size: int, *, pack: bool) -> None:
    """Refuse to split the samples of a model over `size` ranks where its gradient would be another.

    Raises:
        RequestError: with the reason.
    """
    if spec.task != "causal-lm":
        raise checks.refusal(spec.reference, size, f"it trains {spec.task}; only causal-lm is known to be split right")
    spec = replace(spec, lora=None, quantize=None)  # adapters and packed weights are of positions each
    if spec.has_own_loss():
        raise checks.refusal(spec.reference, size, "its loss is its own, of whole sequences")
    checks.refuse(spec.build(dtype=torch.float32, device="meta"), size)
    transformers_internals.always_use()

    def run(small: ModelSpec, model: nn.Module) -> tuple[float, int, bool]:
        checks.refuse(model, NUM_PARTS)
        with _Counting(LENGTHS[0] // NUM_PARTS) as counting:
            dependence, num_calls = on_parts(model, small.vocab_size or 2, pack=pack)
        return dependence.difference, num_calls, counting.is_done

    try:
        difference, num_calls, counts = tried(spec, run)
    except NoSmallModelError as error:
        raise checks.refusal(
            spec.reference, size, f"whether parts train as the whole does could not be tried: {error}"
        ) from None
    reason = ""
    if not num_calls:
        reason = "its attention does not go through transformers' attention functions"
    elif difference > MOST_DIFFERENCE:
        reason = (
            f"the gradient of a small one in {NUM_PARTS} parts differs by {100 * difference:.2g} %: "
            "not only its attention mixes positions"
        )
    elif counts:
        reason = "it counts the positions of a part from 0 and ignores those that it is given"
    if reason:
        raise checks.refusal(spec.reference, size, reason)


def on_parts(model: nn.Module, vocab_size: int, *, pack: bool = False, size: int = NUM_PARTS) -> tuple[Dependence, int]:
    """Compare gradients of samples in `size` parts with whole ones; count how often attention was split."""
    whole, samples = CausalLM(packed=pack), _samples(vocab_size, pack)
    parts = [parts_of(whole, size, rank) for rank in range(size)]
    batches = [part.collate(samples) for part in parts]
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    alone = probe.gradient(model, whole, [whole.collate(samples)])
    split = attention.SplitInOneProcess(size)
    with attention.applied(model, split):
        together = probe.gradient(model, parts[0], [rows])
    return Dependence(probe.difference(alone, together)), split.num_calls


class _Counting(TorchFunctionMode):
    """A mode that notices whether anybody counts to `length`."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.is_done = False
        self._length = length

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.arange and self._length in args[:2]:
            self.is_done = True
        return func(*args, **(kwargs or {}))


def _samples(vocab_size: int, pack: bool) -> list[dict[str, list[int]]]:
    """Make random samples of `LENGTHS` tokens, packed of two documents each if asked."""
    generator = torch.Generator().manual_seed(0)
    low = min(5, vocab_size - 1)  # beyond the usual special tokens
    rows: list[Tensor] = [torch.randint(low, vocab_size, (length,), generator=generator) for length in LENGTHS]
    return [
        {"input_ids": row.tolist()} | ({"documents": [len(row) // 3, len(row) - len(row) // 3]} if pack else {})
        for row in rows
    ]
