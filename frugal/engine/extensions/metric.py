"""The user's own metric, computed once over all validation samples, so that it does not depend on ranks.

    def accuracy(predictions, labels):        # --metric metrics.py:accuracy
        return (np.concatenate(predictions) == np.concatenate(labels)).mean()

It gets two lists with a NumPy array for each sample, in the order of the samples: the model's prediction at each target
(the most probable class or token), and the labels; positions without a target are left out. It returns a number or
numbers by name. Its attribute `of_logits(logits, labels)`, a function, replaces the most probable class: it gets logits
`(..., classes)` and labels `(...)` on the device, slice by slice, and returns `(...)` or `(..., n)`.

Each rank keeps the predictions of its own micro-batches. All of them are gathered, put in order, and given to the
metric on rank 0, whose numbers all ranks get: the same as on one process, however the samples were split. The limit is
256 MiB of predictions and labels on a rank, which is 22 million targets.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from frugal.distributed import rank_logs
from frugal.distributed.exchange import from_rank_0, gather
from frugal.errors import FrugalError, RequestError, first_line, refuse
from frugal.models.factories import import_callable
from frugal.models.losses.predictions import Keeper, Kept, OfLogits, most_probable

Message = list[tuple[int, str, list[int], bytes, bytes]]
"""For each sample: its place, the predictions' type, shape and bytes, and the labels' bytes."""


@dataclass(frozen=True)
class Metric:
    """The callable of `reference`, and its name."""

    function: Callable[[list[np.ndarray], list[np.ndarray]], Any]
    reference: str

    @classmethod
    def load(cls, reference: str | None) -> "Metric | None":
        """Load the metric `file.py:name`; None if none was asked for.

        Raises:
            RequestError: there is no such callable.
        """
        return None if reference is None else cls(import_callable(reference), reference)  # type: ignore[arg-type]  # of any signature

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Metric":
        """Return the metric of a function, under its own name."""
        return cls(function, f"{function.__module__}:{getattr(function, '__name__', type(function).__name__)}")

    @property
    def of_logits(self) -> OfLogits:
        """The function that decides what is kept of a micro-batch's logits."""
        return getattr(self.function, "of_logits", most_probable)

    def taken(self, keeper: Keeper, num_samples: int) -> list[Kept]:
        """Return what was kept of each sample of a micro-batch.

        Raises:
            RequestError: the loss has shown no logits.
        """
        kept = keeper.take(num_samples)
        refuse(
            (
                len(kept) != num_samples,
                f"the metric {self.reference} has nothing to be computed of",
                "the loss of this model's factory shows it no logits",
                "in the loss, call frugal.models.losses.predictions.show(logits, labels)",
            )
        )
        return kept

    def compute(self, kept: Mapping[int, Kept], group: dist.ProcessGroup | None) -> dict[str, float]:
        """Return its numbers by name, over all ranks; `kept` are this rank's samples by their place. Collective.

        Raises:
            RequestError: it failed, or returned something else.
        """
        message: Message = [
            (place, predictions.dtype.str, list(predictions.shape), predictions.tobytes(), labels.tobytes())
            for place, (predictions, labels) in kept.items()
        ]
        shares = gather(message, Message, group)
        numbers, problem = {}, None
        if dist.get_rank() == 0:
            try:
                numbers = self._numbers(*_in_order(shares))
            except FrugalError as error:
                problem = error.because[0] if error.because else error.what
            except Exception as error:  # a user's function may raise anything
                rank_logs.to_file(traceback.format_exc().rstrip())
                problem = first_line(error)
        numbers, problem = from_rank_0((numbers, problem), tuple[dict[str, float], str | None], group)
        if problem is not None:
            raise RequestError(f"the metric {self.reference} failed", because=problem)
        return numbers

    def _numbers(self, predictions: list[np.ndarray], labels: list[np.ndarray]) -> dict[str, float]:
        returned = self.function(predictions, labels)
        named = returned if isinstance(returned, Mapping) else {self.reference.rpartition(":")[2]: returned}
        try:
            return {str(name): float(value) for name, value in named.items()}
        except (TypeError, ValueError):
            raise RequestError(f"it returned {returned!r}, which is neither a number nor numbers by name") from None


def _in_order(shares: Sequence[Message]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return predictions and labels of all samples by their places. Parts of a sample that ranks share are in the order
    of ranks."""
    parts: dict[int, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for place, dtype, shape, kept, labels in (sample for share in shares for sample in share):
        predictions_of, labels_of = parts.setdefault(place, ([], []))
        predictions_of.append(np.frombuffer(kept, dtype).reshape(shape))
        labels_of.append(np.frombuffer(labels, np.int32))
    in_order = [parts[place] for place in sorted(parts)]
    return [np.concatenate(each) for each, _ in in_order], [np.concatenate(each) for _, each in in_order]
