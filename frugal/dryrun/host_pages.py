"""Host tensors of a rehearsal: address space, but no memory, even where a machine would have to refuse so much."""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named in Python 3.13; the number is Linux's
RESERVED_BYTES = 1 << 30
"""From this size on Linux is asked not to reserve memory: it refuses single requests beyond what the machine has."""


def untouched(size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor of this shape on the host. Nobody must read or write it."""
    with torch._C._DisableTorchDispatch():
        on_meta = torch.empty(tuple(size), dtype=dtype, device="meta")
        if stride is not None:
            on_meta = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")
        num_bytes = on_meta.untyped_storage().nbytes()
        if num_bytes < RESERVED_BYTES:
            return torch.empty_strided(on_meta.size(), on_meta.stride(), dtype=dtype, device="cpu")
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, on_meta.size(), on_meta.stride())
