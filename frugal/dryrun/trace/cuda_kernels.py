"""The kernels that the target device chooses, for operators where meta tensors would choose others.

Attention and dropout keep different tensors for backward, depending on the kernel.
`frugal.dryrun.trace.attention_choice` finds the one that CUDA chooses, `frugal.dryrun.trace.kernel_memory` the memory
that it takes inside. On CPU the flash kernel takes everything without dropout whose head sizes are equal
(`use_flash_attention_cpp` in `sdp_utils_cpp.cpp`); heads of other sizes for values than for queries (multi-head latent
attention) take math. No kernel but math broadcasts heads: fewer of them for keys need `enable_gqa`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, Capability, DeviceKind
from frugal.dryrun.trace import kernel_memory
from frugal.dryrun.trace.attention_choice import AttentionCall, Kernel, chosen_kernel
from frugal.models import packs
from frugal.models.losses import cross_entropy

aten = torch.ops.aten
_attention = F.scaled_dot_product_attention
_dropout = F.dropout


@contextmanager
def kernels_of(
    kind: DeviceKind, capability: Capability = ASSUMED_CAPABILITY, alike: set[Capability] | None = None
) -> Iterator[None]:
    """Run attention, dropout and the tiled loss on meta with the kernels of a `kind` device inside the `with` block.

    `capability`: of a `cuda` device. Classes that would use other kernels, or other memory, are removed from
    `alike`.
    """
    alike = set() if alike is None else alike
    attention, dropout = partial(cuda_attention, capability, alike), fused_dropout
    if kind == "cpu":
        attention, dropout = partial(cpu_attention), _dropout

    def planned(_device: torch.device) -> Capability | None:
        """Return the planned card's: packs attend document by document, or with a mask."""
        alike.intersection_update({each for each in alike if packs.takes_heads(each) == packs.takes_heads(capability)})
        return capability if kind == "cuda" else None

    with (
        patch.object(F, "scaled_dot_product_attention", attention),
        patch.object(F, "dropout", dropout),
        patch.object(packs, "capability_of", planned),
        patch.object(cross_entropy, "meta_stands_for", kind),
    ):
        yield


def cuda_attention(capability: Capability, alike: set[Capability], *args: Any, **kwargs: Any) -> Tensor:
    """Run `F.scaled_dot_product_attention` with the kernel that a card of this compute capability chooses.

    `alike`: see `kernels_of`.
    """
    call = AttentionCall(*args, **kwargs)
    kernel = chosen_kernel(call, capability)
    alike -= {each for each in alike if not _is_alike(call, kernel, capability, each)}
    if kernel == "flash":
        return _flash_attention(call)
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if mask is not None:
        mask = _additive(mask, query.dtype)
    if kernel == "math":
        return _math_attention(call, mask)[0]
    how = call.requires_grad, call.dropout_p, call.is_causal
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(query, key, value, mask, *how, False, scale=call.scale)[0]
    if mask is not None:
        mask = _efficient_bias(mask, query, key)
    return aten._scaled_dot_product_efficient_attention(query, key, value, mask, *how, scale=call.scale)[0]


def _is_alike(call: AttentionCall, kernel: Kernel, capability: Capability, other: Capability) -> bool:
    """Return whether a card of the `other` capability uses the same kernel and memory."""
    if chosen_kernel(call, other) != kernel:
        return False
    tiles = (kernel_memory.tile(call.query, call.value, call.dropout_p, each) for each in (capability, other))
    return kernel != "efficient" or len(set(tiles)) == 1


def _flash_attention(call: AttentionCall) -> Tensor:
    """Run flash attention, with heads padded to a multiple of 8."""
    size = call.query.shape[-1]
    query, key, value = (F.pad(t, (0, -size % 8)) if size % 8 else t for t in (call.query, call.key, call.value))
    factor = 1 / math.sqrt(size) if call.scale is None else call.scale
    flash = aten._scaled_dot_product_flash_attention
    out = flash(query, key, value, call.dropout_p, call.is_causal, False, scale=factor)[0]
    return out[..., :size] if size % 8 else out


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in the form that all kernels take: numbers added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    closed, opened = (torch.scalar_tensor(x, dtype=dtype, device=mask.device) for x in (-math.inf, 0.0))
    return torch.where(mask, opened, closed)


def _efficient_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask for the efficient kernel: rows are padded to 8 elements where they begin unaligned."""
    if any(stride % 8 for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
        mask = F.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _math_attention(call: AttentionCall, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run `_scaled_dot_product_attention_math` (`transformers/attention.cpp`), its sum in place as in a run without
    modes.

    Half precision is computed in fp32. The second output, the probabilities in the query's type, is never used.
    Tensors are freed in the same order as there.
    """
    dtype = call.query.dtype
    query_, key_, value_ = call.query, call.key, call.value
    if call.is_half:
        query_, key_, value_ = query_.float(), key_.float(), value_.float()
    scale = call.scale
    factor = math.sqrt(abs(scale if scale is not None else 1 / math.sqrt(query_.shape[-1])))
    query = query_ * (-factor if scale is not None and scale < 0 else factor)
    if call.is_causal:
        mask = _lower_triangle(query, key_)
    key, value = key_, value_
    if call.enable_gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    probabilities = aten._safe_softmax(scores, -1)
    del scores
    if call.dropout_p:
        probabilities = fused_dropout(probabilities, call.dropout_p)
    in_type = probabilities.to(dtype)
    out = torch.matmul(probabilities, value).to(dtype)
    del probabilities, key, value, query, mask, value_, key_, query_
    return out, in_type


def _lower_triangle(query: Tensor, key: Tensor) -> Tensor:
    ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
    lower = ones.tril()
    del ones
    return _additive(lower, query.dtype)


def cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `F.scaled_dot_product_attention` with the kernel that a CPU chooses."""
    broadcasts_heads = not enable_gqa and query.shape[:-2] != key.shape[:-2]
    needs_math = query.shape[-1] != value.shape[-1] or broadcasts_heads
    if dropout_p or needs_math or (attn_mask is not None and attn_mask.requires_grad):
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        open_, shut = (torch.scalar_tensor(x, dtype=query.dtype, device=query.device) for x in (0.0, -math.inf))
        attn_mask = torch.where(attn_mask, open_, shut)
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run `F.dropout` with CUDA's fused kernel, which keeps a mask of one byte an element."""
    if not training or inplace or p in (0, 1) or input.numel() == 0:
        return _dropout(input, p, training, inplace)
    return aten.native_dropout(input, p, True)[0]
