"""Samples from documents, in one pass over the sources: check the fields, tokenise, add special tokens, cut to length.

What cannot be a sample is counted, and reported with the samples.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from frugal.config.run_settings import Format, TrainOn
from frugal.config.sample_lengths import TooLong
from frugal.errors import RequestError
from frugal.training.data import tokenizer
from frugal.training.data.chat import formats
from frugal.training.data.chat.formats import Whole
from frugal.training.data.chat.maker import Trained, WholeRows
from frugal.training.data.long_text import LongText
from frugal.training.data.report import BuildReport, Refused
from frugal.training.data.rows import BadRow, Columns, Row, type_in_words
from frugal.training.data.sources import DocumentSource, names_of
from frugal.training.data.store.arrow_store import ArrowWriter, PackingWriter
from frugal.units import plural

_FLUSH_CHARACTERS = 1 << 20  # tokenised and written together


class Named(Protocol):
    """A source of rows, by its name."""

    @property
    def name(self) -> str:
        """For people."""


Document = tuple[str, tuple[Any, ...]]
"""Where it is (`file:line`), and the values of its columns: texts, long ones as `LongText`, and a class."""


def write_samples(
    sources: Sequence[DocumentSource],
    maker: "SampleMaker",
    folder: Path,
    *,
    pack: bool,
    limit: int | None,
    skip_bad_rows: bool,
    validation_fraction: Fraction,
) -> BuildReport:
    """Write `train.arrow` and `validation.arrow` (if asked) into `folder`.

    Raises:
        RequestError: as `frugal.training.data.corpus.load_corpus`.
        OSError: it cannot be written.
    """
    return _write(_DocumentReader(sources, maker, limit, skip_bad_rows), folder, pack, validation_fraction)


@dataclass
class SampleMaker:
    """Makes samples of documents, and counts what cannot be one.

    Attributes:
        seq_len: the most tokens of a sample.
        known_labels: classes in the order of their numbers; a text that is none of them is an error.
        label_names: classes given as text, numbered in the order in which they come.
        labels_are_text: whether classes are given as text; None before the first.
        longest: tokens of the longest document that was too long, and where it is.
        largest_token: id, and where it is.
        asked_format: of language models' rows; None leaves it to their columns.
        format: of the rows that are read now.
        bad, masked: rows that cannot be read, and those without a token to train on.
        num_refused: of these, those that were found out when they were tokenised.
    """

    tokenizer: Any
    task: str
    seq_len: int
    columns: Columns
    too_long: TooLong
    known_labels: Sequence[str] = ()
    asked_format: Format | None = None
    train_on: TrainOn = "completions"
    label_names: list[str] = field(default_factory=list)
    labels_are_text: bool | None = None
    num_labels: int = 0
    num_too_long: int = 0
    longest: tuple[int, str] = (0, "")
    largest_token: tuple[int, str] = (-1, "")
    format: Format = "text"
    formats: Counter[str] = field(default_factory=Counter)
    num_targets: int = 0
    bad: Refused = field(default_factory=Refused)
    masked: Refused = field(default_factory=Refused)
    num_refused: int = 0

    def __post_init__(self) -> None:
        self.whole_rows = WholeRows(self.tokenizer, self.train_on == "all")
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
        self.largest_token = (max(prefix or 0, suffix or 0), "the tokenizer's special tokens")
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

    def check_columns(self, source: "Named", row_columns: Sequence[str]) -> None:
        """Refuse a source without a needed column; of a language model's, find out what its rows are."""
        if self.task == "causal-lm":
            kind = formats.recognised(row_columns, self.columns.text, source.name, self.asked_format)
            self.format = kind or "text"
            if self.format != "text":
                return
        for role, column in self.columns.needed(self.task).items():
            if column not in row_columns:
                others = [name for name in row_columns if name is not None]
                raise RequestError(
                    f"{source.name} has no column `{column}`",
                    because=f"its columns are {', '.join(others)}" if others else "it has no columns",
                    hint=f"choose one, such as --columns {role}={others[0]}" if others else None,
                )

    def fields(self, row: dict[str, Any]) -> tuple[Any, ...] | BadRow:
        """What is needed of a row, checked: texts, a text and a class, or what is one sample."""
        if self.format != "text":
            whole = formats.read(row, self.format)
            return whole if isinstance(whole, BadRow) else (whole, self.format)
        values = []
        for column in self.columns.needed(self.task).values():
            if column not in row:
                return BadRow(f"no `{column}`")
            value = row[column]
            if self.task == "sequence-classification" and column == self.columns.label:
                value = self._label(value)
                if isinstance(value, BadRow):
                    return value
            elif not isinstance(value, str | LongText):
                return BadRow(f"`{column}` is {type_in_words(value)}, not text")
            elif isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    return BadRow(f"`{column}` is not UTF-8 text")
            values.append(value)
        return tuple(values)

    def _label(self, value: Any) -> int | BadRow:
        """The number of a class. Numbers stand for themselves, names are numbered as they come."""
        if isinstance(value, str) and value.isascii() and value.isdigit() and value not in self.known_labels:
            value = value if self.labels_are_text else int(value)
        if isinstance(value, bool):
            value = int(value)
        if not isinstance(value, int | str):
            return BadRow(f"`{self.columns.label}` is {type_in_words(value)}, not a class")
        if self.labels_are_text is None:
            self.labels_are_text = isinstance(value, str)
        if isinstance(value, str):
            if not self.labels_are_text:
                return BadRow(f"`{self.columns.label}` is `{value}`, other rows have numbers")
            if value not in self.label_names and self.known_labels:
                return BadRow(f"`{self.columns.label}` is `{value}`, the classes are {', '.join(self.known_labels)}")
            if value not in self.label_names:
                self.label_names.append(value)
            value = self.label_names.index(value)
        elif self.labels_are_text:
            return BadRow(f"`{self.columns.label}` is {value}, other rows have names")
        elif value < 0:
            return BadRow(f"`{self.columns.label}` is {value}, classes are numbered from 0")
        self.num_labels = max(self.num_labels, value + 1)
        return value

    def samples(self, documents: Sequence[Document]) -> Iterator[Iterable[dict[str, Any]]]:
        """The samples of each document, given with where it is. To be taken in order, as a long text is read then."""
        first = self._encoded(documents, 0)
        if self.task == "seq2seq":
            second = self._encoded(documents, 1, as_target=True)
            for (where, _), source, target in zip(documents, first, second, strict=True):
                (ids, num_ids), (labels, num_labels) = self._truncated(source), self._truncated(target)
                sample = {"input_ids": ids, "labels": labels, "length": max(len(ids), len(labels))}
                yield [sample] if self._fits(max(num_ids, num_labels), where) else []
        elif self.task == "sequence-classification":
            for (where, (_, label)), pieces in zip(documents, first, strict=True):
                ids, number = self._truncated(pieces)
                yield [{"input_ids": ids, "label": label, "length": len(ids)}] if self._fits(number, where) else []
        elif self.task == "masked-lm":
            for pieces in first:
                yield ({"input_ids": window, "length": len(window)} for window in self._windows(pieces))
        else:
            yield from self._of_language_model(documents)

    def _of_language_model(self, documents: Sequence[Document]) -> Iterator[Iterable[dict[str, Any]]]:
        """Running text in windows; other rows whole."""
        texts = self._encoded([each for each in documents if not isinstance(each[1][0], Whole)], 0)
        encoded = self.whole_rows.encode([(where, row) for where, (row, *_) in documents if isinstance(row, Whole)])
        for where, (row, *kind) in documents:
            if isinstance(row, Whole):
                yield self._whole(row, kind[0], next(encoded), where)
            else:
                self.formats["text"] += 1
                yield map(self._counted, self._windows(next(texts)))

    def _counted(self, window: NDArray[np.int32]) -> dict[str, Any]:
        self.num_targets += len(window) - 1
        return {"input_ids": window, "length": len(window)}

    def _whole(self, row: Whole, kind: Format, encoded: Trained | BadRow, where: str) -> list[dict[str, Any]]:
        """The sample of a row, if it can be one."""
        if isinstance(encoded, BadRow):
            return self._refuse(self.bad, f"{where}: {encoded.reason}")
        ids, trained = next(self._noted(encoded[:1], where)), encoded[1]
        if not trained[1:].any():
            return self._refuse(self.masked, f"{where}: {formats.why_masked(row)}")
        if not self._fits(len(ids), where):
            return []
        ids, trained = ids[: self.seq_len], trained[: self.seq_len]
        num_targets = int(trained[1:].sum())
        if num_targets == 0:
            return self._refuse(self.masked, f"{where}: its first target comes after the {self.seq_len} of --seq-len")
        self.num_targets += num_targets
        self.formats[kind] += 1
        return [{"input_ids": ids, "trained": trained, "length": len(ids)}]

    def _refuse(self, rows: Refused, why: str) -> list[dict[str, Any]]:
        rows.add(why)
        self.num_refused += 1
        return []

    def _encoded(
        self, documents: Sequence[Document], field: int, *, as_target: bool = False
    ) -> Iterator[Iterator[NDArray[np.int32]]]:
        """The tokens of this field of each document, in one piece, or of a long text in many."""
        texts = [fields[field] for _, fields in documents]
        short = [text for text in texts if not isinstance(text, LongText)]
        encoded = iter(tokenizer.encode(self.tokenizer, short, as_target=as_target))
        for (where, _), text in zip(documents, texts, strict=True):
            is_long = isinstance(text, LongText)
            pieces = tokenizer.encode_long(self.tokenizer, text, as_target=as_target) if is_long else [next(encoded)]
            yield self._noted(pieces, where)

    def _noted(self, pieces: Iterable[NDArray[np.int32]], where: str) -> Iterator[NDArray[np.int32]]:
        """The same tokens. Notes the largest id, and refuses one that is none."""
        for ids in pieces:
            if len(ids):
                self.largest_token = max(self.largest_token, (int(ids.max()), where), key=lambda pair: pair[0])
                if ids.min() < 0:
                    raise RequestError(f"the tokenizer makes {ids.min()} of {where}", because="a token is at least 0")
            yield ids

    def _windows(self, pieces: Iterable[NDArray[np.int32]]) -> Iterator[NDArray[np.int32]]:
        """The document in windows of at most `seq_len` tokens, the last one shorter.

        Causal: windows overlap by one token, which is a target in the first and context in the second. Masked:
        windows do not overlap, and each has its special tokens.
        """
        if self.task == "masked-lm":
            return map(self._wrapped, _stretches(pieces, self.seq_len - self.num_special, overlap=0))
        return _stretches(self._between(pieces), self.seq_len, overlap=1)

    def _between(self, pieces: Iterable[NDArray[np.int32]]) -> Iterator[NDArray[np.int32]]:
        """The text between its special tokens, unless it has them itself."""
        last = np.array([], dtype=np.int32)
        begun = False
        for ids in pieces:
            if len(ids) and not begun:
                begun = True
                if not np.array_equal(ids[:1], self.prefix):
                    yield self.prefix
            yield ids
            last = ids[-1:] if len(ids) else last
        if not begun:
            yield self.prefix
        if not np.array_equal(last, self.suffix):
            yield self.suffix

    def _truncated(self, pieces: Iterable[NDArray[np.int32]]) -> tuple[NDArray[np.int32], int]:
        """What of a text fits into a sample, with special tokens, and how many tokens the whole has with these."""
        kept, number = np.array([], dtype=np.int32), self.num_special
        for ids in pieces:
            number += len(ids)
            kept = np.concatenate([kept, ids[: self.seq_len - self.num_special - len(kept)]])
        return self._wrapped(kept), number

    def _wrapped(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.concatenate([self.prefix, ids, self.suffix], dtype=np.int32)

    def _fits(self, num_tokens: int, where: str) -> bool:
        """Whether a sample is made of a text of so many tokens; counts those that are too long."""
        if num_tokens <= self.seq_len:
            return True
        self.num_too_long += 1
        self.longest = max(self.longest, (num_tokens, where), key=lambda pair: pair[0])
        return self.too_long == "truncate"


def _stretches(pieces: Iterable[NDArray[np.int32]], width: int, *, overlap: int) -> Iterator[NDArray[np.int32]]:
    """The tokens of all pieces in stretches of `width`, the last one shorter, each with the last `overlap` of the one
    before it; none of these alone."""
    rest = np.array([], dtype=np.int32)
    for piece in pieces:
        rest = np.concatenate([rest, piece])
        while len(rest) >= width:
            yield rest[:width]
            rest = rest[width - overlap :]
    if len(rest) > overlap:
        yield rest


class _DocumentReader:
    """The documents of all sources, and a count of the rows that are none."""

    def __init__(
        self, sources: Sequence[DocumentSource], maker: SampleMaker, limit: int | None, skip_bad_rows: bool
    ) -> None:
        self.sources = sources
        self.maker = maker
        self._limit = limit
        self.skips_bad_rows = skip_bad_rows
        self.num_good = self.num_empty = 0

    @property
    def has_failed(self) -> bool:
        """Whether a bad row makes all of it useless."""
        return self.maker.bad.number > 0 and not self.skips_bad_rows

    def documents(self) -> Iterator[Document]:
        """Each row that can be read and has text, up to the limit."""
        for where, row in self._rows():
            fields = row if isinstance(row, BadRow) else self.maker.fields(row)
            if isinstance(fields, BadRow):
                self.maker.bad.add(f"{where}: {fields.reason}")
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
                self.maker.check_columns(source, source.columns)
            try:
                for where, row in source.rows(self.maker.columns):
                    if not checked and isinstance(row, dict):
                        self.maker.check_columns(source, list(row))
                        checked = True
                    yield where, row
            except OSError as error:
                raise RequestError(f"cannot read {source.name}", because=error.strerror or str(error)) from None

    @property
    def label_names(self) -> tuple[str, ...]:
        """Of classes given as text; of classes given as numbers those that a source has for them."""
        names = tuple(self.maker.label_names)
        if self.maker.task == "sequence-classification":
            names = names or next((source.label_names for source in self.sources if source.label_names), ())
        return names


def _write(reader: _DocumentReader, folder: Path, pack: bool, fraction: Fraction) -> BuildReport:
    """Write the samples, those of `fraction` of the documents for validation.

    Raises:
        RequestError: as `build_samples`.
    """
    maker = reader.maker
    num_documents = 0
    with ExitStack() as stack:

        def writer(name: str) -> ArrowWriter:
            path = folder / name
            return stack.enter_context(
                PackingWriter(path, maker.task, maker.seq_len) if pack else ArrowWriter(path, maker.task)
            )

        train = writer("train.arrow")
        validation = writer("validation.arrow") if fraction else None
        for documents in grouped_documents(reader.documents()):
            for samples in maker.samples(documents):
                is_held_out = validation is not None and _is_held_out(num_documents, fraction)
                written = (validation if validation is not None and is_held_out else train).write(samples)
                num_documents += written > 0
    label_names = reader.label_names
    num_late = maker.num_refused + maker.num_too_long * (maker.too_long != "truncate")
    report = BuildReport(
        documents=num_documents,
        samples=train.num_samples + (validation.num_samples if validation else 0),
        tokens=train.num_tokens + (validation.num_tokens if validation else 0),
        bad_rows=maker.bad.number,
        first_bad=tuple(maker.bad.first),
        empty_rows=reader.num_empty,
        too_long_rows=maker.num_too_long,
        too_short_rows=reader.num_good - num_documents - num_late,
        label_names=label_names,
        num_labels=max(maker.num_labels, len(label_names)),
        largest_token=maker.largest_token,
        formats=dict(maker.formats),
        targets=maker.num_targets,
        masked_rows=maker.masked.number,
        first_masked=tuple(maker.masked.first),
        merged_rows=maker.whole_rows.num_merged,
        template=maker.whole_rows.template.in_words if maker.whole_rows.template else "",
    )
    _check(report, reader, train)
    return report


def grouped_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """As many at once as are worth a call of the tokenizer."""
    group: list[Document] = []
    num_characters = 0
    for where, fields in documents:
        group.append((where, fields))
        num_characters += sum(
            value.size if isinstance(value, Whole) else len(value)
            for value in fields
            if isinstance(value, str | LongText | Whole)
        )
        if num_characters > _FLUSH_CHARACTERS:
            yield group
            group, num_characters = [], 0
    if group:
        yield group


def _is_held_out(document: int, fraction: Fraction) -> bool:
    """Whether document number `document` is for validation: the first, then evenly spread, ceil(n * fraction) of n."""
    return -(-(document + 1) * fraction // 1) > -(-document * fraction // 1)


def _check(report: BuildReport, reader: _DocumentReader, train: ArrowWriter) -> None:
    """Refuse samples that are not what was asked for, or none."""
    maker = reader.maker
    if not reader.skips_bad_rows:
        report.refuse_bad_rows()
    if report.too_long_rows and maker.too_long == "error":
        tokens, where = maker.longest
        raise RequestError(
            f"{report.too_long_rows} of {report.documents + report.too_long_rows} samples are longer than --seq-len",
            because=f"the longest, {where}, has {tokens} tokens with special ones, --seq-len is {maker.seq_len}",
            hint=f"use --seq-len {tokens}, or --too-long truncate, or --too-long skip",
        )
    if report.samples == 0:
        left_out = [f"{report.bad_rows} rows that cannot be read"] * (report.bad_rows > 0)
        left_out += [f"{report.empty_rows} rows without text"] * (report.empty_rows > 0)
        names = names_of([source.name for source in reader.sources])
        has = "has" if len(reader.sources) == 1 else "have"
        raise RequestError(
            "there is no text in the data",
            because=f"{names} {has} {' and '.join(left_out) or 'no rows'}",
        )
    if train.num_samples == 0:
        raise RequestError(
            "the data cannot be divided into training and validation",
            because=f"it is {plural(report.documents, 'document')}",
            hint="set the validation fraction to 0, or give validation data of its own",
        )
