"""What a run learns from and is measured on, with the model and the tokenizer that belong to it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from frugal.planning.plan import Plan
from frugal.training import data, models, sources, tokenizing
from frugal.training.settings import Settings


@dataclass(frozen=True)
class Samples:
    """The model's spec with the tokenizer it is trained with, and the samples."""

    spec: Any
    tokenizer: Any
    training: Any
    validation: Sequence[Any]
    report: Any
    fingerprint: str


def read(plan: Plan, asked: Settings) -> Samples:
    """Read, tokenise and split the data. One rank of each node does it, the others find it done. Collective.

    Raises:
        RequestError: the data, the tokenizer or the model cannot be used.
    """
    tokenizer = tokenizing.load_tokenizer(asked.tokenizer)
    spec = models.resolve(plan.request.model, plan.request.task)
    columns = sources.Columns(
        text=asked.text_column, label=asked.label_column, source=asked.source_column, target=asked.target_column
    )

    def load(paths: tuple[str, ...], validation_fraction: float) -> data.Corpus:
        return data.load(
            paths, tokenizer=tokenizer, task=spec.task, seq_len=plan.request.seq_len, columns=columns,
            limit=asked.limit, skip_bad_rows=asked.skip_bad_rows, too_long=asked.too_long,
            validation_fraction=validation_fraction,
        )  # fmt: skip

    def load_all() -> tuple[data.Corpus, Any]:
        if asked.validation_data:
            return load(asked.data, 0.0), load(asked.validation_data, 0.0).train
        corpus = load(asked.data, asked.validation_fraction)
        return corpus, () if corpus.validation is None else corpus.validation

    is_first = os.environ["LOCAL_RANK"] == "0"
    loaded = load_all() if is_first else None
    dist.barrier()
    corpus, validation = loaded or load_all()
    if corpus.report.num_labels:
        spec = models.resolve(plan.request.model, plan.request.task, num_labels=corpus.report.num_labels)
    return Samples(
        spec=spec.for_tokenizer(tokenizer),
        tokenizer=tokenizer,
        training=corpus.train,
        validation=_First(validation, min(len(validation), asked.validation_samples or len(validation))),
        report=corpus.report,
        fingerprint=corpus.fingerprint,
    )


@dataclass(frozen=True)
class _First(Sequence[Any]):
    """The first `number` of `samples`."""

    samples: Sequence[Any]
    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]
