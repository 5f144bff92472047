"""From documents to samples: check the fields, tokenise, add special tokens, cut to length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from frugal.errors import RequestError
from frugal.training import tokenizing
from frugal.training.sources import Bad, Columns, Source, kind_of

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

    def check(self, source: Source, row_columns: Sequence[str]) -> None:
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
        first = tokenizing.encode(self.tokenizer, [fields[0] for _, fields in documents])
        if self.task == "seq2seq":
            second = tokenizing.encode(self.tokenizer, [fields[1] for _, fields in documents], as_target=True)
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
