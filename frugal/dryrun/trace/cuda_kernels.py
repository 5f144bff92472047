"""The kernels that the target device chooses, for operators where meta tensors would choose others.

Attention, dropout and softmax keep different tensors for backward, depending on the kernel;
`frugal.dryrun.trace.kernel_memory` has the memory that it takes inside. On CUDA attention gets the first that can take
the call:

| kernel    | cards                         | takes                                                                  |
|-----------|-------------------------------|------------------------------------------------------------------------|
| cuDNN     | compute capability 9.x, 10.x  | half precision, head sizes in multiples of 8 up to 128, masks, groups   |
| flash     | from 8.0 on                   | half precision, equal head sizes up to 256, no mask, groups            |
| efficient | all                           | head sizes in multiples of 16 bytes (fp32 before 8.0: any), masks      |
| math      | all                           | anything                                                               |

Groups are fewer heads for keys than for queries, with `enable_gqa`. Without it any other number of heads is math.

On CPU the flash kernel takes everything without dropout whose head sizes are equal
(`use_flash_attention_cpp` in `sdp_utils_cpp.cpp`); heads of other sizes for values than for queries (multi-head latent
attention) take math. No kernel but math broadcasts heads: fewer of them for keys need `enable_gqa`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal import torch_internals
from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, Capability, DeviceKind
from frugal.models import packs
from frugal.models.losses import cross_entropy

aten = torch.ops.aten
_attention = F.scaled_dot_product_attention
_dropout = F.dropout


Kernel = Literal["cudnn", "flash", "efficient", "math"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one `F.scaled_dot_product_attention`, in its order and with its names."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def is_half(self) -> bool:
        """Return whether queries have 16 bits."""
        return self.query.dtype in _HALF

    @property
    def requires_grad(self) -> bool:
        """Return whether torch expects a backward; it does not look at the mask."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@contextmanager
def kernels_of(
    kind: DeviceKind, capability: Capability = ASSUMED_CAPABILITY, torch_version: tuple[int, int] | None = None
) -> Iterator[None]:
    """Run attention, dropout, softmax, norms and the tiled loss on meta with the kernels of a `kind` device inside the
    `with` block, and autocast of meta tensors as switched off.

    `capability`: of a `cuda` device, whose packs attend document by document, or with a mask. `torch_version`: None is
    the one that frugal is made for.
    """
    is_cuda = kind == "cuda"
    is_fused = torch_version is None or torch_version > _LAST_WITHOUT_FUSED_RMS_NORM
    attention = partial(cuda_attention, capability) if is_cuda else partial(cpu_attention)
    with (
        patch.object(F, "scaled_dot_product_attention", attention),
        patch.object(F, "dropout", fused_dropout if is_cuda else _dropout),
        torch_internals.with_kernels(torch_internals.COMPOSITE, _SOFTMAX if is_cuda else ()),
        torch_internals.with_kernels("Meta", (*_MISH * is_cuda, *_FUSED_RMS_NORM * (is_cuda and is_fused))),
        # torch's own takes no meta tensors; it keeps what BatchNorm keeps, and sums of a few bytes between ranks
        patch.object(nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward),
        patch.object(packs, "capability_of", lambda _device: capability if is_cuda else None),
        patch.object(cross_entropy, "meta_stands_for", kind),
        # torch refuses autocast on meta; frugal trains without it, and DeepSpeed and peft only turn it off.
        patch.object(torch, "autocast", partial(_on_meta, torch.autocast, nullcontext())),
        patch.object(torch, "is_autocast_enabled", partial(_on_meta, torch.is_autocast_enabled, False)),
        patch.object(torch, "get_autocast_dtype", partial(_on_meta, torch.get_autocast_dtype, torch.bfloat16)),
    ):
        yield


def _on_meta(usual: Callable[..., Any], answer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `answer` where a function is asked about meta."""
    return answer if "meta" in (*args[:1], *kwargs.values()) else usual(*args, **kwargs)


def chosen_kernel(call: AttentionCall, capability: Capability) -> Kernel:
    """Return the kernel that a card of this compute capability takes.

    A port of `select_sdp_backend` (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` and `sdp_utils_cpp.h`, torch
    2.13, its wheel's cuDNN 9.20) for dense tensors and untouched settings (`torch.backends.cuda.enable_*_sdp`). Tests
    hold it to torch's own answers on every card, see `bench.kernels.attention`.
    """
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if not (
        query.dim() == key.dim() == value.dim() == 4
        and query.dtype == key.dtype == value.dtype
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[-2] > 0
        and key.shape[-2] > 0
        and (mask is None or mask.stride(-1) == 1)
    ):
        return "math"
    heads, key_heads, value_heads = (tensor.shape[-3] for tensor in (query, key, value))
    has_equal_heads = heads == key_heads == value_heads
    has_groups = key_heads == value_heads and heads % key_heads == 0 if call.enable_gqa else has_equal_heads
    is_contiguous = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    if call.is_half and has_groups and (is_contiguous or query.shape[-1] == 1):
        if capability[0] in (9, 10) and _cudnn_takes(call, capability):
            return "cudnn"
        if _flash_takes(call, capability):
            return "flash"
    return "efficient" if has_equal_heads and is_contiguous and _efficient_takes(call, capability) else "math"


def _cudnn_takes(call: AttentionCall, capability: Capability) -> bool:
    """Return whether cuDNN takes sizes and mask (`check_cudnn_tensor_shapes`, `check_attn_mask_shape`)."""
    batch, heads, length, size = call.query.shape
    value_size, key_length, mask = call.value.shape[-1], call.key.shape[-2], call.attn_mask
    most = 256 if capability == (9, 0) else 128
    if capability[0] == 10 and (size, value_size) == (192, 128):
        most = 192
    if max(batch, heads) > 65535 or max(size, value_size) > most or size % 8 or value_size % 8:
        return False
    if key_length == 1 or (call.dropout_p and length == 1) or call.dropout_p * 16 % 1:  # probabilities are sixteenths
        return False
    if mask is None:
        return True
    if mask.requires_grad or mask.shape[-2] not in (1, length) or mask.shape[-1] not in (1, key_length):
        return False
    return mask.dim() == 2 or (mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads))


def _flash_takes(call: AttentionCall, capability: Capability) -> bool:
    size = call.query.shape[-1]
    # Backward needs more shared memory for large heads than consumer cards have.
    is_small = call.requires_grad and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0))
    return (
        (8, 0) <= capability <= (12, 1)
        and call.attn_mask is None
        and size == call.key.shape[-1] == call.value.shape[-1] <= 256
        and (not is_small or size <= 192 or (not call.dropout_p and size > 224))
        and not (call.is_causal and call.query.shape[-2] != call.key.shape[-2])
    )


def _efficient_takes(call: AttentionCall, capability: Capability) -> bool:
    """Return whether heads are aligned (`minimum_gemm_alignment`), and views, too: storages always are
    (`check_data_ptr_alignment_mem_efficient`)."""
    size, value_size = call.query.shape[-1], call.value.shape[-1]
    is_modern = capability >= (8, 0)
    alignment = 4 if is_modern else 1
    if call.is_half and capability >= (7, 0):
        alignment = 8
    tensors = (call.query, call.key, call.value)
    return (
        (5, 0) <= capability <= (12, 1)
        and call.query.dtype in (torch.float16, torch.float32, *((torch.bfloat16,) if is_modern else ()))
        and size == call.key.shape[-1]
        and size > 0
        and value_size > 0
        and size % alignment == 0
        and value_size % alignment == 0
        and (not is_modern or all(t.storage_offset() % alignment == 0 or t.numel() == 0 for t in tensors))
    )


def cuda_attention(capability: Capability, *args: Any, **kwargs: Any) -> Tensor:
    """Run `F.scaled_dot_product_attention` with the kernel that a card of this compute capability chooses."""
    call = AttentionCall(*args, **kwargs)
    kernel = chosen_kernel(call, capability)
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
        if any(stride % 8 for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:  # rows would begin unaligned
            mask = F.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(query, key, value, mask, *how, scale=call.scale)[0]


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


def softmax(kernel: Callable[..., Tensor], values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Run softmax or its logarithm as CUDA does (`SoftMax.cpp`): one kernel reads fp16 and writes fp32. All other types
    are copied first, as on a CPU."""
    if values.is_meta and values.dtype == torch.float16 and dtype == torch.float32:
        return kernel(values, dim, True)
    return kernel(values if dtype is None else values.to(dtype), dim, False)


def fused_rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Return what CUDA's `_fused_rms_norm` makes: the output, and a statistic of each row, at least fp32."""
    rows = (*input.shape[: input.dim() - len(normalized_shape)], *(1 for _ in normalized_shape))
    statistic = input.new_empty(rows, dtype=torch.promote_types(input.dtype, torch.float32))
    return torch.empty_like(input, memory_format=torch.contiguous_format), statistic


# These have a kernel on CUDA, and are made of others on meta: all of torch 2.13 but `silu_backward`.
_MISH = (("mish_backward", lambda _gradient, input: torch.empty_like(input)),)
_FUSED_RMS_NORM = (("_fused_rms_norm", fused_rms_norm),)
_LAST_WITHOUT_FUSED_RMS_NORM = (2, 8)  # pytorch#153666 came after it

_SOFTMAX = (
    ("softmax.int", partial(softmax, aten._softmax.default)),
    ("log_softmax.int", partial(softmax, aten._log_softmax.default)),
)
