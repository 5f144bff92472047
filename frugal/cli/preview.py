"""`frugal train --preview N`: samples as they would be trained on, for people to look at."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import click
import numpy as np

from frugal.cli.options import waiting
from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.distributed.env import silence_libraries
from frugal.training.data.batches import GlobalBatches
from frugal.training.data.chat.stretches import Stretch, of_documents, of_tokens
from frugal.training.data.corpus import read_training_data
from frugal.training.data.mixture import Mixture
from frugal.training.data.report import BuildReport
from frugal.training.data.sources import names_of
from frugal.units import plural


def lines(request: Request, settings: RunSettings, number: int, *, with_colour: bool) -> Iterator[str]:
    """What is known of the data, and the first samples of the first epoch.

    Raises: as `frugal.training.data.corpus.read_samples`.
    """
    silence_libraries()
    with waiting(f"tokenising {names_of(settings.data)}"):
        (tokenizer, words), corpus = read_training_data(request, settings)
    yield words
    if corpus.report.formats:
        yield corpus.report.in_words()
    if isinstance(corpus.train, Mixture):
        yield corpus.train.in_words()
    yield from corpus.report.left_out(settings.too_long)
    yield _legend(with_colour)
    total = len(corpus.train)
    first = GlobalBatches(corpus.train, global_batch=min(number, total), seed=settings.seed).at()
    for place, index in enumerate(first.indices.tolist(), 1):
        yield ""
        yield from _sample(tokenizer, corpus.train[index], corpus.report, f"sample {place} of {total}", with_colour)


def _legend(with_colour: bool) -> str:
    if with_colour:
        return f"{_green('trained on')}, read alone, {_bold('special token')}"
    return ">>>trained on<<<, read alone"


def _sample(
    tokenizer: Any, sample: Mapping[str, Any], report: BuildReport, name: str, with_colour: bool
) -> Iterator[str]:
    ids = sample["input_ids"]
    if not report.formats:  # no causal language model
        yield from _other(tokenizer, sample, report, name, with_colour)
        return
    documents = of_documents(tokenizer, sample)
    num_targets = sum(piece.num_targets for pieces in documents for piece in pieces)
    packed = f" in {plural(len(documents), 'document')}" if "documents" in sample else ""
    yield f"{name}: {plural(len(ids), 'token')}{packed}, {num_targets} trained on"
    for pieces in documents:
        yield _shown(pieces, with_colour)


def _other(
    tokenizer: Any, sample: Mapping[str, Any], report: BuildReport, name: str, with_colour: bool
) -> Iterator[str]:
    """A pair, a text with its class, or a text of which parts are hidden anew each time."""
    ids = sample["input_ids"]
    yield f"{name}: {plural(len(ids), 'token')}"
    yield _shown(of_tokens(tokenizer, ids, np.zeros(len(ids), bool)), with_colour)
    if "label" in sample:
        label = sample["label"]
        named = f" ({report.label_names[label]})" if label < len(report.label_names) else ""
        yield _shown([Stretch(f"class {label}{named}", num_targets=1)], with_colour)
    elif "labels" in sample:
        target = sample["labels"]
        yield _shown(of_tokens(tokenizer, target, np.ones(len(target), bool)), with_colour)
    else:
        yield "some of its tokens are hidden, and to be found, anew in each epoch"


def _shown(pieces: Sequence[Stretch], with_colour: bool) -> str:
    if with_colour:
        return "".join(_coloured(piece) for piece in pieces)
    runs = groupby(pieces, key=lambda piece: piece.num_targets > 0)
    return "".join(f">>>{text}<<<" if trained else text for trained, run in runs if (text := _joined(run)))


def _joined(pieces: Iterable[Stretch]) -> str:
    return "".join(piece.text for piece in pieces)


def _coloured(piece: Stretch) -> str:
    text = _bold(piece.text) if piece.is_special else piece.text
    return _green(text) if piece.num_targets else text


def _green(text: str) -> str:
    return click.style(text, fg="green")


def _bold(text: str) -> str:
    return click.style(text, bold=True)
