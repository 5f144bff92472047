"""The attention kernel that a CUDA build of torch chooses: torch's own rule, for any card, without one.

A port of `select_sdp_backend` (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` and `sdp_utils_cpp.h`, torch
2.13, its wheel's cuDNN 9.20) for dense tensors and untouched settings (`torch.backends.cuda.enable_*_sdp`). Tests hold
it to torch's own answers on every card, see `bench.kernels.attention`.

The first kernel that can take a call gets it:

| kernel    | cards                         | takes                                                                  |
|-----------|-------------------------------|------------------------------------------------------------------------|
| cuDNN     | compute capability 9.x, 10.x  | half precision, head sizes in multiples of 8 up to 128, masks, groups   |
| flash     | from 8.0 on                   | half precision, equal head sizes up to 256, no mask, groups            |
| efficient | all                           | head sizes in multiples of 16 bytes (fp32 before 8.0: any), masks      |
| math      | all                           | anything                                                               |

Groups are fewer heads for keys than for queries, with `enable_gqa`. Without it any other number of heads is math.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from frugal.config.hardware.cluster import Capability

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


def chosen_kernel(call: AttentionCall, capability: Capability) -> Kernel:
    """Return the kernel that a card of this compute capability takes."""
    if capability[0] in (9, 10) and _can_use_cudnn(call, capability):
        return "cudnn"
    if _can_use_flash(call, capability):
        return "flash"
    return "efficient" if _can_use_efficient(call, capability) else "math"


def _can_use_cudnn(call: AttentionCall, capability: Capability) -> bool:
    return (
        _is_batched(call)
        and _has_dtype(call, _HALF)
        and _mask_broadcasts(call)
        and call.dropout_p * 16 == int(call.dropout_p * 16)  # its probabilities are sixteenths
        and _has_tokens(call)
        and _last_stride_is_one(call, but_not_of_one=True)
        and _heads_match(call, groups=True)
        and _cudnn_takes_sizes(call, capability)
    )


def _cudnn_takes_sizes(call: AttentionCall, capability: Capability) -> bool:
    """Return whether cuDNN takes the sizes (`check_cudnn_tensor_shapes`)."""
    batch, heads, length, size = call.query.shape
    value_size, key_length = call.value.shape[-1], call.key.shape[-2]
    most = 128
    if capability == (9, 0):
        most = 256
    elif capability[0] == 10 and (size, value_size) == (192, 128):
        most = 192
    if max(batch, heads) > 65535 or max(size, value_size) > most or size % 8 or value_size % 8:
        return False
    return key_length != 1 and not (call.dropout_p and length == 1)


def _can_use_flash(call: AttentionCall, capability: Capability) -> bool:
    size = call.query.shape[-1]
    return (
        (8, 0) <= capability <= (12, 1)
        and _is_batched(call)
        and call.attn_mask is None
        and size == call.key.shape[-1] == call.value.shape[-1] <= 256
        and _flash_has_backward(call, size, capability)
        and not (call.is_causal and call.query.shape[-2] != call.key.shape[-2])
        and _has_dtype(call, _HALF)
        and _heads_match(call, groups=True)
        and _has_tokens(call)
        and _last_stride_is_one(call, but_not_of_one=True)
    )


def _flash_has_backward(call: AttentionCall, size: int, capability: Capability) -> bool:
    """Return False where backward needs more shared memory for large heads than consumer cards have."""
    if not call.requires_grad or not ((8, 6) <= capability <= (8, 9) or capability >= (12, 0)):
        return True
    return size <= 192 or (not call.dropout_p and size > 224)


def _can_use_efficient(call: AttentionCall, capability: Capability) -> bool:
    size, value_size = call.query.shape[-1], call.value.shape[-1]
    alignment = _alignment(call, capability)
    dtypes = (torch.float16, torch.float32, torch.bfloat16) if capability >= (8, 0) else (torch.float16, torch.float32)
    return (
        (5, 0) <= capability <= (12, 1)
        and _is_batched(call)
        and size == call.key.shape[-1]
        and size > 0
        and value_size > 0
        and size % alignment == 0
        and value_size % alignment == 0
        and _has_tokens(call)
        and _is_aligned(call, alignment, capability)
        and _last_stride_is_one(call, but_not_of_one=False)
        and _heads_match(call, groups=False)
        and _has_dtype(call, dtypes)
    )


def _alignment(call: AttentionCall, capability: Capability) -> int:
    """Return the elements that heads are aligned to (`minimum_gemm_alignment`)."""
    if capability >= (8, 0):
        return 8 if call.is_half else 4
    return 8 if call.is_half and capability >= (7, 0) else 1


def _is_aligned(call: AttentionCall, alignment: int, capability: Capability) -> bool:
    """Return whether all views begin aligned (`check_data_ptr_alignment_mem_efficient`); storages always do."""
    tensors = (call.query, call.key, call.value)
    return capability < (8, 0) or all(t.storage_offset() % alignment == 0 or t.numel() == 0 for t in tensors)


def _is_batched(call: AttentionCall) -> bool:
    return call.query.dim() == call.key.dim() == call.value.dim() == 4


def _has_dtype(call: AttentionCall, dtypes: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in dtypes


def _has_tokens(call: AttentionCall) -> bool:
    return call.query.shape[-2] > 0 and call.key.shape[-2] > 0


def _last_stride_is_one(call: AttentionCall, *, but_not_of_one: bool) -> bool:
    """Return whether heads are contiguous. `but_not_of_one`: heads of one element may have any stride."""
    tensors = (call.query, call.key, call.value)
    ones = all(tensor.stride(-1) == 1 for tensor in tensors) or (but_not_of_one and call.query.shape[-1] == 1)
    return ones and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)


def _heads_match(call: AttentionCall, *, groups: bool) -> bool:
    """Return whether batch and heads match (`check_batch_size_and_num_heads_dense`). `groups`: the kernel knows
    groups."""
    if not call.query.shape[0] == call.key.shape[0] == call.value.shape[0]:
        return False
    heads, key_heads, value_heads = (tensor.shape[-3] for tensor in (call.query, call.key, call.value))
    if call.enable_gqa and groups:
        return key_heads == value_heads and heads % key_heads == 0
    return heads == key_heads == value_heads


def _mask_broadcasts(call: AttentionCall) -> bool:
    """Return whether cuDNN takes the mask (`check_attn_mask_shape`)."""
    mask = call.attn_mask
    if mask is None:
        return True
    if mask.requires_grad:
        return False
    batch, heads, length, _ = call.query.shape
    if mask.shape[-2] not in (1, length) or mask.shape[-1] not in (1, call.key.shape[-2]):
        return False
    return mask.dim() == 2 or (mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads))
