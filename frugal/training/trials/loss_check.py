"""A check that frugal trains the loss that the model's authors have given it: a small one of its kind is asked."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from frugal.errors import RequestError, first_line
from frugal.training.losses import decoder_inputs
from frugal.training.models.spec import ModelSpec
from frugal.training.objectives import Batch, Objective, Sample
from frugal.units import IGNORED

MOST_DIFFERENCE = 1e-3
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
        raise _refusal(spec, "its decoder reads the targets, and of masked text most are none", "use --task seq2seq")
    was_training = model.training
    model.eval()
    batch, theirs, reason = objective.collate([sample]), [], ""
    with torch.no_grad():
        ours = objective.loss_sum(model, batch).item() / objective.count(batch)
        for inputs in _ways_to_ask(spec, model, batch):
            try:
                theirs.append(model(**inputs).loss.item())
            except Exception as error:  # whatever a model trips over
                reason = reason or first_line(error)
    model.train(was_training)
    if not theirs:
        raise _refusal(
            spec,
            f"its own loss of text alone fails: {reason}",
            "give a factory that returns (module, objective), with what else it reads in the samples",
        )
    nearest = min(theirs, key=lambda loss: abs(loss - ours))
    if abs(ours - nearest) > MOST_DIFFERENCE * max(abs(nearest), 1e-6):
        why = f"of a small model of its kind, its own loss is {nearest:.4f} a target, and the cross entropy {ours:.4f}"
        raise _refusal(spec, why, "give a factory that returns (module, objective), with its loss as objective")


def _ways_to_ask(spec: ModelSpec, model: nn.Module, batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Yield inputs with labels. Decoders of encoder-decoders want labels that are moved already; a few models make the
    decoder inputs of labels in a method only, and not in their forward."""
    names = ("input_ids", "attention_mask", "labels")
    inputs = {name: batch[name] for name in names if name in batch}
    yield inputs
    if spec.task == "causal-lm":
        yield inputs | {"labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)}
    if spec.task == "seq2seq" and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        yield inputs | {"decoder_input_ids": decoder_inputs.decoder_inputs(model, batch["labels"])}


def _refusal(spec: ModelSpec, because: str, hint: str) -> RequestError:
    return RequestError(f"{spec.reference} cannot be trained as {spec.task}", because=because, hint=hint)
