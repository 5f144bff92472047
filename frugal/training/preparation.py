"""One pass over the sources that makes the samples, and tells what it met and left out."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from frugal.errors import RequestError
from frugal.training.arrow import PackingWriter, Writer
from frugal.training.cutting import Cutter, TooLong
from frugal.training.sources import Bad, Row, Source

_FLUSH_CHARACTERS = 1 << 20  # tokenised and written together

Document = tuple[str, tuple[Any, ...]]
"""Where it is, and the values of its columns."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What reading the data met.

    Attributes:
        documents: good rows.
        samples: made from them.
        tokens: in the samples, special ones and the overlap of windows included.
        bad_rows: left out because they cannot be read; `first_bad` has `file:line: reason` of up to ten.
        empty_rows: left out because they have no text.
        too_long_rows: truncated or left out, as asked.
        too_short_rows: left out because one token has none to learn from it.
        label_names: of classes given as text, in order of their number.
        num_labels: classes; 0 without labels.
    """

    documents: int = 0
    samples: int = 0
    tokens: int = 0
    bad_rows: int = 0
    first_bad: tuple[str, ...] = ()
    empty_rows: int = 0
    too_long_rows: int = 0
    too_short_rows: int = 0
    label_names: tuple[str, ...] = ()
    num_labels: int = 0

    def left_out(self, too_long: TooLong) -> list[str]:
        """What of the data is not trained on, in words."""
        rows = (
            (self.bad_rows, "that cannot be read left out"),
            (self.empty_rows, "without text left out"),
            (self.too_short_rows, "of one token left out"),
            (self.too_long_rows, "longer than --seq-len " + ("truncated" if too_long == "truncate" else "left out")),
        )
        return [f"{number} row{'s' * (number != 1)} {what}" for number, what in rows if number]


def prepare(
    sources: Sequence[Source],
    cutter: Cutter,
    folder: Path,
    *,
    pack: bool,
    limit: int | None,
    skip_bad_rows: bool,
    validation: Fraction,
) -> None:
    """Write `folder` with `train.arrow`, `validation.arrow` (if asked) and `report.json`: whole, or not at all.

    Raises:
        RequestError: as `frugal.training.data.load`.
        OSError: it cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        report = _write(_Reading(sources, cutter, limit, skip_bad_rows), aside, pack, validation)
        (aside / "report.json").write_bytes(msgspec.json.encode(report))
        try:
            aside.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class _Reading:
    """The documents of all sources, and a count of the rows that are none."""

    def __init__(self, sources: Sequence[Source], cutter: Cutter, limit: int | None, skip_bad_rows: bool) -> None:
        self.sources = sources
        self.cutter = cutter
        self._limit = limit
        self._skips_bad_rows = skip_bad_rows
        self.num_good = self.num_bad = self.num_empty = 0
        self.first_bad: list[str] = []

    @property
    def has_failed(self) -> bool:
        """Whether a bad row makes all of it useless."""
        return self.num_bad > 0 and not self._skips_bad_rows

    def documents(self) -> Iterator[Document]:
        """Each row that can be read and has text, up to the limit."""
        for where, row in self._rows():
            fields = row if isinstance(row, Bad) else self.cutter.fields(row)
            if isinstance(fields, Bad):
                self.num_bad += 1
                if len(self.first_bad) < 10:
                    self.first_bad.append(f"{where}: {fields.reason}")
            elif "" in fields:
                self.num_empty += 1
            elif not self.has_failed:  # otherwise only the count of bad rows is still of interest
                self.num_good += 1
                yield where, fields
                if self.num_good == self._limit:
                    return

    def _rows(self) -> Iterator[Row]:
        """The rows of all sources; each source's columns are checked before its first good row."""
        for source in self.sources:
            checked = source.columns is not None
            if source.columns is not None:
                self.cutter.check(source, source.columns)
            for where, row in source.rows(self.cutter.columns):
                if not checked and isinstance(row, dict):
                    self.cutter.check(source, list(row))
                    checked = True
                yield where, row

    @property
    def label_names(self) -> tuple[str, ...]:
        """Of classes given as text; of classes given as numbers those that a source has for them."""
        names = tuple(self.cutter.label_names)
        if self.cutter.task == "sequence-classification":
            names = names or next((source.label_names for source in self.sources if source.label_names), ())
        return names


def _write(reading: _Reading, aside: Path, pack: bool, validation: Fraction) -> Report:
    """Write the samples. Raises RequestError where they are not what was asked for."""
    cutter = reading.cutter
    num_documents = 0
    with ExitStack() as stack:

        def out(name: str) -> Writer:
            path = aside / name
            return stack.enter_context(
                PackingWriter(path, cutter.task, cutter.seq_len) if pack else Writer(path, cutter.task)
            )

        train = out("train.arrow")
        kept_back = out("validation.arrow") if validation else None
        for documents in _portions(reading.documents()):
            for samples in filter(None, cutter.samples(documents)):
                is_kept_back = kept_back is not None and _is_kept_back(num_documents, validation)
                (kept_back if kept_back is not None and is_kept_back else train).write(samples)
                num_documents += 1
    label_names = reading.label_names
    report = Report(
        documents=num_documents,
        samples=train.num_samples + (kept_back.num_samples if kept_back else 0),
        tokens=train.num_tokens + (kept_back.num_tokens if kept_back else 0),
        bad_rows=reading.num_bad,
        first_bad=tuple(reading.first_bad),
        empty_rows=reading.num_empty,
        too_long_rows=cutter.num_too_long,
        too_short_rows=reading.num_good - num_documents - cutter.num_too_long * (cutter.too_long != "truncate"),
        label_names=label_names,
        num_labels=max(cutter.num_labels, len(label_names)),
    )
    _check(report, reading, train)
    return report


def _portions(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """As many at once as are worth a call of the tokenizer."""
    portion: list[Document] = []
    num_characters = 0
    for where, fields in documents:
        portion.append((where, fields))
        num_characters += sum(len(value) for value in fields if isinstance(value, str))
        if num_characters > _FLUSH_CHARACTERS:
            yield portion
            portion, num_characters = [], 0
    if portion:
        yield portion


def _is_kept_back(document: int, fraction: Fraction) -> bool:
    """Whether document number `document` is for validation: the first, then evenly spread, ceil(n * fraction) of n."""
    return -(-(document + 1) * fraction // 1) > -(-document * fraction // 1)


def _check(report: Report, reading: _Reading, train: Writer) -> None:
    """Refuse samples that are not what was asked for, or none."""
    cutter = reading.cutter
    if reading.has_failed:
        raise bad_rows_error(report)
    if report.too_long_rows and cutter.too_long == "error":
        tokens, where = cutter.longest
        raise RequestError(
            f"{report.too_long_rows} of {report.documents + report.too_long_rows} samples are longer than --seq-len",
            because=f"the longest, {where}, has {tokens} tokens with special ones, --seq-len is {cutter.seq_len}",
            hint=f"use --seq-len {tokens}, or --too-long truncate, or --too-long skip",
        )
    if report.samples == 0:
        left_out = [f"{report.bad_rows} rows that cannot be read"] * (report.bad_rows > 0)
        left_out += [f"{report.empty_rows} rows without text"] * (report.empty_rows > 0)
        has = "has" if len(reading.sources) == 1 else "have"
        raise RequestError(
            "there is no text in the data",
            because=f"{_names(reading.sources)} {has} {' and '.join(left_out) or 'no rows'}",
        )
    if train.num_samples == 0:
        raise RequestError(
            "the data cannot be divided into training and validation",
            because=f"it is {report.documents} document{'s' * (report.documents != 1)}",
            hint="set the validation fraction to 0, or give validation data of its own",
        )


def bad_rows_error(report: Report) -> RequestError:
    """What is said of rows that cannot be read, where they are not to be left out."""
    rows = "1 row" if report.bad_rows == 1 else f"{report.bad_rows} rows"
    return RequestError(
        f"{rows} of the data cannot be read",
        because=f"{'the first is ' if report.bad_rows > 1 else ''}{report.first_bad[0]}",
        hint="repair them, or leave them out with --skip-bad-rows",
    )


def _names(sources: Sequence[Source]) -> str:
    return sources[0].name if len(sources) == 1 else f"{sources[0].name} and {len(sources) - 1} more"
