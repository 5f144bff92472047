"""Packed documents in a model: where each begins, and attention that stays within them.

A document begins where the position ids start at 0; transformers makes the attention mask of that (`position_ids`
without `attention_mask`, https://huggingface.co/docs/transformers/main_classes/data_collator, as of 5.23). transformers
looks at the values first and leaves the mask out where nothing is packed. Here it never looks: memory is the same for
every batch, a dry run without values foresees it, and no forward waits for the device.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frugal.models import transformers_internals


def documents_kept_apart() -> AbstractContextManager[Any]:
    """Have models called inside keep attention within documents, whose positions start at 0."""
    return transformers_internals.packed_documents(numbers_of_documents)


def numbers_of_documents(position_ids: Tensor) -> Tensor:
    """Return the document of each token, counted from 0 in each row; both of shape `(samples, positions)`."""
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1)


def starts(documents: Sequence[int]) -> NDArray[np.int64]:
    """Return where documents begin that follow each other, given the tokens of each."""
    return np.cumsum([0, *documents[:-1]], dtype=np.int64)


def positions(documents: Sequence[int]) -> NDArray[np.int64]:
    """Return the position of each token in its document, given the tokens of documents that follow each other."""
    return np.arange(np.sum(documents)) - np.repeat(starts(documents), documents)
