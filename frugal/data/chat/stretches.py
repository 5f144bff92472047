"""The tokens of a sample as text in pieces: trained on or not, special or not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frugal.units import IGNORED


@dataclass(frozen=True)
class Stretch:
    """Text of tokens that follow each other. `num_targets`: how many of them are trained on, which is all or none."""

    text: str
    num_targets: int = 0
    is_special: bool = False


def of_documents(tokenizer: Any, sample: Mapping[str, Any]) -> list[list[Stretch]]:
    """Return the pieces of each document in a language model's sample; the first token of each is no target."""
    ids = sample["input_ids"]
    labels = sample.get("labels", ids)
    ends = np.cumsum(sample.get("documents", [len(ids)]))
    made = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        trained = labels[begin:end] != IGNORED
        trained[:1] = False
        made.append(of_tokens(tokenizer, ids[begin:end], trained))
    return made


def of_tokens(tokenizer: Any, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> list[Stretch]:
    """Return the pieces of some tokens, of which `trained` are targets; both of shape `(tokens,)`."""
    added = [token for token, what in tokenizer.added_tokens_decoder.items() if what.special]
    special = np.isin(ids, [*tokenizer.all_special_ids, *added])
    kinds = trained * 2 + special
    borders = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), len(ids)]
    pieces, before = [], ""
    for begin, end in pairwise(borders):
        whole = _text(tokenizer, ids[:end])
        # A token alone may lose the space in front of it, so what it adds to all before it is shown.
        text = whole[len(before) :] if whole.startswith(before) else _text(tokenizer, ids[begin:end])
        pieces.append(Stretch(text, (end - begin) * int(trained[begin]), bool(special[begin])))
        before = whole
    return pieces


def _text(tokenizer: Any, ids: Sequence[int] | NDArray[np.int32]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
