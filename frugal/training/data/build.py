"""From documents to samples: check the fields, tokenise, add special tokens, cut to length.

One pass over the sources that makes the samples, and tells what it met and left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from frugal import atomic_files
from frugal.errors import RequestError
from frugal.training.data import tokenizer
from frugal.training.data.arrow_store import ArrowWriter, PackingWriter
from frugal.training.data.sources import Bad, Columns, DocumentSource, Row, kind_of

TooLong = Literal["error", "truncate", "skip"]


@dataclass
class Cutter:
    """Makes samples of documents, and counts what cannot be one."""

    tokenizer: Any
    task: str
    seq_len: int
    columns: Columns
    too_long: TooLong
    known_labels: Sequence[str] = ()
    label_names: list[str] = field(default_factory=list)
    labels_are_text: bool | None = None
    num_labels: int = 0
    num_too_long: int = 0
    longest: tuple[int, str] = (0, "")

    def __post_init__(self) -> None:
        if self.known_labels:
            self.label_names = list(self.known_labels)
            self.num_labels = len(self.label_names)
        special = self.tokenizer
        if self.task in ("masked-lm", "sequence-classification"):
            prefix, suffix = special.cls_token_id, special.sep_token_id
        elif self.task == "seq2seq":
            prefix, suffix = None, special.eos_token_id
        else:
            prefix, suffix = special.bos_token_id, special.eos_token_id
            prefix = suffix if prefix is None else prefix  # a separator serves as a beginning too
        self.prefix = np.array([] if prefix is None else [prefix], dtype=np.int32)
        self.suffix = np.array([] if suffix is None else [suffix], dtype=np.int32)
        shortest = 2 if self.task not in ("seq2seq", "masked-lm", "sequence-classification") else 1 + self.num_special
        if self.seq_len < shortest:
            raise RequestError(
                f"--seq-len {self.seq_len} leaves no token to learn from", hint=f"use at least {shortest}"
            )
        if self.task == "masked-lm" and special.mask_token_id is None:
            raise RequestError(
                "the tokenizer has no mask token",
                because="masked-lm hides tokens behind it",
                hint="take the byte tokenizer, or the model's own",
            )

    @property
    def num_special(self) -> int:
        """Special tokens around every text."""
        return len(self.prefix) + len(self.suffix)

    def check(self, source: DocumentSource, row_columns: Sequence[str]) -> None:
        """Refuse a source without a needed column."""
        for role, column in self.columns.needed(self.task).items():
            if column not in row_columns:
                others = [name for name in row_columns if name is not None]
                raise RequestError(
                    f"{source.name} has no column `{column}`",
                    because=f"its columns are {', '.join(others)}" if others else "it has no columns",
                    hint=f"choose one, such as --{role}-column {others[0]}" if others else None,
                )

    def fields(self, row: dict[str, Any]) -> tuple[Any, ...] | Bad:
        """The needed columns of a row, checked: texts, or a text and a class."""
        values = []
        for column in self.columns.needed(self.task).values():
            if column not in row:
                return Bad(f"no `{column}`")
            value = row[column]
            if self.task == "sequence-classification" and column == self.columns.label:
                value = self._label(value)
                if isinstance(value, Bad):
                    return value
            elif not isinstance(value, str):
                return Bad(f"`{column}` is {kind_of(value)}, not text")
            elif not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    return Bad(f"`{column}` is not UTF-8 text")
            values.append(value)
        return tuple(values)

    def _label(self, value: Any) -> int | Bad:
        """The number of a class. Numbers stand for themselves, names are numbered as they come."""
        if isinstance(value, str) and value.isascii() and value.isdigit() and value not in self.known_labels:
            value = value if self.labels_are_text else int(value)
        if isinstance(value, bool):
            value = int(value)
        if not isinstance(value, int | str):
            return Bad(f"`{self.columns.label}` is {kind_of(value)}, not a class")
        if self.labels_are_text is None:
            self.labels_are_text = isinstance(value, str)
        if isinstance(value, str):
            if not self.labels_are_text:
                return Bad(f"`{self.columns.label}` is `{value}`, other rows have numbers")
            if value not in self.label_names and self.known_labels:
                return Bad(f"`{self.columns.label}` is `{value}`, the classes are {', '.join(self.known_labels)}")
            if value not in self.label_names:
                self.label_names.append(value)
            value = self.label_names.index(value)
        elif self.labels_are_text:
            return Bad(f"`{self.columns.label}` is {value}, other rows have names")
        elif value < 0:
            return Bad(f"`{self.columns.label}` is {value}, classes are numbered from 0")
        self.num_labels = max(self.num_labels, value + 1)
        return value

    def samples(self, documents: Sequence[tuple[str, tuple[Any, ...]]]) -> Iterator[list[dict[str, Any]]]:
        """The samples of each document, given with where it is."""
        first = tokenizer.encode(self.tokenizer, [fields[0] for _, fields in documents])
        if self.task == "seq2seq":
            second = tokenizer.encode(self.tokenizer, [fields[1] for _, fields in documents], as_target=True)
            for (where, _), source, target in zip(documents, first, second, strict=True):
                longest = max(len(source), len(target)) + self.num_special
                if self._fits(longest, where):
                    ids, labels = self._framed(source), self._framed(target)
                    yield [{"input_ids": ids, "labels": labels, "length": max(len(ids), len(labels))}]
                else:
                    yield []
        elif self.task == "sequence-classification":
            for (where, (_, label)), ids in zip(documents, first, strict=True):
                framed = self._framed(ids)
                fits = self._fits(len(ids) + self.num_special, where)
                yield [{"input_ids": framed, "label": label, "length": len(framed)}] if fits else []
        else:
            for ids in first:
                yield [{"input_ids": window, "length": len(window)} for window in self._windows(ids)]

    def _windows(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
        """The document in windows of at most `seq_len` tokens, the last one shorter.

        Causal: windows overlap by one token, which is a target in the first and context in the second. Masked:
        windows do not overlap, and each has its special tokens.
        """
        if self.task == "masked-lm":
            room = self.seq_len - self.num_special
            for start in range(0, len(ids), room):
                yield self._wrapped(ids[start : start + room])
        else:
            document = self._wrapped(ids)
            for start in range(0, len(document) - 1, self.seq_len - 1):
                yield document[start : start + self.seq_len]

    def _framed(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return self._wrapped(ids[: self.seq_len - self.num_special])

    def _wrapped(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.concatenate([self.prefix, ids, self.suffix], dtype=np.int32)

    def _fits(self, num_tokens: int, where: str) -> bool:
        """Whether a sample is made of a text of so many tokens; counts those that are too long."""
        if num_tokens <= self.seq_len:
            return True
        self.num_too_long += 1
        self.longest = max(self.longest, (num_tokens, where), key=lambda pair: pair[0])
        return self.too_long == "truncate"


_FLUSH_CHARACTERS = 1 << 20  # tokenised and written together

Document = tuple[str, tuple[Any, ...]]
"""Where it is, and the values of its columns."""


@dataclass(frozen=True, kw_only=True)
class BuildReport:
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
    sources: Sequence[DocumentSource],
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
        RequestError: as `frugal.training.data.corpus.load_corpus`.
        OSError: it cannot be written.
    """
    with atomic_files.new_folder(folder) as temporary:  # where another process was first, it had the same content
        report = _write(_Reading(sources, cutter, limit, skip_bad_rows), temporary, pack, validation)
        (temporary / "report.json").write_bytes(msgspec.json.encode(report))


class _Reading:
    """The documents of all sources, and a count of the rows that are none."""

    def __init__(
        self, sources: Sequence[DocumentSource], cutter: Cutter, limit: int | None, skip_bad_rows: bool
    ) -> None:
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


def _write(reading: _Reading, aside: Path, pack: bool, validation: Fraction) -> BuildReport:
    """Write the samples. Raises RequestError where they are not what was asked for."""
    cutter = reading.cutter
    num_documents = 0
    with ExitStack() as stack:

        def out(name: str) -> ArrowWriter:
            path = aside / name
            return stack.enter_context(
                PackingWriter(path, cutter.task, cutter.seq_len) if pack else ArrowWriter(path, cutter.task)
            )

        train = out("train.arrow")
        kept_back = out("validation.arrow") if validation else None
        for documents in _portions(reading.documents()):
            for samples in filter(None, cutter.samples(documents)):
                is_kept_back = kept_back is not None and _is_kept_back(num_documents, validation)
                (kept_back if kept_back is not None and is_kept_back else train).write(samples)
                num_documents += 1
    label_names = reading.label_names
    report = BuildReport(
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


def _check(report: BuildReport, reading: _Reading, train: ArrowWriter) -> None:
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


def bad_rows_error(report: BuildReport) -> RequestError:
    """What is said of rows that cannot be read, where they are not to be left out."""
    rows = "1 row" if report.bad_rows == 1 else f"{report.bad_rows} rows"
    return RequestError(
        f"{rows} of the data cannot be read",
        because=f"{'the first is ' if report.bad_rows > 1 else ''}{report.first_bad[0]}",
        hint="repair them, or leave them out with --skip-bad-rows",
    )


def _names(sources: Sequence[DocumentSource]) -> str:
    return sources[0].name if len(sources) == 1 else f"{sources[0].name} and {len(sources) - 1} more"
