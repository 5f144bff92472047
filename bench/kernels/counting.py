"""Counts of the kernels that part of a program launches on an emulated card, and of the bytes that they move."""

import ctypes
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from frugal import torch_internals
from frugal.memory_watch import traffic

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten._grouped_mm}
ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention")

PASSES = {
    "liger_cross_entropy_kernel": {"X_ptr": 3},
    "_triton_rope": {"q_ptr": 2, "k_ptr": 2},
    "_swiglu_backward_kernel": {"a_ptr": 2, "b_ptr": 2},
    "_geglu_tanh_backward_kernel": {"a": 2, "b": 2},
    "element_mul_kernel": {"X_ptr": 2},
    "_backward_kernel": {"mm_ptr": 2},
}
"""Passes over an argument of Liger's and TRL's kernels that is read and written, or read twice; of others it is one."""

EXPERT_PRODUCTS = {
    "_fused_up_proj_swiglu_kernel", "_fused_down_proj_kernel", "_moe_bwd_down_proj_kernel", "_moe_bwd_dW2_kernel",
    "_moe_bwd_dX_expanded_kernel", "_moe_bwd_dW1_kernel",
}  # fmt: skip
"""Liger's kernels that multiply matrices of experts."""


def launches() -> Counter[str]:
    """Kernels that this process has launched since the last call, by name; needs EMULATED_GPU_KERNELS."""
    return launches_and_waits()[0]


def launches_and_waits() -> tuple[Counter[str], Counter[str]]:
    """Also how often the host has waited for the card, by the function of CUDA's that did."""
    driver = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "lib" / "libcuda.so.1"
    with tempfile.NamedTemporaryFile() as file:
        ctypes.CDLL(str(driver)).emulated_gpu_kernels(file.name.encode())
        lines = [line.partition(" ") for line in Path(file.name).read_text().splitlines()]
    found = Counter({name: int(count) for count, _, name in lines})
    waits = Counter({name: count for name, count in found.items() if name.startswith("wait:")})
    return found - waits, waits


class Moved(torch_internals.DispatchMode):
    """The bytes that operators read and write: those of products, of attention, of Triton's kernels, and all others."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()

    @property
    def beside_products(self) -> int:
        """Bytes of all but products and attention."""
        return self.by_kind["others"] + self.by_kind["compiled"]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operator and count it; the operator that launches Liger's kernel is counted by the launch."""
        out = func(*args, **(kwargs or {}))
        if "frugal" not in str(func):
            is_attention = any(word in str(func) for word in ATTENTION)
            is_product = getattr(func, "overloadpacket", func) in PRODUCTS
            kind = "products" if is_product else "attention" if is_attention else "others"
            self.by_kind[kind] += traffic(func, args, kwargs or {}, out)
        return out


@contextmanager
def moved() -> Iterator[Moved]:
    """Count what is moved inside the `with` block, in launches of Triton's kernels, too."""
    counted = Moved()
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        with counted:
            yield counted
        return
    launch = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes = PASSES.get(self.fn.__name__, {})
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        kind = "products" if self.fn.__name__ in EXPERT_PRODUCTS else "compiled"
        counted.by_kind[kind] += sum(value.nbytes * passes.get(name, 1) for name, value in tensors.items())
        return launch(self, *args, **kwargs)

    with patch.object(JITFunction, "run", run), counted:
        yield counted
