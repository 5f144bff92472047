"""A model's predictions at each target, kept for a metric while its loss is computed.

Logits pass by where the cross entropy is computed, a slice of them at a time with the tiled loss. What is kept of them
is a number a target, usually the most probable class, so a metric needs neither another forward nor whole logits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from frugal.units import IGNORED

OfLogits = Callable[[Tensor, Tensor], Tensor]
"""A function from logits `(..., classes)` and labels `(...)`, on the device, to what is kept: `(...)` or `(..., n)`."""

Kept = tuple[np.ndarray, np.ndarray]
"""One sample's kept values and labels of its targets: `(targets, ...)` and `(targets,)`."""


def most_probable(logits: Tensor, _labels: Tensor) -> Tensor:
    """Return the class with the largest logit."""
    return logits.argmax(-1)


class Keeper:
    """A store of what `of_logits` makes of shown logits, until it is taken."""

    def __init__(self, of_logits: OfLogits) -> None:
        self._of_logits = of_logits
        self._shown: list[tuple[Tensor, Tensor]] = []

    def show(self, logits: Tensor, labels: Tensor) -> None:
        """Take a slice of the positions of a micro-batch: `(samples, positions, classes)`, or without positions."""
        self._shown.append((self._of_logits(logits.detach(), labels), labels))

    def take(self, num_samples: int) -> list[Kept]:
        """Return what was kept of each sample's targets in the micro-batch; empty where nothing was shown."""
        shown, self._shown = self._shown, []
        if not shown:
            return []
        by_position = shown[0][1].dim() > 1
        kept, labels = (torch.cat(parts, dim=1) if by_position else parts[0] for parts in zip(*shown, strict=True))
        kept = kept.float() if kept.is_floating_point() else kept
        kept, labels = (each.cpu() if by_position else each.cpu()[:, None] for each in (kept, labels))
        are_targets = labels != IGNORED
        return [
            (kept[i][are_targets[i]].numpy(), labels[i][are_targets[i]].numpy().astype(np.int32))
            for i in range(num_samples)
        ]


_keeper: Keeper | None = None


@contextmanager
def kept(of_logits: OfLogits | None) -> Iterator[Keeper | None]:
    """Keep logits that are shown inside the `with` block; None: keep nothing."""
    keeper = None if of_logits is None else Keeper(of_logits)
    with patch(f"{__name__}._keeper", keeper):
        yield keeper


def show(logits: Tensor, labels: Tensor) -> None:
    """Show `logits (samples, ..., classes)` and `labels (samples, ...)` to the metric, if there is one."""
    if _keeper is not None:
        _keeper.show(logits, labels)
