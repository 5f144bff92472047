"""What a run learns from and is measured on, with the model and the tokenizer that belong to it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from frugal.planning import lengths
from frugal.planning.lengths import Lengths
from frugal.planning.plan import Plan
from frugal.planning.request import Request
from frugal.training import data, models, sources, tokenizing
from frugal.training.order import permutation
from frugal.training.provenance import Provenance
from frugal.training.settings import Settings

MOST_READ = 100_000_000
"""Lengths that a plan looks at: a second of counting."""


@dataclass(frozen=True)
class Samples:
    """The model's spec with the tokenizer it is trained with, and the samples."""

    spec: Any
    tokenizer: Any
    training: Any
    validation: Sequence[Any]
    test: Sequence[Any]
    report: Any
    provenance: Provenance


def read(plan: Plan, asked: Settings) -> Samples:
    """Read, tokenise and split the data. One rank of each node does it, the others find it done. Collective.

    Raises:
        RequestError: the data, the tokenizer or the model cannot be used.
    """
    tokenizer = tokenizing.load_tokenizer(asked.tokenizer)
    spec = models.resolve(plan.request.model, plan.request.task)

    def load_all() -> tuple[data.Corpus, Any, Any]:
        return _load(spec.task, tokenizer, plan.request.seq_len, bool(plan.request.pack), asked)

    is_first = os.environ["LOCAL_RANK"] == "0"
    loaded = load_all() if is_first else None
    dist.barrier()
    corpus, validation, test = loaded or load_all()
    if corpus.report.num_labels:
        spec = models.resolve(plan.request.model, plan.request.task, num_labels=corpus.report.num_labels)
    return Samples(
        spec=spec.for_tokenizer(tokenizer),
        tokenizer=tokenizer,
        training=corpus.train,
        validation=Drawn.from_all(validation, asked.validation_samples),
        test=test,
        report=corpus.report,
        provenance=corpus.provenance,
    )


def _load(task: str, tokenizer: Any, seq_len: int, pack: bool, asked: Settings) -> tuple[data.Corpus, Any, Any]:
    """What to train on, what to evaluate on meanwhile, and at the end."""
    columns = sources.Columns(
        text=asked.text_column, label=asked.label_column, source=asked.source_column, target=asked.target_column
    )

    def load(paths: tuple[str, ...], validation_fraction: float = 0.0, label_names: Sequence[str] = ()) -> data.Corpus:
        return data.load(
            paths, tokenizer=tokenizer, task=task, seq_len=seq_len, pack=pack, columns=columns,
            limit=asked.limit, skip_bad_rows=asked.skip_bad_rows, too_long=asked.too_long,
            validation_fraction=validation_fraction, label_names=label_names,
        )  # fmt: skip

    corpus = load(asked.data, 0.0 if asked.validation_data else asked.validation_fraction)
    validation, test = (
        load(paths, label_names=corpus.report.label_names).train if paths else ()
        for paths in (asked.validation_data, asked.test_data)
    )
    return corpus, validation or corpus.validation or (), test


def lengths_of(request: Request, asked: Settings) -> Lengths:
    """How long the samples are that a plan for `request` would train on; its source says what is left out.

    The data is tokenised as training will do it, and kept for it. Of more than `MOST_READ` lengths some are read,
    evenly spread.

    Raises: as `read`.
    """
    spec = models.resolve(request.model, request.task)
    seq_len = min(request.seq_len, spec.max_positions or request.seq_len)
    corpus, *_ = _load(spec.task, tokenizing.load_tokenizer(asked.tokenizer), seq_len, bool(request.pack), asked)
    return of_corpus(corpus, ", ".join(asked.data), corpus.report.left_out(asked.too_long))


def of_corpus(corpus: data.Corpus, name: str, notes: Sequence[str]) -> Lengths:
    """The lengths of its training samples; `name` and `notes` say where they are from."""
    found, counted = histogram(corpus.train.lengths, name, notes), corpus.train.counted_tokens
    return found if counted is corpus.train.lengths else replace(found, counted_mean=float(counted.mean()))


def histogram(found: Any, name: str, notes: Sequence[str]) -> Lengths:
    """Of `found`, tokens of each sample; `name` and `notes` say where they are from."""
    every = -(-len(found) // MOST_READ)
    numbers = np.bincount(found[::every])
    counts = {int(tokens): int(numbers[tokens]) for tokens in np.flatnonzero(numbers)}
    part = [f"lengths of one sample in {every}"] * (every > 1)
    return lengths.of_counts(counts, source="; ".join([name, *part, *notes]))


@dataclass(frozen=True)
class Drawn(Sequence[Any]):
    """Some of `samples`, the same in every run on this data."""

    samples: Sequence[Any]
    indices: Sequence[int]

    @classmethod
    def from_all(cls, samples: Sequence[Any], number: int | None) -> "Drawn":
        """`number` of them, drawn evenly from all documents; None: all."""
        if number is None or number >= len(samples):
            return cls(samples, range(len(samples)))
        return cls(samples, sorted(map(int, permutation(len(samples), seed=0, epoch=0)[:number])))

    @property
    def lengths(self) -> Any:
        """Tokens of each, shape `(samples,)`; None where they are not known."""
        found = getattr(self.samples, "lengths", None)
        return None if found is None else found[np.asarray(self.indices, dtype=np.int64)]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.samples[self.indices[index]]
