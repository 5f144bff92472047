"""`frugal train --preview N`: samples with the tokens that contribute to the loss highlighted."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from frugal.cli.terminal import waiting
from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.data.batches import GlobalBatches
from frugal.data.corpus import read_training_data
from frugal.data.mixture import Mixture
from frugal.data.report import BuildReport
from frugal.data.sources import names_of
from frugal.units import IGNORED, plural


@dataclass(frozen=True)
class _Stretch:
    """Text of tokens that follow each other. `num_targets`: how many of them are trained on, which is all or none."""

    text: str
    num_targets: int = 0
    is_special: bool = False


def show(number: int, request: Request, settings: RunSettings) -> None:
    """Print facts about the data, and the first `number` samples of the first epoch, or of a stream.

    Raises: as `frugal.data.corpus.read_samples`.
    """
    with_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for line in _lines(number, request, settings, with_colour):  # what precedes a broken sample is seen
        click.echo(line, color=with_colour)


def _lines(number: int, request: Request, settings: RunSettings, with_colour: bool) -> Iterator[str]:
    with waiting(f"tokenising {names_of(settings.data)}"):
        (tokenizer, words), corpus = read_training_data(request, settings)
    report, total = corpus.report, len(corpus.train)
    yield words
    if settings.stream:
        chosen, place_in = range(min(number, total)), "the stream"
    else:
        if report.formats:
            yield report.in_words()
        if isinstance(corpus.train, Mixture):
            yield corpus.train.in_words()
        yield from report.left_out(settings.too_long)
        first = GlobalBatches(corpus.train, global_batch=min(number, total), seed=settings.seed).at()
        chosen, place_in = first.indices.tolist(), str(total)
    if with_colour:
        yield f"{_styled('trained on', True, False)}, context only, {_styled('special token', False, True)}"
    else:
        yield ">>>trained on<<<, context only"
    for place, index in enumerate(chosen, 1):
        yield ""
        yield from _sample(tokenizer, corpus.train[index], report, f"sample {place} of {place_in}", with_colour)


def _sample(
    tokenizer: Any, sample: Mapping[str, Any], report: BuildReport, name: str, with_colour: bool
) -> Iterator[str]:
    """Yield the lines of a language model's documents, a pair, a text with its class, or one that is masked anew in
    each epoch."""
    ids = sample["input_ids"]
    head = f"{name}: {plural(len(ids), 'token')}"
    if report.formats:
        documents = _of_documents(tokenizer, sample)
        num_targets = sum(piece.num_targets for pieces in documents for piece in pieces)
        packed = f" in {plural(len(documents), 'document')}" if "documents" in sample else ""
        yield f"{head}{packed}, {num_targets} trained on"
        for pieces in documents:
            yield _shown(pieces, with_colour)
    else:
        yield head
        yield _shown(_of_tokens(tokenizer, ids, np.zeros(len(ids), bool)), with_colour)
        if "label" in sample:
            label = sample["label"]
            named = f" ({report.label_names[label]})" if label < len(report.label_names) else ""
            yield _shown([_Stretch(f"class {label}{named}", num_targets=1)], with_colour)
        elif "labels" in sample:
            target = sample["labels"]
            yield _shown(_of_tokens(tokenizer, target, np.ones(len(target), bool)), with_colour)
        else:
            yield "some of its tokens are masked, and predicted, anew in each epoch"


def _shown(pieces: Iterable[_Stretch], with_colour: bool) -> str:
    if with_colour:
        return "".join(_styled(each.text, bool(each.num_targets), each.is_special) for each in pieces)
    runs = groupby(pieces, key=lambda piece: piece.num_targets > 0)
    texts = [(is_trained, "".join(piece.text for piece in run)) for is_trained, run in runs]
    return "".join(f">>>{text}<<<" if is_trained and text else text for is_trained, text in texts)


def _styled(text: str, is_target: bool, is_special: bool) -> str:
    return click.style(text, fg="green" if is_target else None, bold=is_special or None, reset=is_target or is_special)


def _of_documents(tokenizer: Any, sample: Mapping[str, Any]) -> list[list[_Stretch]]:
    """Return the pieces of each document in a language model's sample; the first token of each is no target."""
    ids = sample["input_ids"]
    labels = sample.get("labels", ids)
    ends = np.cumsum(sample.get("documents", [len(ids)]))
    made = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        trained = labels[begin:end] != IGNORED
        trained[:1] = False
        made.append(_of_tokens(tokenizer, ids[begin:end], trained))
    return made


def _of_tokens(tokenizer: Any, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> list[_Stretch]:
    """Return the pieces of some tokens, of which `trained` are targets; both of shape `(tokens,)`."""
    added = [token for token, what in tokenizer.added_tokens_decoder.items() if what.special]
    special = np.isin(ids, [*tokenizer.all_special_ids, *added])
    kinds = trained * 2 + special
    borders = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), len(ids)]
    pieces, before = [], ""
    for begin, end in pairwise(borders):
        whole = _text(tokenizer, ids[:end])
        # A token alone may lose the space in front of it, so what it adds to all before it is shown.
        text = whole[len(before) :] if whole.startswith(before) else _text(tokenizer, ids[begin:end])
        pieces.append(_Stretch(text, (end - begin) * int(trained[begin]), bool(special[begin])))
        before = whole
    return pieces


def _text(tokenizer: Any, ids: Sequence[int] | NDArray[np.int32]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
