"""Samples from documents, in one pass over the sources: check the fields, tokenise, add special tokens, cut to length.

What cannot be a sample is counted, and reported with the samples.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import chain, islice
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frugal.config.run_settings import Format, TrainOn
from frugal.config.sample_lengths import TooLong
from frugal.data import tokenizer
from frugal.data.chat import formats
from frugal.data.chat.formats import Chat, Prompted, TokenIds, Trained, Whole
from frugal.data.chat.template import ChatTemplate
from frugal.data.report import NAMED, BuildReport
from frugal.data.rows import NEEDED, BadRow, Columns, Row, flat, type_in_words
from frugal.data.sources import DocumentSource, names_of, together
from frugal.data.store.arrow_store import ArrowWriter
from frugal.errors import RequestError, refuse
from frugal.units import plural

_FLUSH_CHARACTERS = 1 << 20  # tokenised and written together

_WORD = re.compile(r"[^\W\d_]{2}")
_SHOWN = 4  # columns that a hint names

Document = tuple[str, tuple[Any, ...]]
"""Where it is (`file:line`), and the values of its columns: texts and a class, or one row of a format and its name."""


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """How rows become samples.

    Attributes:
        task: what is trained, as `frugal.models.objectives` names it.
        seq_len: the most tokens of a sample.
        pack: whether documents of a language model that are shorter share a sample.
        columns: names of columns that are not the usual ones.
        limit: the most documents; None: all.
        skip_bad_rows: leave out rows that cannot be read, instead of ending.
        too_long: what becomes of chats, completions, pairs and classes that are too long, which cannot be cut.
        format: of language models' rows whose columns fit several (`chat.formats`); None leaves it to the columns.
        train_on: every token of chats and completions, or the answers alone.
        max_positions: the most tokens that the model reads; None: any number.
    """

    task: str
    seq_len: int
    pack: bool = False
    columns: Columns = field(default_factory=Columns)
    limit: int | None = None
    skip_bad_rows: bool = False
    too_long: TooLong = "error"
    format: Format | None = None
    train_on: TrainOn = "completions"
    max_positions: int | None = None


@dataclass
class SampleMaker:
    """Makes samples of rows, and counts what cannot be one in `report`.

    Attributes:
        known_labels: classes in the order of their numbers; a text that is none of them is an error.
        format: of the rows that are read now.
        labels_are_text: whether classes are given as text; None before the first.
    """

    tokenizer: Any
    settings: SampleSettings
    known_labels: Sequence[str] = ()
    format: Format = "text"
    labels_are_text: bool | None = None
    report: BuildReport = field(default_factory=BuildReport)

    def __post_init__(self) -> None:
        self.task, self.seq_len, self.columns = self.settings.task, self.settings.seq_len, self.settings.columns
        self._trains_on_all = self.settings.train_on == "all"
        self._template: ChatTemplate | None = None
        self.report.label_names = list(self.known_labels)
        self.report.num_labels = len(self.known_labels)
        special, end = self.tokenizer, self.tokenizer.eos_token_id
        begin = end if special.bos_token_id is None else special.bos_token_id  # a separator serves as a beginning too
        around = (special.cls_token_id, special.sep_token_id)
        of_task = {"masked-lm": around, "sequence-classification": around, "seq2seq": (None, end)}
        prefix, suffix = of_task.get(self.task, (begin, end))
        self._prefix = np.array([] if prefix is None else [prefix], dtype=np.int32)
        self._suffix = np.array([] if suffix is None else [suffix], dtype=np.int32)
        self._num_special = len(self._prefix) + len(self._suffix)
        self.report.largest_token = (max(prefix or 0, suffix or 0), "the tokenizer's special tokens")
        shortest = 2 if self.task == "causal-lm" else 1 + self._num_special
        no_mask = self.task == "masked-lm" and special.mask_token_id is None
        refuse(
            (self.seq_len < shortest, f"--seq-len {self.seq_len} leaves no token to learn from", "",
             f"use at least {shortest}"),
            (no_mask, "the tokenizer has no mask token", "masked-lm hides tokens behind it",
             "take the byte tokenizer, or the model's own"),
        )  # fmt: skip

    def check_columns(self, name: str, row_columns: Sequence[str], first: Mapping[str, Any] = {}) -> None:
        """Refuse a source that lacks a needed column. For language models, set `format` by the columns.

        Of the `first` row only the columns with words are told, the longest first.

        Raises:
            RequestError: it lacks one, or its rows fit several formats.
        """
        needed, hint = self.columns.needed(self.task), "if another one has it: --columns {roles}"
        if self.task == "causal-lm":
            its_format = formats.recognised(row_columns, self.columns, name, self.settings.format)
            self.format = its_format or "text"
            if self.format != "text":
                return
            required = set(chain.from_iterable(NEEDED.values()))
            named = {role: column for role, column in self.columns.renamed.items() if role in required}
            needed = named or needed if its_format is None else needed
            hint += ", or of a question and its answer: --columns prompt=NAME,response=NAME"
        others = [str(column) for column in row_columns if column is not None]
        if len(others) == 1 and ";" in others[0]:
            hint = "its fields are separated by `;`: save it with commas, or with tabs as .tsv"
        with_words = (column for column, value in first.items() if isinstance(value, str) and _WORD.search(value))
        words = sorted(with_words, key=lambda column: len(first[column]), reverse=True)
        text = f"; there is text in {', '.join(words[:_SHOWN])}" if words else ""
        text += "".join(
            f"; if {name} is a chat: --columns messages={name},role=NAME,content=NAME"
            for name, each in first.items()
            if isinstance(each, list) and each and isinstance(each[0], dict)
        )
        because = f"its columns are {', '.join(others)}" if others else "it has no columns"
        roles = ",".join(f"{role}=NAME" for role, column in needed.items() if column not in row_columns)
        refuse(*(
            (column not in row_columns, f"{name} has no column `{column}`", because, hint.format(roles=roles) + text)
            for column in needed.values()
        ))  # fmt: skip

    def documents(self, rows: Iterable[Row]) -> Iterator[Document]:
        """Yield each row that can be read and has text; the others are counted."""
        for where, row in rows:
            fields = row if isinstance(row, BadRow) else self._fields(flat(row))
            if isinstance(fields, BadRow):
                self.report.add_bad(f"{where}: {fields.reason}")
            elif any(isinstance(each, str) and not each.strip() for each in fields):
                self.report.empty_rows += 1
            else:
                yield where, fields

    def _fields(self, row: dict[str, Any]) -> tuple[Any, ...] | BadRow:
        if self.format != "text":
            whole = formats.read(self.columns.standard(row), self.format)
            return whole if isinstance(whole, BadRow) else (whole, self.format)
        values = []
        for role, column in self.columns.needed(self.task).items():
            if column not in row:
                return BadRow(f"no `{column}`")
            value = row[column]
            if role == "label":
                value = self._label(value)
                if isinstance(value, BadRow):
                    return value
            elif not isinstance(value, str):
                return BadRow(f"`{column}` is {type_in_words(value)}, not text")
            elif not formats.is_utf_8(value):
                return BadRow(f"`{column}` is not UTF-8 text")
            values.append(value)
        return tuple(values)

    def _label(self, value: Any) -> int | BadRow:
        """Return the number of a class. Numbers stand for themselves, names are numbered as they come."""
        column, names = self.columns.label, self.report.label_names
        digits = value.removesuffix(".0") if isinstance(value, str) else ""
        if digits.isascii() and digits.isdigit() and value not in self.known_labels:
            value = value if self.labels_are_text else int(digits)
        elif isinstance(value, float) and value.is_integer():  # as pandas writes them where some are missing
            value = int(value)
        if not isinstance(value, int | str):
            return BadRow(
                f"`{column}` is {type_in_words(value)}, not a class: a whole number from 0, or a name (regression "
                "needs a model of your own)"
            )
        if self.labels_are_text is None:
            self.labels_are_text = isinstance(value, str)
        if isinstance(value, str) != self.labels_are_text:
            return BadRow(f"`{column}` is `{value}`, other rows have {'names' if self.labels_are_text else 'numbers'}")
        if isinstance(value, str):
            if value not in names and self.known_labels:
                return BadRow(f"`{column}` is `{value}`, the classes are {', '.join(self.known_labels)}")
            if value not in names:
                names.append(value)
            value = names.index(value)
        elif value < 0:
            return BadRow(f"`{column}` is {value}, classes are numbered from 0")
        self.report.num_labels = max(self.report.num_labels, value + 1)
        return int(value)

    def samples(self, documents: Sequence[Document]) -> Iterator[Iterable[dict[str, Any]]]:
        """Yield the samples of each document; their tokens are views of the document's, shape `(tokens,)`, int32.

        A document without a sample is counted in `report`.
        """
        if self.task == "causal-lm":
            yield from self._of_language_model(documents)
            return
        first = self._encoded([(where, fields[0]) for where, fields in documents])
        if self.task == "seq2seq":
            second = self._encoded([(where, fields[1]) for where, fields in documents], as_target=True)
            for (where, _), source, target in zip(documents, first, second, strict=True):
                ids, labels = self._truncated(source), self._truncated(target)
                sample = {"input_ids": ids, "labels": labels, "length": max(len(ids), len(labels))}
                is_kept = self._fits(max(len(source), len(target)) + self._num_special, where)
                yield [sample] if is_kept else []
        elif self.task == "sequence-classification":
            for (where, (_, label)), text in zip(documents, first, strict=True):
                ids = self._truncated(text)
                is_kept = self._fits(len(text) + self._num_special, where)
                yield [{"input_ids": ids, "label": label, "length": len(ids)}] if is_kept else []
        else:  # windows do not overlap, and each has its special tokens
            for text in first:
                windows = map(self._truncated, _windows(text, self.seq_len - self._num_special, overlap=0))
                yield self._running([{"input_ids": window, "length": len(window)} for window in windows])

    def _of_language_model(self, documents: Sequence[Document]) -> Iterator[Iterable[dict[str, Any]]]:
        """Yield running text in windows, other rows whole.

        Windows overlap by one token, which is a target in the first and context in the second.
        """
        texts = self._encoded([(where, row) for where, (row, *_) in documents if isinstance(row, str)])
        prompted = [row for _, (row, *_) in documents if isinstance(row, Prompted)]
        prompts = iter(tokenizer.encode(self.tokenizer, [row.prompt for row in prompted]))
        completed = iter(tokenizer.encode(self.tokenizer, [row.prompt + row.completion for row in prompted]))
        chats = [(where, row) for where, (row, *_) in documents if isinstance(row, Chat)]
        rendered: Iterator[Trained | BadRow] = iter(())
        if chats:
            self._template = self._template or ChatTemplate(self.tokenizer, chats[0][0])
            rendered = iter(
                [self._template.encode(chat, where, train_on_all=self._trains_on_all) for where, chat in chats]
            )
            self.report.template = self._template.in_words
        for where, (row, *kind) in documents:
            match row:
                case str():
                    ids = next(texts)
                    begin = self._prefix[: not np.array_equal(ids[:1], self._prefix)]
                    end = self._suffix[: not np.array_equal(ids[-1:], self._suffix)]
                    windows = _windows(np.concatenate([begin, ids, end]), self.seq_len, overlap=1)
                    self._count("text", sum(len(window) - 1 for window in windows))
                    yield self._running([{"input_ids": window, "length": len(window)} for window in windows])
                case Chat():
                    yield self._whole(row, kind[0], next(rendered), where)
                case Prompted():
                    yield self._whole(row, kind[0], self._completion(next(prompts), next(completed)), where)
                case TokenIds():
                    yield self._whole(row, kind[0], (row.ids, row.trained | self._trains_on_all), where)

    def _completion(self, prompt: NDArray[np.int32], whole: NDArray[np.int32]) -> Trained:
        """Return the whole text's tokens between the tokenizer's first and the end token.

        The completion begins where they are no longer those of the prompt alone.
        """
        prompt, whole = (
            ids if np.array_equal(ids[:1], self._beginning) else np.concatenate([self._beginning, ids])
            for ids in (prompt, whole)
        )
        end = self.tokenizer.eos_token_id
        if end is not None and (not len(whole) or whole[-1] != end):
            whole = np.append(whole, np.int32(end))
        both = min(len(prompt), len(whole))
        same = prompt[:both] == whole[:both]
        first = both if same.all() else int(np.argmin(same))
        self.report.merged_rows += first < len(prompt)
        return whole, (np.arange(len(whole)) >= first) | self._trains_on_all

    @cached_property
    def _beginning(self) -> NDArray[np.int32]:
        """Return the token that the tokenizer itself puts before a text, if there is one."""
        around, begin = self.tokenizer("")["input_ids"], self.tokenizer.bos_token_id
        return np.array([begin] if begin is not None and around[:1] == [begin] else [], dtype=np.int32)

    def _whole(self, row: Whole, kind: Format, encoded: Trained | BadRow, where: str) -> list[dict[str, Any]]:
        if isinstance(encoded, BadRow):
            self.report.add_bad(f"{where}: {encoded.reason}")
            return []
        ids, trained = encoded
        self._note_tokens(ids, where)
        if not trained[1:].any():
            self.report.add_masked(f"{where}: {formats.why_masked(row)}")
            return []
        if not self._fits(len(ids), where):
            return []
        ids, trained = ids[: self.seq_len], trained[: self.seq_len]
        if not trained[1:].any():
            self.report.add_masked(f"{where}: its first target comes after the {self.seq_len} of --seq-len")
            return []
        self._count(kind, int(trained[1:].sum()))
        self.report.empty_answers += formats.answers_nothing(row)
        return [{"input_ids": ids, "trained": trained, "length": len(ids)}]

    def _count(self, kind: Format, num_targets: int) -> None:
        self.report.formats[kind] = self.report.formats.get(kind, 0) + 1
        self.report.targets += num_targets

    def _running(self, windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.report.too_short_rows += not windows
        return windows

    def _encoded(self, texts: Sequence[tuple[str, str]], *, as_target: bool = False) -> Iterator[NDArray[np.int32]]:
        encoded = tokenizer.encode(self.tokenizer, [text for _, text in texts], as_target=as_target)
        for (where, _), ids in zip(texts, encoded, strict=True):
            self._note_tokens(ids, where)
            yield ids

    def _note_tokens(self, ids: NDArray[np.int32], where: str) -> None:
        if len(ids) and ids.max() > self.report.largest_token[0]:
            self.report.largest_token = (int(ids.max()), where)
        if len(ids) and ids.min() < 0:
            raise RequestError(f"the tokenizer makes {ids.min()} of {where}", because="a token is at least 0")

    def _truncated(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.concatenate([self._prefix, ids[: self.seq_len - self._num_special], self._suffix], dtype=np.int32)

    def _fits(self, num_tokens: int, where: str) -> bool:
        """Count a text that is too long. Return whether a sample is made of it."""
        if num_tokens <= self.seq_len:
            return True
        self.report.too_long_rows += 1
        if num_tokens > self.report.longest[0]:
            self.report.longest = (num_tokens, where)
        return self.settings.too_long == "truncate"


def _windows(ids: NDArray[np.int32], width: int, *, overlap: int) -> list[NDArray[np.int32]]:
    """Return tokens in windows of `width`, the last one shorter, each with the last `overlap` of the one before it."""
    return [ids[start : start + width] for start in range(0, len(ids) - overlap, width - overlap)]


def write_samples(
    sources: Sequence[DocumentSource],
    maker: SampleMaker,
    folder: Path,
    validation_fraction: Fraction,
) -> BuildReport:
    """Write `train.arrow` and `validation.arrow` (if asked) into `folder`.

    Raises:
        RequestError: as `frugal.data.corpus.load_corpus`.
        OSError: it cannot be written.
    """
    report, settings = maker.report, maker.settings
    packs_of = maker.seq_len if settings.pack else None
    with ExitStack() as stack:
        train = validation = stack.enter_context(ArrowWriter(folder / "train.arrow", maker.task, packs_of))
        if validation_fraction:
            validation = stack.enter_context(ArrowWriter(folder / "validation.arrow", maker.task, packs_of))
        good = islice(maker.documents(_checked_rows(maker, sources)), settings.limit)
        # After a bad row that ends all, the others are counted only.
        wanted = (document for document in good if settings.skip_bad_rows or not report.bad_rows)
        for samples in chain.from_iterable(map(maker.samples, grouped(wanted))):
            # For validation the first, then evenly spread, ceil(n * fraction) of n.
            number = report.documents
            is_held_out = ceil((number + 1) * validation_fraction) > ceil(number * validation_fraction)
            report.documents += (validation if is_held_out else train).write(samples) > 0
    writers = {train, validation}
    report.samples = sum(writer.num_samples for writer in writers)
    report.tokens = sum(writer.num_tokens for writer in writers)
    if maker.task == "sequence-classification" and not report.label_names:
        report.label_names = list(next((source.label_names for source in sources if source.label_names), ()))
        report.num_labels = max(report.num_labels, len(report.label_names))
    report.refuse_rows(settings.skip_bad_rows, settings.too_long, maker.seq_len, settings.max_positions)
    left_out = " and ".join(report.left_out(settings.too_long)) or "no rows"
    refuse(
        (report.samples == 0, "there is no text in the data",
         f"{names_of([source.name for source in sources])}: {left_out}",
         "give data with text, or name the column that has it: --columns text=NAME"),
        (maker.task == "sequence-classification" and report.num_labels == 1, "the data have one class",
         f"all {plural(report.samples, 'sample')} are of it", None),
        (train.num_samples == 0, "the data cannot be divided into training and validation",
         f"it is {plural(report.documents, 'document')}",
         "--validation-data 0% trains on all of it, --validation-data PATH validates on other data"),
    )  # fmt: skip
    return report


def _checked_rows(maker: SampleMaker, sources: Sequence[DocumentSource]) -> Iterator[Row]:
    """Yield the rows of all sources; each source's columns are checked before its first good row.

    After a source without a needed column, of the others only the columns are looked at, and rows that cannot be read.

    Raises:
        RequestError: with all sources that lack a column.
    """
    problems: list[RequestError] = []
    for source in sources:
        try:
            rows = source.rows(maker.columns)
            for where, row in rows:
                if isinstance(row, dict):
                    maker.check_columns(source.name, source.columns or tuple(flat(row)), flat(row))
                    if source.fingerprint.startswith("text:"):
                        maker.report.running = [*maker.report.running, source.name][:NAMED]
                    yield from (
                        each for each in chain([(where, row)], rows) if not (problems and isinstance(each[1], dict))
                    )
                    break
                yield where, row
            else:
                if source.columns is not None:
                    maker.check_columns(source.name, source.columns)
        except RequestError as error:
            problems.append(error)
        except OSError as error:
            problems.append(RequestError(f"cannot read {source.name}", because=error.strerror or str(error)))
    if problems:
        raise together(problems, () if maker.settings.skip_bad_rows else maker.report.first_bad)


def grouped(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield as many documents at once as are worth a call of the tokenizer."""
    group: list[Document] = []
    num_characters = 0
    for document in documents:
        group.append(document)
        for value in document[1]:
            if isinstance(value, Whole):
                num_characters += value.size
            elif isinstance(value, str):
                num_characters += len(value)
        if num_characters > _FLUSH_CHARACTERS:
            yield group
            group, num_characters = [], 0
    if group:
        yield group
