"""Stand-ins for operators that meta tensors reject because their results depend on data, and what they assume.

Meta tensors have no values, so nobody can tell how many elements of a mask are set. Where a size depends on it, the
largest one is taken, which makes the rehearsal an upper bound, and it says so in a note:

| asked for                                | assumed                                                           |
|------------------------------------------|-------------------------------------------------------------------|
| `nonzero`, boolean indexing              | every element is set                                              |
| `unique`                                 | all values differ                                                 |
| `unique_consecutive`                     | all values are equal: transformers counts end tokens so           |
| `bincount`                               | as many bins as asked for (`minlength`)                           |
| an integer (`.item()`)                   | the longest dimension of a batch; 1 if the model rejects that     |
| `if` on a tensor, outside of transformers| yes                                                               |

The last three are no upper bounds for every model; the note says what was taken.

The grouped matrix product of experts needs no assumption: its results do not depend on the routing. torch has a
kernel for it on meta in bf16 only, and does not count its FLOPs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

aten = torch.ops.aten

Result = tuple[Any, str]  # what the operator returns, and what that assumes

EVERYTHING = "what a mask selects depends on data: counted as if it selected everything"
ALL_DIFFERENT = "how many different values there are depends on data: counted as if all were different"
ALL_EQUAL = "how many runs of equal values there are depends on data: counted as if all values were equal"
AS_MANY_BINS = "how many bins there are depends on data: counted as many as asked for (minlength)"


def stand_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result | None:
    """The result of an operator that meta tensors reject; None if they take it."""
    made = _STAND_INS.get(func)
    return None if made is None else made(*args, **kwargs)


def exact(func: Any) -> Callable[..., Any]:
    """What to call for an operator on meta tensors: itself, or what returns the same."""
    return _EXACT.get(func, func)


def _nonzero(mask: Tensor) -> Result:
    return torch.empty((mask.numel(), mask.dim()), dtype=torch.int64, device=mask.device), EVERYTHING


def _masked_select(values: Tensor, mask: Tensor) -> Result:
    shape = torch.broadcast_shapes(values.shape, mask.shape)
    return values.new_empty(shape.numel()), EVERYTHING


def _index(values: Tensor, indices: list[Tensor | None]) -> Result | None:
    """Boolean indices as the integer ones that they stand for, one for each of their dimensions."""
    if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return None
    integers: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            integers.append(index)
        else:
            integers += [torch.empty(index.numel(), dtype=torch.int64, device=index.device)] * index.dim()
    return aten.index.Tensor(values, integers), EVERYTHING


def _unique(values: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Result:
    inverse, counts = (torch.empty(n, dtype=torch.int64, device=values.device) for n in (values.shape, values.numel()))
    return (values.new_empty(values.numel()), inverse, counts), ALL_DIFFERENT


def _unique_of_dimension(values: Tensor, dim: int, *_: Any, **__: Any) -> Result:
    inverse, counts = (torch.empty(values.shape[dim], dtype=torch.int64, device=values.device) for _ in range(2))
    return (torch.empty_like(values), inverse, counts), ALL_DIFFERENT


def _unique_consecutive(
    values: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Result:
    shape = [1] if dim is None else [1 if i == dim % values.dim() else size for i, size in enumerate(values.shape)]
    inverse = values.shape if dim is None else values.shape[dim]
    made = (torch.empty(n, dtype=torch.int64, device=values.device) for n in (inverse, 1))
    return (values.new_empty(shape), *made), ALL_EQUAL


def _bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Result | None:
    if minlength < 1:
        return None
    dtype = torch.int64 if weights is None else torch.float64
    return torch.empty(minlength, dtype=dtype, device=values.device), AS_MANY_BINS


_STAND_INS: dict[Any, Callable[..., Result | None]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique_of_dimension,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.bincount.default: _bincount,
}


def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`aten._grouped_mm` in any type: the shapes of `_create_grouped_mm_output_tensor` (GroupedMMUtils.h)."""
    shape = _grouped_shape(left.shape, right.shape, None if offs is None else offs.shape)
    return torch.empty(shape, dtype=out_dtype or left.dtype, device=left.device)


def _grouped_shape(left: Any, right: Any, groups: Any) -> list[int]:
    if len(left) == 2:
        return [groups[0], left[0], right[1]] if len(right) == 2 else [left[0], right[-1]]
    return [left[1], right[1]] if len(right) == 2 else [left[0], left[1], right[-1]]


_EXACT: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: _grouped_mm}

if aten._grouped_mm not in flop_registry:

    @register_flop_formula(aten._grouped_mm)
    def _grouped_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
        """Each row meets the matrix of one group, each column of a gradient the rows of one."""
        if len(left) == 2:
            return 2 * int(left[0] * left[1] * right[-1])
        return 2 * int(left[0] * left[1] * left[2] * right[-1] // (left[0] if len(right) == 2 else 1))
