"""The kernels that the target device would choose where meta tensors would choose others.

Attention and dropout keep different tensors for backward, depending on the kernel. The choice for CUDA follows
`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` for compute capability 8.0 and above:

| q, k, v                                          | mask | kernel    |
|--------------------------------------------------|------|-----------|
| half precision, equal head sizes up to 256       | no   | flash     |
| head size a multiple of 8 (fp32: of 4), no GQA   | any  | efficient |
| anything else                                    | any  | math      |

cuDNN's kernel, first choice on some newer GPUs, keeps the same tensors as flash. On CPU the flash kernel takes
everything without dropout whose head sizes are equal (`use_flash_attention_cpp` in `sdp_utils_cpp.cpp`); heads of other
sizes for values than for queries (multi-head latent attention) take math. No kernel but math broadcasts heads: fewer
of them for keys need `enable_gqa`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from frugal.config.cluster import DeviceKind

aten = torch.ops.aten
_attention = F.scaled_dot_product_attention
_dropout = F.dropout


@contextmanager
def kernels_of(kind: DeviceKind) -> Iterator[None]:
    """Attention and dropout on meta tensors take the kernels of a `kind` device inside the `with` block."""
    attention = cuda_attention if kind == "cuda" else cpu_attention
    with patch.object(F, "scaled_dot_product_attention", attention):
        if kind == "cuda":
            with patch.object(F, "dropout", fused_dropout):
                yield
        else:
            yield


def chosen_for_cuda(query: Tensor, value: Tensor, mask: Tensor | None, grouped: bool) -> str:
    """`flash`, `efficient` or `math`; see the table above. `grouped`: fewer key heads than query heads."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if mask is None and half and query.shape[-1] == value.shape[-1] <= 256:
        return "flash"
    if not grouped and (half or query.dtype == torch.float32) and query.shape[-1] % (8 if half else 4) == 0:
        return "efficient"
    return "math"


def cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` with the kernel that CUDA would choose."""
    kernel = chosen_for_cuda(query, value, attn_mask, enable_gqa and query.shape[-3] != key.shape[-3])
    if _broadcasts_heads(query, key, enable_gqa):
        kernel = "math"
    if kernel == "flash":
        size = query.shape[-1]
        query, key, value = (F.pad(t, (0, -size % 8)) if size % 8 else t for t in (query, key, value))
        factor = 1 / math.sqrt(size) if scale is None else scale
        flash = aten._scaled_dot_product_flash_attention
        out = flash(query, key, value, dropout_p, is_causal, False, scale=factor)[0]
        return out[..., :size] if size % 8 else out
    if kernel == "efficient":
        keep_sums = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        bias = None if attn_mask is None else _efficient_bias(attn_mask, query, key)
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, keep_sums, dropout_p, is_causal, scale=scale)[0]
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _efficient_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """`mask` as the efficient kernel takes it: additive, its rows padded to 16 elements, one for every head."""
    if mask.dtype == torch.bool:
        additive = torch.zeros_like(mask, dtype=query.dtype)
        additive.masked_fill_(mask.logical_not(), float("-inf"))
        mask = additive
    if mask.shape[-1] % 16:
        mask = F.pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


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
    """`F.scaled_dot_product_attention` with the kernel that a CPU would choose."""
    needs_math = query.shape[-1] != value.shape[-1] or _broadcasts_heads(query, key, enable_gqa)
    if dropout_p or needs_math or (attn_mask is not None and attn_mask.requires_grad):
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        open_, shut = (torch.scalar_tensor(x, dtype=query.dtype, device=query.device) for x in (0.0, -math.inf))
        attn_mask = torch.where(attn_mask, open_, shut)
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _broadcasts_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> bool:
    return not enable_gqa and query.shape[:-2] != key.shape[:-2]


def fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout` with CUDA's fused kernel, which keeps a mask of one byte an element."""
    if not training or inplace or p in (0, 1) or input.numel() == 0:
        return _dropout(input, p, training, inplace)
    return aten.native_dropout(input, p, True)[0]


def _flash_backward_workspace(query: Tensor, key: Tensor) -> int:
    """Bytes that flash attention's backward takes inside the kernel (flash_api.cpp, `mha_bwd`).

    fp32 row sums and an fp32 gradient of q, rows rounded up to 128; with GQA k's and v's gradients for every head.
    """
    batch, heads, rows, size = query.shape
    rows = -(-rows // 128) * 128
    rounding = 32 if size <= 128 else 64
    workspace = 4 * batch * heads * rows + 4 * batch * rows * heads * (-(-size // rounding) * rounding)
    if heads != key.shape[1]:
        workspace += 2 * batch * key.shape[2] * heads * size * query.element_size()
    return workspace


def _embedding_backward_workspace(gradient: Tensor, indices: Tensor) -> int:
    """Bytes to sort the indices, from 3073 of them on: an upper bound (EmbeddingBackwardKernel.cu)."""
    tokens = indices.numel()
    return 0 if tokens <= 3072 else 32 * tokens + 4 * gradient.shape[-1] * (tokens // 10 + 1)


_WORKSPACES: dict[object, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: lambda args: _flash_backward_workspace(*args[1:3]),
    aten.embedding_dense_backward.default: lambda args: _embedding_backward_workspace(*args[:2]),
}


def cuda_workspace(operator: object, args: tuple[object, ...]) -> int:
    """Bytes that a CUDA kernel takes and returns inside one call, where that is much."""
    workspace = _WORKSPACES.get(operator)
    return 0 if workspace is None else workspace(args)
