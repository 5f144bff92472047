"""Packed documents in a model: where each begins, and attention that stays within them.

A document begins where the position ids start at 0; transformers makes the attention mask of that (`position_ids`
without `attention_mask`, https://huggingface.co/docs/transformers/main_classes/data_collator, as of 5.23). transformers
looks at the values first and leaves the mask out where nothing is packed. Here it never looks: memory is the same for
every batch, a dry run without values foresees it, and no forward waits for the device.

On CUDA devices of compute capability 8.0 or newer, in half precision, attention runs document by document instead
(`torch.nn.attention.varlen`, flash attention): no mask, nothing computed between documents, keys not repeated for
groups. A model then gets a `LazyMask`, which becomes the mask where something else than that attention reads it:
dropout, head sizes that flash attention does not take, modules with an attention of their own. Whether the mask is
causal, with or without a window, is observed, not taken from a configuration.

The memory of that attention grows with the number of documents. A batch therefore names as many as a batch of its shape
may have, those after the last empty (`by_document`); one with more takes the mask. How many that are, the plan takes
from the data where it knows it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from frugal import torch_internals
from frugal.config.hardware.cluster import Capability
from frugal.models import transformers_internals

OFFSETS, LONGEST = "document_offsets", "longest_document"
"""Names in a batch: where documents begin, `(documents + 1)`, int32, rows one behind the other; and an empty tensor
`(tokens of the longest document, 0)`, a number that needs no copy from the device."""


def documents_kept_apart(offsets: Tensor | None = None, longest: Tensor | None = None) -> AbstractContextManager[Any]:
    """Have models called inside keep attention within documents, whose positions start at 0.

    `offsets`, `longest`: of the batch, from `by_document`; None: attention takes a mask.
    """
    if offsets is None or longest is None:
        return transformers_internals.packed_documents(numbers_of_documents)
    transformers_internals.attention_by("sdpa", _attention)
    lazy = partial(_lazy_mask, offsets, len(longest))
    return transformers_internals.packed_documents(numbers_of_documents, lazy)


def by_document(documents: Sequence[Sequence[int]], length: int, document_tokens: int) -> dict[str, Tensor]:
    """Return `OFFSETS` and `LONGEST` of rows of `length` tokens, given the tokens of each row's documents.

    The rest of a row, padding, counts as one document. Nothing where documents have fewer than `document_tokens` on
    average, which is more documents than a batch of this shape may have.
    """
    rows = [[*of_row, length - sum(of_row)] if sum(of_row) < length else of_row for of_row in documents]
    lengths = [tokens for of_row in rows for tokens in of_row]
    most = len(rows) * (length // document_tokens + 1)
    if len(lengths) > most:
        return {}
    ends = np.full(most + 1, len(rows) * length, dtype=np.int32)
    ends[: len(lengths) + 1] = np.cumsum([0, *lengths])
    return {OFFSETS: torch.from_numpy(ends), LONGEST: torch.empty(max(lengths), 0)}


def numbers_of_documents(position_ids: Tensor) -> Tensor:
    """Return the document of each token, counted from 0 in each row; both of shape `(samples, positions)`."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def starts(documents: Sequence[int]) -> NDArray[np.int64]:
    """Return where documents begin that follow each other, given the tokens of each."""
    return np.cumsum([0, *documents[:-1]], dtype=np.int64)


def positions(documents: Sequence[int]) -> NDArray[np.int64]:
    """Return the position of each token in its document, given the tokens of documents that follow each other."""
    return np.arange(np.sum(documents)) - np.repeat(starts(documents), documents)


class LazyMask(torch_internals.LazyTensor):
    """An attention mask of packs that is made when something reads its values.

    `offsets`, as in `OFFSETS`, and `longest`: of the batch, whose rows stand one behind the other. `window`: the tokens
    that each token sees of its document, itself included; None: all before it.
    """

    offsets: Tensor
    longest: int
    window: int | None


def capability_of(device: torch.device) -> Capability | None:
    """Return a CUDA device's compute capability, None: another kind. A dry run answers for the planned device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether flash attention takes `(samples, heads, positions, size)` document by document."""
    capability, size = capability_of(query.device), query.shape[-1]
    return (
        capability is not None
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[2] == key.shape[2]
        and size == key.shape[-1] == value.shape[-1]
        and size % 8 == 0
        and size <= takes_heads(capability)
        and query.shape[1] % key.shape[1] == 0
    )


def takes_heads(capability: Capability) -> int:
    """Return the largest head size that flash attention takes in training; 0: none. As `sdp_utils.cpp`, torch 2.13."""
    if not (8, 0) <= capability <= (12, 1):
        return 0
    return 192 if (8, 6) <= capability <= (8, 9) or capability >= (12, 0) else 256


def _lazy_mask(
    offsets: Tensor, longest: int, make: Callable[[], Tensor], within: Callable[..., Tensor], options: dict[str, Any]
) -> Tensor:
    """Return the mask of a forward, made later where attention can run document by document.

    `make` makes it; `within` says who sees whom in a document, `options` what transformers makes a mask of.
    """
    capability, length, window = capability_of(options["device"]), options["q_length"], options.get("local_size")
    can_be_lazy = capability is not None and takes_heads(capability) and options["dtype"] != torch.float32
    if not can_be_lazy or length != options["kv_length"] or not _is_causal(within, window, length):
        return make()
    mask = LazyMask(make, (options["batch_size"], 1, length, length), torch.bool, options["device"])
    mask.offsets, mask.longest, mask.window = offsets, longest, window
    return mask


def _is_causal(within: Callable[..., Tensor], window: int | None, length: int) -> bool:
    """Return whether tokens of a document see themselves and those before them, at most `window` in all.

    Observed for all pairs of some positions, those beside the window's ends among them.
    """
    edges = [] if window is None else [times * window + by for times in (1, 2) for by in (-1, 0, 1)]
    places = sorted({0, 1, 2, 3, 7, 8, 63, 64, length // 2, length - 1, *edges})
    with torch_internals.without_modes(), torch.no_grad():
        index = torch.tensor(places, device="cpu")
        reader, read, first = index[:, None], index[None], torch.zeros((), dtype=torch.int64, device="cpu")
        expected = read <= reader
        if window is not None:
            expected &= read > reader - window
        try:
            return torch.equal(within(first, first, reader, read).expand_as(expected), expected)
        except Exception:  # it reads tensors of the device, which tell images or prefixes apart
            return False


def _attention(
    plain: Callable[..., tuple[Tensor, Any]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Run attention document by document where it can, and otherwise `plain`, transformers' own, with the mask.

    Returns `(samples, positions, heads, size)`, and no weights.
    """
    if not isinstance(attention_mask, LazyMask):
        return plain(module, query, key, value, attention_mask, dropout=dropout, **options)
    changes_scores = any(options.get(name) is not None for name in ("position_bias", "softcap", "s_aux", "cache"))
    if dropout or changes_scores or not _takes(query, key, value):
        return plain(module, query, key, value, attention_mask.dense(), dropout=dropout, **options)
    rows = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    attended = attend(rows[0], rows[1], rows[2], attention_mask, options.get("scaling"))
    return attended.unflatten(0, (len(query), -1)), None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: LazyMask, scale: float | None) -> Tensor:
    """Run flash attention document by document: `(tokens, heads, size)` each, and so the result."""
    from torch.nn.attention.varlen import varlen_attn  # registers operators, which takes a second

    window = (-1 if mask.window is None else mask.window - 1, 0)
    ends, has_groups = (mask.offsets, mask.offsets, mask.longest, mask.longest), query.shape[1] != key.shape[1]
    attended = varlen_attn(query, key, value, *ends, scale=scale, window_size=window, enable_gqa=has_groups)
    assert isinstance(attended, Tensor)
    return attended
