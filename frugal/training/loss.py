"""Losses as sums over targets, so that any cut of a global batch adds up to the same mean.

An `Objective` turns samples into tensors, counts their targets and sums the loss over them. The engine divides the
sum by the targets of the *global* batch, which it knows before the first forward.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Sample = Mapping[str, Any]
Batch = dict[str, Tensor]


class Objective(Protocol):
    """What is trained. Every micro-batch must build the same autograd graph: ZeRO-2 reduces by order of arrival."""

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Tensors of shape `(len(samples), ...)`, on the CPU."""
        ...

    def dummy(self) -> Sample:
        """The smallest sample, without a target: what a rank runs where its cell is empty."""
        ...

    def example(self, num_samples: int, seq_len: int) -> Batch:
        """The largest batch of `num_samples`: every sample `seq_len` tokens long. Its values do not matter."""
        ...

    def count(self, batch: Batch) -> int:
        """Targets in the batch: what the loss is averaged over."""
        ...

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss summed over the targets, fp32, shape `()`; exactly 0 with zero gradients where there is none."""
        ...


def _on_cpu(value: Any) -> Any:
    """Factories run with meta as default device, and samples need values."""
    if isinstance(value, Tensor) and value.is_meta:
        return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
    return value


class _Dummy(dict[str, Any]):
    """A sample that counts nothing."""


class SummedLoss:
    """Any module with a loss of your own.

    `loss(model, batch)` returns the loss *summed* over the targets of the batch, shape `()`. `example` is one
    sample of the largest size, or a function from `seq_len` to one; it also serves as the dummy, its loss times
    zero, so it must be finite. Where a factory makes it on meta, it is zeros. `collate` makes a dict of tensors from
    samples (default: torch's). `count` counts a batch's targets (default: its samples).
    """

    def __init__(
        self,
        loss: Callable[[nn.Module, Batch], Tensor],
        *,
        example: Sample | Callable[[int], Sample],
        collate: Callable[[list[Any]], Batch] = torch.utils.data.default_collate,
        count: Callable[[Batch], int] | None = None,
    ) -> None:
        self._loss = loss
        self._example = example
        self._collate = collate
        self._count = count

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """What `collate` makes of them, and `real`: 1, or 0 for the dummy, shape `()`."""
        real = not isinstance(samples[0], _Dummy)
        plain = [{name: value for name, value in sample.items() if name != "draw"} for sample in samples]
        return {**self._collate(plain), "real": torch.tensor(float(real))}

    def dummy(self) -> Sample:
        """The example, marked."""
        return _Dummy(self._sample(2))

    def example(self, num_samples: int, seq_len: int) -> Batch:
        """`num_samples` copies of the example."""
        return self.collate([self._sample(seq_len)] * num_samples)

    def count(self, batch: Batch) -> int:
        """Targets; none in the dummy."""
        if not batch["real"]:
            return 0
        own = self._without_mark(batch)
        return len(next(iter(own.values()))) if self._count is None else int(self._count(own))

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss in fp32, times zero for the dummy."""
        return self._loss(model, self._without_mark(batch)).float() * batch["real"]

    def _sample(self, seq_len: int) -> Sample:
        sample = self._example(seq_len) if callable(self._example) else self._example
        return {name: _on_cpu(value) for name, value in sample.items()}

    @staticmethod
    def _without_mark(batch: Batch) -> Batch:
        return {name: tensor for name, tensor in batch.items() if name != "real"}
