"""`frugal train --preview N`: samples as they would be trained on, for people to look at."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from frugal.cli.display.terminal import waiting
from frugal.config.request import Request
from frugal.config.run_settings import RunSettings, run_settings
from frugal.config.schema import read_toml, requested
from frugal.config.setting import settings_of
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.units import plural

if TYPE_CHECKING:
    from frugal.training.data.chat.stretches import Stretch
    from frugal.training.data.report import BuildReport


def check_data(settings: RunSettings) -> None:
    """Refuse a run without data.

    Raises:
        RequestError: none was given.
    """
    if not settings.data:
        raise RequestError(
            "no data was given", hint="pass --data PATH, or --data stdlib to try it on Python's own sources"
        )


def show(number: int, plan_path: Path | None, values: Mapping[str, Any]) -> int:
    """Print samples as a run with these flags would train on them; the exit code.

    Raises: as `frugal.training.data.corpus.read_samples`.
    """
    file = read_toml(values.get("config"))
    settings = run_settings(values, file.train)
    check_data(settings)
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
    """What is known of the data, and the first samples of the first epoch."""
    from frugal.distributed.env import silence_libraries
    from frugal.training.data.batches import GlobalBatches  # torch takes seconds
    from frugal.training.data.corpus import read_training_data
    from frugal.training.data.mixture import Mixture
    from frugal.training.data.sources import names_of

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
        return f"{_green('trained on')}, read alone, {_bold('special token')}"
    return ">>>trained on<<<, read alone"


def _sample(
    tokenizer: Any, sample: Mapping[str, Any], report: "BuildReport", name: str, with_colour: bool
) -> Iterator[str]:
    from frugal.training.data.chat.stretches import of_documents

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
    """A pair, a text with its class, or a text of which parts are hidden anew each time."""
    import numpy as np

    from frugal.training.data.chat.stretches import Stretch, of_tokens

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


def _shown(pieces: Sequence["Stretch"], with_colour: bool) -> str:
    if with_colour:
        return "".join(_coloured(piece) for piece in pieces)
    runs = groupby(pieces, key=lambda piece: piece.num_targets > 0)
    return "".join(f">>>{text}<<<" if trained else text for trained, run in runs if (text := _joined(run)))


def _joined(pieces: Iterable["Stretch"]) -> str:
    return "".join(piece.text for piece in pieces)


def _coloured(piece: "Stretch") -> str:
    text = _bold(piece.text) if piece.is_special else piece.text
    return _green(text) if piece.num_targets else text


def _green(text: str) -> str:
    return click.style(text, fg="green")


def _bold(text: str) -> str:
    return click.style(text, bold=True)
