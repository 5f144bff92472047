"""A check that a model keeps packed documents apart: a small one of its kind is run, no list of names consulted."""

import torch
from torch import Tensor, nn

from frugal.errors import RequestError
from frugal.training.models import packs
from frugal.training.models.spec import OWN, ModelSpec
from frugal.training.trials.small_model import NoSmallModelError, tried

DOCUMENTS = (13, 9)
"""Tokens of the two documents that are packed."""

MOST_LEAKAGE = 1e-3
"""The most that another document may change, as a part of its effect unpacked: rounding is far below."""

_HINT = "leave --pack out: samples of like length share a micro-batch, which pads little"
_WHY_NOT = {
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
    reason = _WHY_NOT.get(spec.task)
    if reason is None:
        try:
            leak = tried(spec, lambda _, model: leakage(model))
        except NoSmallModelError as error:
            reason = f"whether it keeps documents apart could not be tried: {error}"
        else:
            if leak <= MOST_LEAKAGE:
                return
            reason = f"what it says of a document depends on the one before it, to {100 * leak:.1f} % of the whole"
    raise RequestError(f"--pack is impossible for {spec.reference}", because=reason, hint=_HINT)


def leakage(model: nn.Module) -> float:
    """Return what a document changes in the logits of the next in its pack, as a part of what it changes unpacked."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(5, 200, (1, number), generator=generator) for number in DOCUMENTS)
    together = torch.cat([first, second], dim=1)
    position_ids = torch.from_numpy(packs.positions(DOCUMENTS))[None]

    def logits(tokens: Tensor, **inputs: Tensor) -> Tensor:
        return model(input_ids=tokens, **inputs).logits[0].float()

    with torch.no_grad():
        alone = torch.cat([logits(first), logits(second)])
        following = logits(together)
        with packs.documents_kept_apart():
            packed = logits(together, position_ids=position_ids)
    unpacked = float((following - alone).abs().max())
    return float((packed - alone).abs().max()) / unpacked if unpacked else 0.0
