"""Operators that write into a tensor run once for each shape in a dry run, and leave it as torch does, each time."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from frugal.dryrun.trace import operators
from frugal.dryrun.trace.recorder import Tracker
from frugal.planning.memory.timeline import FORWARD

empty = partial(torch.empty, device="meta")

WRITERS: tuple[Callable[[Tensor, Tensor, Tensor], Any], ...] = (
    lambda into, other, _: into.add_(other, alpha=2),
    lambda into, other, _: into.copy_(other),
    lambda into, other, _: into.masked_fill_(other > 0, 1.0),
    lambda into, _other, _: into.uniform_(),
    lambda into, _other, _: into.clamp_(0, 1).zero_().fill_(3),
    lambda into, other, _: torch.mul(other, 2, out=into),
    lambda into, other, _: torch.cat([other, other], out=into),  # twice as large
    lambda into, other, _: torch.mul(other, other, out=into),
    lambda _into, other, none: torch.exp(other, out=none),  # resized
    lambda into, _other, _: into.t_(),  # writes no values
    lambda into, _other, _: into.unsqueeze_(0),
    lambda into, _other, _: into.resize_(2, 3),
    lambda into, other, _: into.set_(other),
    lambda into, _other, _: into.swapaxes_(0, 1).add_(1),
)


def written(seed: int) -> list[tuple[Any, ...]]:
    """Run one of `WRITERS` on tensors of drawn shapes and types, and return what they are afterwards: size, strides,
    place, type, and bytes of the storage."""
    draw = random.Random(seed)
    shape, dtype = [draw.randint(1, 5), draw.randint(1, 5)], draw.choice((torch.float32, torch.bfloat16))
    writer, is_turned, first_rows = draw.choice(WRITERS), draw.random() < 0.3, draw.choice((None, None, 1))
    into = empty(shape[::-1], dtype=dtype).t() if is_turned else empty(shape, dtype=dtype)
    tensors = [into, empty(shape, dtype=dtype)[:first_rows], empty(0, dtype=dtype)]
    tensors.append(writer(*tensors))
    return [
        (each.size(), each.stride(), each.storage_offset(), each.dtype, each.untyped_storage().nbytes())
        for each in tensors
    ]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("seed", range(120))
def test_a_tensor_that_is_written_into_is_as_torch_leaves_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "known", {})
    expected = written(seed)
    with Tracker("cuda", alone=True, first_phase=FORWARD):
        assert [written(seed) for _ in range(3)] == [expected] * 3


def test_a_shape_that_does_not_fit_is_refused_each_time() -> None:
    with Tracker("cuda", alone=True, first_phase=FORWARD):
        for _ in range(2):
            empty(2, 3).add_(empty(2, 3))
            with pytest.raises(RuntimeError, match="broadcast"):
                empty(2, 3).add_(empty(2, 2))
