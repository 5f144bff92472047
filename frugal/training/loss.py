"""Losses as sums over targets, so that any cut of a global batch adds up to the same mean.

An `Objective` turns samples into tensors, counts their targets and sums the loss over them. The engine divides the
sum by the targets of the *global* batch, which it knows before the first forward.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # the label of positions without a target, as in torch's cross entropy

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


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in fp32 over `logits` of shape `(..., classes)`, summed where `targets` is not `IGNORED`."""
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def pad(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """`rows` of token ids, padded on the right with `fill` to the longest: shape `(len(rows), longest)`, int64."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=torch.long)


class CausalLM:
    """Next-token prediction. A sample has `input_ids` and, if some positions are no targets, `labels`."""

    def __init__(self, pad_id: int = 0) -> None:
        self.pad_id = pad_id

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """`input_ids` and `labels`, each of shape `(samples, longest)`.

        There is no attention mask: padding is on the right, and causal attention never looks there. That keeps the
        flash kernel, which takes no mask.
        """
        return {
            "input_ids": pad([sample["input_ids"] for sample in samples], self.pad_id),
            "labels": pad([sample.get("labels", sample["input_ids"]) for sample in samples], IGNORED),
        }

    def dummy(self) -> Sample:
        """Two tokens, none of them a target."""
        return {"input_ids": [self.pad_id, self.pad_id], "labels": [IGNORED, IGNORED]}

    def example(self, num_samples: int, seq_len: int) -> Batch:
        """`num_samples` rows of `seq_len` tokens."""
        return self.collate([{"input_ids": [self.pad_id] * seq_len}] * num_samples)

    def count(self, batch: Batch) -> int:
        """Targets; position 0 is predicted by nothing."""
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Summed cross entropy of every next token."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits
        return summed_cross_entropy(logits[:, :-1], batch["labels"][:, 1:])
