"""Whether what frugal trains is the loss that the model's authors have given it: a small one of its kind is asked."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from frugal.errors import RequestError, first_line
from frugal.training.losses import decoder_inputs
from frugal.training.models.spec import OWN, ModelSpec
from frugal.training.objectives import Batch, Objective, Sample

MOST_DIFFERENCE = 1e-3
"""Relative; what more is no rounding."""


def check_loss(spec: ModelSpec, model: nn.Module, objective: Objective, samples: Sequence[Sample]) -> None:
    """Refuse a task for which `model`, a small one of the kind of `spec`, has another loss than `objective`.

    Raises:
        RequestError: it has, or takes no text.
    """
    if spec.task == OWN or not hasattr(model, "config"):
        return
    if spec.task == "masked-lm" and getattr(model.config, "is_encoder_decoder", False):
        raise _refused(spec, "its decoder reads the targets, and of masked text most are none", "use --task seq2seq")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            apart = [_apart(spec, model, objective, sample) for sample in samples]
    finally:
        model.train(was_training)
    ours, theirs = max(apart, key=lambda pair: abs(pair[0] - pair[1]))
    if abs(ours - theirs) > MOST_DIFFERENCE * max(abs(theirs), 1e-6):
        why = f"of a small model of its kind, its own loss is {theirs:.4f} a target, and the cross entropy {ours:.4f}"
        raise _refused(spec, why, "give a factory that returns (module, objective), with its loss as objective")


def _apart(spec: ModelSpec, model: nn.Module, objective: Objective, sample: Sample) -> tuple[float, float]:
    """Our loss of a target of `sample` and the model's own, of the ways to ask for it the nearest one."""
    batch = objective.collate([sample])
    ours = objective.loss_sum(model, batch).item() / objective.count(batch)
    theirs: list[float] = []
    reason = ""
    for inputs in _ways_to_ask(spec, model, batch):
        try:
            theirs.append(model(**inputs).loss.item())
        except Exception as error:  # whatever a model trips over
            reason = reason or first_line(error)
    if not theirs:
        raise _refused(
            spec,
            f"its own loss of text alone fails: {reason}",
            "give a factory that returns (module, objective), with what else it reads in the samples",
        )
    return ours, min(theirs, key=lambda loss: abs(loss - ours))


def _ways_to_ask(spec: ModelSpec, model: nn.Module, batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Inputs with labels. Decoders of encoder-decoders want labels that are moved already; a few models make the
    decoder inputs of labels in a method only, and not in their forward."""
    names = ("input_ids", "attention_mask", "labels")
    inputs = {name: batch[name] for name in names if name in batch}
    yield inputs
    if spec.task == "causal-lm":
        yield inputs | {"labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
    if spec.task == "seq2seq" and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        yield inputs | {"decoder_input_ids": decoder_inputs.decoder_inputs(model, batch["labels"])}


def _refused(spec: ModelSpec, because: str, hint: str) -> RequestError:
    return RequestError(f"{spec.reference} cannot be trained as {spec.task}", because=because, hint=hint)
