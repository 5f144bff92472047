"""One setting: a field of a dataclass, from which its flag, its key in frugal.toml, its checks and its messages come.

    seq_len: int = setting(1024, "Maximum tokens per sample.", "model and batch", least=1, is_first=True)

The annotation is its type, `setting` describes it. `frugal.config.schema` collects all in one table. What only experts
change has no flag: it is a key of a table, or stands in frugal.toml, or in `--set`.

A setting with several keys, such as `--lora`, `--optimizer` and `--schedule`, is a table: text on a command line
(`adamw,beta2=0.99`), a table of frugal.toml (`[optimizer]`), one key of it in `--set optimizer.beta2=0.99`, and a dict
in Python. What these say of the same table is put together key by key.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from frugal.config.other_names import answer
from frugal.errors import RequestError
from frugal.units import parse_count

Group = Literal["model and batch", "hardware", "optimizer", "data", "run", "memory and speed", "launch"]
"""Sections of `--help`, in their order."""

MOST_COUNT = 10**15
"""The largest value of a key that counts: beyond any run, and exact in every format."""

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", list: "names"}


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """A setting of several keys.

    Attributes:
        flag: its flag.
        types: the type of each key. A text may begin with a word without a key, which is the key `name`.
        example: a text.
        others: other trainers' names of keys.
        settings: flags of settings of their own that people look for among the keys.
        refused: values that people ask for and frugal cannot provide: the reason, and what to do instead.
    """

    flag: str
    types: Mapping[str, Any]
    example: str
    others: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def read(self, value: Any) -> dict[str, Any]:
        """Return the keys that are given, with values of their types; `value` is a mapping, or else its text counts.

        Raises:
            RequestError: a key is unknown, given twice or without a value, or a value is of another type.
        """
        given: dict[str, Any] = {}
        for written, each in value.items() if isinstance(value, Mapping) else self._pairs(str(value)):
            key = self._known(str(written), each)
            if key in given:
                shown = f"`{key.replace('_', '-')}` of {self.flag}"
                raise RequestError(f"{shown} is there twice", because="it has one value")
            given[key] = self._converted(key, each)
        return given

    def text(self, table: Any) -> str:
        """Return the text of a dataclass: its name, and the keys that are not at their defaults."""
        words = [table.name]
        for each in dataclasses.fields(table)[1:]:
            value = getattr(table, each.name)
            if value != each.default:
                words.append(f"{each.name.replace('_', '-')}={str(value).lower()}")
        return ",".join(words)

    def _pairs(self, text: str) -> list[tuple[str, str]]:
        """Return the keys and values of a text; words without `=` behind a key of several names are more of these."""
        pairs: list[tuple[str, str]] = []
        for word in filter(None, (part.strip() for part in text.split(","))):
            key, is_given, value = (part.strip() for part in word.partition("="))
            if is_given:
                pairs.append((key, value))
            elif self.types.get(key.replace("-", "_")) is bool:
                pairs.append((key, "true"))
            elif not pairs and "name" in self.types:
                pairs.append(("name", key))
            elif pairs and get_origin(self.types[self._known(*pairs[-1])]) is list:
                pairs[-1] = pairs[-1][0], f"{pairs[-1][1]},{key}"
            else:
                self._known(key, None)
                raise RequestError(f"`{key}` of {self.flag} has no value", hint=f"write {self.flag} {self.example}")
        return pairs

    def _known(self, written: str, value: Any) -> str:
        """Return the key that is meant, whose `value` is for the message.

        Raises:
            RequestError: there is no such key.
        """
        key = written.replace("-", "_")
        key = self.others.get(key, key)
        if key in self.types:
            return key
        near = next(iter(get_close_matches(key, [*self.types, *self.others], n=1)), "")
        near = self.others.get(near, near).replace("_", "-")
        hint = f"did you mean `{near}`?" if near else f"write {self.flag} {self.example}"
        raise answer(key, value, f"`{written}` of {self.flag}") or RequestError(
            f"{self.flag} knows no `{written}`",
            because=f"it has {', '.join(self.types).replace('_', '-')}",
            hint=f"it is a setting of its own: {self.settings[key]}" if key in self.settings else hint,
        )

    def _converted(self, key: str, value: Any) -> Any:
        kind, is_text = self.types[key], isinstance(value, str)
        plain = get_args(kind)[0] if NoneType in get_args(kind) else kind
        if is_text and value.lower() in self.refused:
            because, hint = self.refused[value.lower()]
            raise RequestError(f"{self.flag} {value} is impossible", because=because, hint=hint)
        shown = value if is_text else repr(value)
        if is_text and plain is int:
            with suppress(RequestError):  # then the type is wrong
                value = parse_count(value)
        if is_text and get_origin(plain) is list:
            value = value.split(",")
        try:
            return msgspec.convert(value, kind, strict=not is_text)
        except msgspec.ValidationError:
            words = _WORDS.get(get_origin(plain) or plain, f"one of {', '.join(map(str, get_args(plain)))}")
            raise RequestError(
                f"`{key.replace('_', '-')}` of {self.flag} is {shown}", because=f"it must be {words}"
            ) from None


@dataclass(frozen=True)
class Kind:
    """A type of values.

    Attributes:
        word_type: converts a word of a command line.
        must_be: in words.
        accepts: returns True for a value of this kind, as a file or a caller may give it.
        thousand: what `k` stands for in a count.
        table: has the keys of a value of several.
        make: converts an accepted value to that of the field.
    """

    word_type: type
    must_be: str
    accepts: Callable[[Any], bool]
    thousand: int | None = None
    table: KeyTable | None = None
    make: Callable[[Any], Any] = lambda value: value

    @classmethod
    def of(cls, table: KeyTable, make: Callable[[Any], Any]) -> "Kind":
        """Return the kind of a table's values, of which `make` makes a dataclass."""
        return cls(
            str,
            f"text such as {table.example} or a table of these",
            lambda value: isinstance(value, str | Mapping) or is_dataclass(value),
            table=table,
            make=make,
        )


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def _paths(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


LENGTH = Kind(int, "a whole number of tokens", _is(int), thousand=1024)
"""`128k` is 131072, as in the names of models."""

SIZE = Kind(str, "an amount such as 12G", _is(str, int))
SIZES = Kind(str, "an amount such as 12G", _is(str, int, list, tuple))
_KINDS = {
    int: Kind(int, "a whole number", _is(int), thousand=1000),
    float: Kind(float, "a number", _is(int, float)),
    bool: Kind(bool, "true or false", lambda value: isinstance(value, bool)),
    str: Kind(str, "text", _is(str)),
    Path: Kind(Path, "text", _is(str, Path), make=Path),
    tuple: Kind(
        str,
        "a path or a list of paths",
        lambda value: bool(_paths(value)) and all(isinstance(each, str) for each in _paths(value)),
        make=_paths,
    ),
}


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """A row of the table.

    Attributes:
        name: as in Python.
        help: one sentence with the unit.
        group: section of `--help`.
        kind: values that are allowed.
        choices: all allowed values, if these can be listed.
        default: None leaves the decision to frugal.
        shown_default: in words, where `default` does not say it.
        least: the smallest number allowed.
        most: the largest number allowed.
        is_flag: False: it stands in `[train]` of frugal.toml alone, or in `--set`.
        is_first: one of the few that most people need; they lead `--help`.
        is_expert: listed by `--help-all` only.
        is_repeatable: its flag may be given several times.
        has_opposite: there is also `--no-NAME`, because None differs from False.
        short: other spellings of its flag.
        metavar: stands for the value in `--help`.
    """

    name: str
    help: str
    group: Group
    kind: Kind
    choices: tuple[str, ...]
    default: Any
    is_repeatable: bool
    has_opposite: bool
    shown_default: str | None = None
    least: int | None = None
    most: int | None = None
    is_flag: bool = True
    is_first: bool = False
    is_expert: bool = False
    short: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """Its spelling on a command line, and in messages: of one without a flag the key of `--set`."""
        return flag_of(self.name).replace("--", "--" if self.is_flag else "train.", 1)

    def read(self, value: Any, place: str = "") -> Any:
        """Return a value, as a number where it is a count such as `4M`, and the keys of a table.

        Raises:
            RequestError: it is of a wrong type, or none of the choices, or a key is; `place` says where it stands.
        """
        if value is None:
            return None
        if isinstance(value, str) and self.kind.thousand:
            with suppress(RequestError):  # then it is no number
                value = parse_count(value, self.kind.thousand)
        if not self.kind.accepts(value):
            raise RequestError(f"`{self.name}`{place} is {value!r}", because=f"it must be {self.kind.must_be}")
        if self.kind.table is None:
            return value
        try:
            return self.kind.table.read(value)
        except RequestError as error:
            raise RequestError(f"{error.what}{place}", because=error.because, hint=error.hint) from None


def setting(default: Any, help_text: str, group: Group, **row: Any) -> Any:
    """Return a dataclass field that is a setting; `row` are other attributes of its `SettingRow`."""
    return field(default=default, metadata={"help": help_text, "group": group, **row})


@cache
def settings_of(owner: type) -> Mapping[str, SettingRow]:
    """Return the rows of a dataclass by name; its annotations say kind and choices. Other fields are no settings."""
    annotations = get_type_hints(owner)
    return {
        each.name: _row(each.name, annotations[each.name], each.default, **each.metadata)
        for each in dataclasses.fields(owner)
        if each.metadata
    }


def _row(name: str, annotation: Any, default: Any, *, kind: Kind | None = None, **row: Any) -> SettingRow:
    plain, is_optional = annotation, False
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not NoneType]
        is_optional = len(parts) < len(get_args(annotation))
        plain = parts[0]
    choices: tuple[str, ...] = ()
    if kind is None and get_origin(plain) is Literal:
        choices = get_args(plain)
        kind = Kind(str, f"one of {', '.join(choices)}", lambda value: value in choices)
    return SettingRow(
        name=name,
        default=default,
        kind=kind or _KINDS[get_origin(plain) or plain],
        choices=choices,
        is_repeatable=get_origin(plain) is tuple,
        has_opposite=plain is bool and is_optional,
        **row,
    )


Owner = TypeVar("Owner")


def build(owner: type[Owner], settings: Mapping[str, Any]) -> Owner:
    """Return a dataclass of settings from those of `settings` that are its own; None and () are the same as not given.

    Raises:
        RequestError: one is of a wrong type, or they contradict each other.
    """
    given, rows = owned(owner, settings), settings_of(owner)  # type: ignore[arg-type]  # a type is hashable
    given |= {name: rows[name].kind.make(rows[name].read(value)) for name, value in given.items() if name in rows}
    return owner(**given)


def owned(owner: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `settings` that are fields of a dataclass and given."""
    names = [each.name for each in dataclasses.fields(owner)]
    return {
        name: value
        for name, value in settings.items()
        if name in names and value is not None and (not isinstance(value, tuple) or value)  # an array is not compared
    }


def check_sizes(asked: Any, hint: str | None = None) -> None:
    """Check that all numbers of a dataclass of settings are finite and in bounds; `{flag}` in `hint` is the flag.

    Raises:
        RequestError: one is not.
    """
    for row in settings_of(asked.__class__).values():
        value = getattr(asked, row.name)
        if value is None or row.least is None:
            continue
        if not row.least <= value <= (sys.float_info.max if row.most is None else row.most):
            is_float = row.kind.word_type is float
            bound = f"at least {row.least}" if row.most is None else f"from {row.least} to {row.most}"
            raise RequestError(
                f"{row.flag} is {f'{value:g}' if is_float else value}",
                because=f"it must be {'a finite number, ' if is_float else ''}{bound}",
                hint=None if is_float or hint is None else hint.format(flag=row.flag),
            )


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")
