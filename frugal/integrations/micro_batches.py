"""The micro-batches of a plan for a `torch.utils.data.DataLoader`, with exact global batches.

The order is that of `frugal.data.batches`, which is the same on any number of ranks and has no last, partial
global batch: it is completed from the next epoch. Where lengths are known, samples of similar length share a
micro-batch. A Trainer needs equally many micro-steps in every optimizer step: missing ones are dummies, samples without
a target. Packs are made of the samples of the data set, as in `frugal train`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frugal.data.batches import GlobalBatches, MicroBatchLimits, share
from frugal.data.store.packing import Packer
from frugal.errors import RequestError
from frugal.models import packs
from frugal.models.objectives import CausalLM
from frugal.planning.plan import Plan
from frugal.units import IGNORED

Collate = Callable[[list[Any]], dict[str, Any]]


def lengths_of(dataset: Any, seq_len: int) -> NDArray[np.int64] | None:
    """Return the tokens of each sample, shape `(len(dataset),)`, from a column `length` or `input_ids`, if known.

    Raises:
        RequestError: a sample has more than `seq_len` tokens.
    """
    lengths = dataset.lengths if isinstance(dataset, Packs) else _lengths(dataset)
    if lengths is not None and lengths.size and (longest := int(lengths.max())) > seq_len:
        raise RequestError(
            f"sample {int(lengths.argmax())} of train_dataset has {longest} tokens",
            because=f"the plan's memory is for samples of up to {seq_len}",
            hint=f"cut what is longer, or plan with --seq-len {longest}",
        )
    return lengths


def _lengths(dataset: Any) -> NDArray[np.int64] | None:
    """Return the number of tokens of each sample, shape `(samples,)`; None where they cannot be counted.

    `dataset` has columns, as a `datasets.Dataset`, or is a sequence of samples.
    """
    names = getattr(dataset, "column_names", None)
    if names is None:
        if not isinstance(dataset[0], dict) or "input_ids" not in dataset[0]:
            return None
        tokens = (dataset[index]["input_ids"] for index in range(len(dataset)))
    elif "length" in names:
        return np.asarray(dataset["length"], dtype=np.int64)
    elif "input_ids" in names:
        tokens = dataset["input_ids"]
    else:
        return None
    return np.fromiter(map(len, tokens), dtype=np.int64, count=len(dataset))


class PlannedBatches:
    """A batch sampler: yields the indices of this rank's micro-batches, `accumulation_steps` for each global batch.

    An index below 0 asks for a dummy: `~index` names the sample that it is made of.

    Raises:
        RequestError: a sample has more tokens than the plan has memory for.
    """

    def __init__(self, plan: Plan, dataset: Sequence[Any], rank: int, seed: int) -> None:
        self._plan, self._rank, self._epoch = plan, rank, 0
        lengths = lengths_of(dataset, plan.request.seq_len)
        self._batches = GlobalBatches(dataset, global_batch=plan.batch.global_batch, lengths=lengths, seed=seed)

    @property
    def batch_sampler(self) -> "PlannedBatches":
        """Itself: Trainer sets the epoch here, as accelerate wraps samplers."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._batches.steps(1) * self._plan.batch.accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        steps, num_micro_steps = self._batches.steps(1), self._plan.batch.accumulation_steps
        for step in range(self._epoch * steps, (self._epoch + 1) * steps):
            batch = self._batches.at(self._batches.after(step))
            places = share(batch, MicroBatchLimits.of(self._plan), self._rank, self._plan.batch).places
            assert len(places) <= num_micro_steps, "the plan has the micro-steps of full-length samples"
            shortest = int(batch.indices[0 if batch.lengths is None else np.argmin(batch.lengths)])
            for own in (*places, *[()] * (num_micro_steps - len(places))):
                yield [int(batch.indices[place]) for place in own] or [~shortest]


class Packs:
    """A data set of packs, each a list of samples of `dataset` with `seq_len` tokens at most, as in `frugal train`.

    Attributes:
        lengths: tokens of each pack, shape `(len(self),)`.

    Raises:
        RequestError: the tokens of the samples are not known, or those of one are too many.
    """

    def __init__(self, dataset: Any, seq_len: int) -> None:
        lengths, packer, self._dataset = lengths_of(dataset, seq_len), Packer(seq_len), dataset
        if lengths is None:
            raise RequestError(
                "the samples of train_dataset cannot be packed",
                because="they have no `input_ids` whose lengths could be known",
                hint="tokenize them, or plan without --pack",
            )
        pieces = map(np.broadcast_to, np.arange(len(lengths), dtype=np.int32), lengths)  # they take no memory
        made = [*chain.from_iterable(map(packer.add, pieces)), *packer.flush()]
        self._numbers = [pack["input_ids"][packs.starts(pack["documents"])] for pack in made]
        self.lengths = np.array([pack["length"] for pack in made], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> list[Any]:
        return [self._dataset[number] for number in self._numbers[index].tolist()]


def collate_packs(collate: Collate, objective: CausalLM, items: list[list[Any]]) -> dict[str, Any]:
    """Return packs as `objective` does; `collate` makes tokens and labels of each document, one by one."""
    return objective.collate([_joined([collate([document]) for document in documents]) for documents in items])


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a pack of documents, each a batch of its own, without their padding."""
    real = [part.get("attention_mask", torch.ones_like(part["input_ids"])).bool() for part in parts]
    joined = {
        name: torch.cat([part[name][mask] for part, mask in zip(parts, real, strict=True)]).numpy()
        for name in ("input_ids", "labels")
    }
    return {**joined, "documents": [int(mask.sum()) for mask in real]}


class PlannedSamples:
    """A data set in which an index below 0 is a dummy made of sample `~index`, and a function that collates both.

    All labels of a dummy are ignored. Attention masks that only hide padding on the right are dropped for causal
    models, which never look there: the plan counts on the kernels that take no mask.
    """

    def __init__(self, dataset: Any, collate: Collate, *, is_causal: bool) -> None:
        self._dataset, self._collate, self._is_causal = dataset, collate, is_causal

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Any, bool]:
        return self._dataset[index if index >= 0 else ~index], index >= 0

    def collate(self, items: list[tuple[Any, bool]]) -> dict[str, Any]:
        """Return the samples of a micro-batch as tensors by name."""
        batch = dict(self._collate([sample for sample, _ in items]))
        if not all(is_real for _, is_real in items):
            batch["labels"] = batch["labels"].new_full(batch["labels"].shape, IGNORED)
        mask = batch.get("attention_mask")
        if self._is_causal and isinstance(mask, Tensor) and mask.dim() == 2 and (mask[:, 1:] <= mask[:, :-1]).all():
            # no row of it `(samples, positions)` has a token after padding
            del batch["attention_mask"]
            batch["labels"] = batch["labels"].masked_fill(mask == 0, IGNORED)
        return batch
