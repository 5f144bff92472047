"""Checks of a model of text that may refuse it: a small one of its kind is run, no list of names consulted.

- Does it keep packed documents apart?
- Can its samples be split over ranks? What mixes positions outside attention (convolutions, recurrences, biases of its
  own) or depends on the number of a head changes the gradient of the parts. The parts are rows of one batch here, so no
  ranks are needed. A model may also count the positions of a part, though it gets them as input, and use them in a way
  that shows for long samples only, as Llama 4's attention temperature does. So a model that counts as far as a part
  reaches is refused, too.
- Is what frugal trains the loss that the model's authors have given it?
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor, nn

from frugal.errors import RequestError, first_line, refuse
from frugal.models import packs, transformers_internals
from frugal.models.objectives import Batch, CausalLM, Objective, Sample
from frugal.models.sequence import attention
from frugal.models.sequence.parts import parts_of
from frugal.models.spec import OWN, ModelSpec
from frugal.models.trials import probe
from frugal.models.trials.probe import Dependence
from frugal.models.trials.small_model import NoSmallModelError, tried
from frugal.units import IGNORED

DOCUMENTS = (13, 9)
"""Tokens of the two documents that are packed."""

MOST_LEAKAGE = 1e-3
"""The most that another document may change, as a part of its effect unpacked: rounding is far below."""

_PACKING_HINT = "leave --pack out: samples of like length share a micro-batch, which pads little"
_WHY_NOT_PACKED = {
    "masked-lm": "a model that reads in both directions knows padding only, not documents",
    "seq2seq": "each target text has a source text of its own",
    "sequence-classification": "a sample has one class",
    OWN: "its loss is Python of its own, and makes its batches itself",
}


def check_packing(spec: ModelSpec) -> None:
    """Refuse to pack for a model that would let documents see each other.

    Raises:
        RequestError: with the reason.
    """
    reason = _WHY_NOT_PACKED.get(spec.task)
    try:
        leak = 0.0 if reason else tried(spec, lambda _, model: leakage(model))
    except NoSmallModelError as error:
        reason = f"whether it keeps documents apart could not be tried: {error}"
    else:
        if leak > MOST_LEAKAGE:
            reason = f"what it says of a document depends on the one before it, to {100 * leak:.1f} % of the whole"
    refuse((reason, f"--pack is impossible for {spec.reference}", reason or "", _PACKING_HINT))


def leakage(model: nn.Module) -> float:
    """Return what a document changes in the logits of the next in its pack, as a part of what it changes unpacked."""
    model.eval()
    together = torch.randint(5, 200, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(0))
    position_ids = torch.from_numpy(packs.positions(DOCUMENTS))[None]

    def logits(tokens: Tensor, **inputs: Tensor) -> Tensor:
        return model(input_ids=tokens, **inputs).logits[0].float()

    with torch.no_grad():
        alone = torch.cat([logits(document) for document in together.split(DOCUMENTS, dim=1)])
        following = logits(together)
        with packs.documents_kept_apart():
            packed = logits(together, position_ids=position_ids)
    unpacked = float((following - alone).abs().max())
    return float((packed - alone).abs().max()) / unpacked if unpacked else 0.0


NUM_PARTS = 2

PART_LENGTHS = (38, 27)
"""Tokens of the samples that are run, the longer one a multiple of the parts. A part has as many as nothing else."""

MOST_OF_PARTS = 1e-4
"""The largest relative difference of gradients: rounding is below 1e-6, a window that ends at a border above 1e-2."""


def check_sequence_parallel(spec: ModelSpec, size: int, *, pack: bool) -> None:
    """Refuse to split the samples of a model over `size` ranks where its gradient would be another.

    Raises:
        RequestError: with the reason.
    """
    if spec.task != "causal-lm":
        raise attention.refusal(
            spec.reference, size, f"it trains {spec.task}; only causal-lm is known to be split right"
        )
    spec = replace(spec, lora=None, quantize=None)  # adapters and packed weights are of positions each
    if spec.has_own_loss():
        raise attention.refusal(spec.reference, size, "its loss is its own, of whole sequences")
    attention.refuse(spec.build(dtype=torch.float32, device="meta"), size)
    transformers_internals.always_use()

    def run(small: ModelSpec, model: nn.Module) -> tuple[float, int, bool]:
        attention.refuse(model, NUM_PARTS)
        with patch.object(torch, "arange", wraps=torch.arange) as arange:
            dependence, num_calls = on_parts(model, small.vocab_size or 2, pack=pack)
        counts = any(PART_LENGTHS[0] // NUM_PARTS in call.args[:2] for call in arange.call_args_list)
        return dependence.difference, num_calls, counts

    try:
        difference, num_calls, counts = tried(spec, run)
    except NoSmallModelError as error:
        raise attention.refusal(
            spec.reference, size, f"whether parts train as the whole does could not be tried: {error}"
        ) from None
    reason = ""
    if not num_calls:
        reason = "its attention does not go through transformers' attention functions"
    elif difference > MOST_OF_PARTS:
        reason = (
            f"the gradient of a small one in {NUM_PARTS} parts differs by {100 * difference:.2g} %: "
            "not only its attention mixes positions"
        )
    elif counts:
        reason = "it counts the positions of a part from 0 and ignores those that it is given"
    if reason:
        raise attention.refusal(spec.reference, size, reason)


def on_parts(model: nn.Module, vocab_size: int, *, pack: bool = False, size: int = NUM_PARTS) -> tuple[Dependence, int]:
    """Compare gradients of samples in `size` parts with whole ones; count how often attention was split."""
    whole, generator = CausalLM(packed=pack), torch.Generator().manual_seed(0)
    low = min(5, vocab_size - 1)  # beyond the usual special tokens
    rows_of_ids = [torch.randint(low, vocab_size, (length,), generator=generator).tolist() for length in PART_LENGTHS]
    samples = [
        {"input_ids": row, "documents": [len(row) // 3, len(row) - len(row) // 3] if pack else [len(row)]}
        for row in rows_of_ids
    ]
    parts = [parts_of(whole, size, rank) for rank in range(size)]
    batches = [part.collate(samples) for part in parts]
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    alone = probe.gradient(model, whole, [whole.collate(samples)])
    split, copied = attention.SplitInOneProcess(size), copy.deepcopy(model)
    attention.apply(copied, split)
    return Dependence(probe.difference(alone, probe.gradient(copied, parts[0], [rows]))), split.num_calls


MOST_OF_LOSS = 1e-3
"""The largest relative difference that rounding explains."""


def check_loss(spec: ModelSpec, model: nn.Module, objective: Objective, sample: Sample) -> None:
    """Refuse a task for which `model`, a small one of the kind of `spec`, has another loss than `objective`.

    Of the ways to ask a model for its loss the one counts whose answer is nearest.

    Raises:
        RequestError: it has, or takes no text.
    """
    if not hasattr(model, "config"):
        return
    if spec.task == "masked-lm" and getattr(model.config, "is_encoder_decoder", False):
        raise _other_loss(spec, "its decoder reads the targets, and of masked text most are none", "use --task seq2seq")
    batch, theirs, reason = objective.collate([sample]), [], ""
    with torch.no_grad(), probe.restored(model):
        model.eval()
        ours = objective.loss_sum(model, batch).item() / objective.count(batch)
        for inputs in _ways_to_ask(spec, model, batch):
            try:
                theirs.append(model(**inputs).loss.item())
            except Exception as error:  # whatever a model trips over
                reason = reason or first_line(error)
    if not theirs:
        raise _other_loss(
            spec,
            f"its own loss of text alone fails: {reason}",
            "give a factory that returns (module, objective), with what else it reads in the samples",
        )
    nearest = min(theirs, key=lambda loss: abs(loss - ours))
    if abs(ours - nearest) > MOST_OF_LOSS * max(abs(nearest), 1e-6):
        why = f"of a small model of its kind, its own loss is {nearest:.4f} a target, and the cross entropy {ours:.4f}"
        raise _other_loss(spec, why, "give a factory that returns (module, objective), with its loss as objective")


def _ways_to_ask(spec: ModelSpec, model: nn.Module, batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Yield inputs with labels. Decoders of encoder-decoders want labels that are moved already; a few models make the
    decoder inputs of labels in a method only, and not in their forward."""
    names = ("input_ids", "attention_mask", "labels")
    inputs = {name: batch[name] for name in names if name in batch}
    yield inputs
    if spec.task == "causal-lm":
        yield inputs | {"labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)}
    if spec.task == "seq2seq" and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        yield inputs | {"decoder_input_ids": batch["decoder_input_ids"]}


def _other_loss(spec: ModelSpec, because: str, hint: str) -> RequestError:
    return RequestError(f"{spec.reference} cannot be trained as {spec.task}", because=because, hint=hint)
