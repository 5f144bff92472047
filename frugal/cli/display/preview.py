"""`frugal train --preview N`: samples with the tokens that contribute to the loss highlighted."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from frugal.cli.display.terminal import waiting
from frugal.config.request import Request
from frugal.config.run_settings import RunSettings, run_settings
from frugal.config.schema import TomlFile, requested
from frugal.config.setting import settings_of
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.units import plural

if TYPE_CHECKING:
    from frugal.data.chat.stretches import Stretch
    from frugal.data.report import BuildReport


def check_data(data: tuple[str, ...]) -> None:
    """Refuse a run without data.

    Raises:
        RequestError: none was given.
    """
    if not data:
        raise RequestError(
            "no data was given", hint="pass --data PATH, or --data stdlib to try it on Python's own sources"
        )


def show(number: int, plan_path: Path | None, values: Mapping[str, Any], file: TomlFile) -> int:
    """Print samples as a run with these flags would train on them, and return the exit code.

    Raises: as `frugal.data.corpus.read_samples`.
    """
    settings = run_settings(values, file.train)
    check_data(settings.data)
    if plan_path is not None:
        request = Plan.read(plan_path).request
    else:
        given = file.plan | {name: value for name, value in values.items() if value is not None}
        request, _ = requested({name: value for name, value in given.items() if name in settings_of(Request)})
    with_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for line in _lines(request, settings, number, with_colour=with_colour):
        click.echo(line, color=with_colour)
    return 0


def _lines(request: Request, settings: RunSettings, number: int, *, with_colour: bool) -> Iterator[str]:
    """Yield facts about the data, and the first samples of the first epoch."""
    from frugal.data.batches import GlobalBatches  # torch takes seconds
    from frugal.data.corpus import read_training_data
    from frugal.data.mixture import Mixture
    from frugal.data.sources import names_of
    from frugal.distributed.env import silence_libraries

    silence_libraries()
    with waiting(f"tokenising {names_of(settings.data)}"):
        (tokenizer, words), corpus = read_training_data(request, settings)
    if settings.stream:
        yield words
        yield _legend(with_colour)
        for place in range(min(number, len(corpus.train))):
            yield ""
            name = f"sample {place + 1} of the stream"
            yield from _sample(tokenizer, corpus.train[place], corpus.report, name, with_colour)
        return
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
        return f"{_styled('trained on', True, False)}, context only, {_styled('special token', False, True)}"
    return ">>>trained on<<<, context only"


def _sample(
    tokenizer: Any, sample: Mapping[str, Any], report: "BuildReport", name: str, with_colour: bool
) -> Iterator[str]:
    from frugal.data.chat.stretches import of_documents

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
    tokenizer: Any, sample: Mapping[str, Any], report: "BuildReport", name: str, with_colour: bool
) -> Iterator[str]:
    """Yield the lines of a pair, a text with its class, or a text that is masked anew in each epoch."""
    import numpy as np

    from frugal.data.chat.stretches import Stretch, of_tokens

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
        yield "some of its tokens are masked, and predicted, anew in each epoch"


def _shown(pieces: Iterable["Stretch"], with_colour: bool) -> str:
    if with_colour:
        return "".join(_styled(each.text, bool(each.num_targets), each.is_special) for each in pieces)
    runs = groupby(pieces, key=lambda piece: piece.num_targets > 0)
    texts = [(is_trained, "".join(piece.text for piece in run)) for is_trained, run in runs]
    return "".join(f">>>{text}<<<" if is_trained and text else text for is_trained, text in texts)


def _styled(text: str, is_target: bool, is_special: bool) -> str:
    return click.style(text, fg="green" if is_target else None, bold=is_special or None, reset=is_target or is_special)
