"""A global batch as people have it, as the samples that it consists of.

`train_step` and `evaluate` take a sequence of samples; a batch that a `DataLoader` has collated already, as a dict of
tensors or as a tuple of them; and a sequence of tuples, as a `TensorDataset` gives. What was padded is cut again: the
engine makes its own micro-batches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frugal.errors import RequestError, refuse
from frugal.models.objectives import Objective, Sample, Seq2Seq, SequenceClassification
from frugal.units import IGNORED

Given = Sequence[Any] | Mapping[str, Any]
"""Samples, tuples, or columns; see above."""


class Rows(list[Sample]):
    """Samples that were rows of a batch; `lengths` are their tokens, shape `(len(self),)`, None: they have none."""

    lengths: NDArray[np.int64] | None = None


def as_samples(batch: Any, objective: Objective) -> Sequence[Sample]:
    """Return the samples of a batch that is given in any of these forms.

    Raises:
        RequestError: it has another form, columns of different length, or more of them than the objective names.
    """
    if isinstance(batch, Mapping):
        return _rows({str(name): column for name, column in batch.items()}, objective)
    if isinstance(batch, tuple | list) and batch and all(isinstance(column, Tensor) for column in batch):
        return _rows(_named(batch, objective), objective)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        if len(batch) and isinstance(batch[0], tuple | list):
            return [_named(sample, objective) for sample in batch]
        return batch
    raise RequestError(
        f"a global batch is given as {type(batch).__name__}",
        because="it is a sequence of samples, a dict of columns or a tuple of them",
        hint="pass what a DataLoader yields, or a list of samples",
    )


def _named(values: Sequence[Any], objective: Objective) -> dict[str, Any]:
    """Return the values of a tuple by the names that the objective has for them, in its order."""
    of_text = ("input_ids", "label" if isinstance(objective, SequenceClassification) else "labels")
    names = getattr(objective, "names", of_text)
    refuse(
        (
            len(values) > len(names),
            f"a sample has {len(values)} values, and the objective names for {len(names)}: {', '.join(names)}",
            "",
            "give a dict, or name them in the objective's example",
        )
    )
    return dict(zip(names, values, strict=False))


def _rows(columns: dict[str, Any], objective: Objective) -> Rows:
    sizes = {
        name: len(column) if not isinstance(column, Tensor) or column.dim() else 0 for name, column in columns.items()
    }
    refuse(
        (
            len(set(sizes.values())) != 1,
            "the columns of a global batch differ in their number of samples",
            ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "it has none",
            None,
        )
    )
    mask = None if hasattr(objective, "names") else columns.pop("attention_mask", None)
    made = ({name: column[i] for name, column in columns.items()} for i in range(next(iter(sizes.values()))))
    if hasattr(objective, "names"):
        return Rows(made)
    real = [None] * next(iter(sizes.values())) if mask is None else [torch.as_tensor(row).bool() for row in mask]
    rows = Rows(_cut(sample, row, objective) for sample, row in zip(made, real, strict=True))
    if rows and "input_ids" in rows[0]:
        rows.lengths = np.asarray([len(sample["input_ids"]) for sample in rows])
    return rows


def _cut(sample: dict[str, Any], real: Tensor | None, objective: Objective) -> dict[str, Any]:
    """Return a sample without padding: of inputs, where `real (positions)` is false; of targets, ignored ends."""
    if isinstance(objective, SequenceClassification) and "labels" in sample:
        sample["label"] = int(sample.pop("labels"))
    own_labels = sample.get("labels") if isinstance(objective, Seq2Seq) else None
    if real is not None:
        for name, value in sample.items():
            if isinstance(value, Tensor | Sequence) and len(value) == len(real):
                sample[name] = torch.as_tensor(value)[real]
    if own_labels is not None:
        labels = torch.as_tensor(own_labels)
        targets = (labels != IGNORED).nonzero()
        sample["labels"] = labels[: int(targets[-1]) + 1 if len(targets) else 1]
    return sample
