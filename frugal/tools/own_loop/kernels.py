"""Memory in the CUDA allocator's blocks for operators of users' loops, beyond their results.

cuBLAS's workspaces are those of `frugal.planning.memory.workspaces`. A loop may multiply before its first forward and
run backward where it likes, so they are recorded when the first product of a thread runs.
"""

from typing import Any

import torch

aten = torch.ops.aten

PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default,
    aten.addbmm.default, aten._addmm_activation.default,
}  # fmt: skip
CHUNK_ELEMENTS = 65536  # of a tensor, that one block of threads takes in `multi_tensor_apply` (MultiTensorApply.cuh)


def kernel_workspace(operator: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that a CUDA kernel takes and returns inside one call.

    Those of `_foreach_norm` are partial sums: for each tensor as many as the largest has chunks (ForeachReduceOp.cu).
    """
    if operator is not aten._foreach_norm.Scalar:
        return 0
    chunks = max(-(-tensor.numel() // CHUNK_ELEMENTS) for tensor in args[0])
    return 4 * chunks * len(args[0])
