"""One setting: a field of a dataclass, from which its flag, its key in frugal.toml, its checks and its messages come.

    seq_len: int = setting(1024, "Tokens in the longest sample.", "model and batch", least=1, is_first=True)

The annotation says what a value may be, `setting` what it is for. `frugal.config.schema` collects them in one table.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from frugal.config.settings.other_trainers import answer
from frugal.errors import RequestError

Group = Literal["model and batch", "hardware", "optimizer", "data", "run", "memory and speed", "launch"]
"""Of flags in `--help`, in the order in which they are printed."""


@dataclass(frozen=True)
class Kind:
    """What a value may be. `word_type` is what one word of a command line becomes."""

    word_type: type
    must_be: str
    accepts: Callable[[Any], bool]


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def _is_paths(value: Any) -> bool:
    words = value if isinstance(value, list | tuple) else [value]
    return bool(words) and all(isinstance(word, str) for word in words)


SIZE = Kind(str, "an amount such as 12G", _is(str, int))
SIZES = Kind(str, "an amount such as 12G", _is(str, int, list, tuple))
_KINDS = {
    int: Kind(int, "a whole number", _is(int)),
    float: Kind(float, "a number", _is(int, float)),
    bool: Kind(bool, "true or false", lambda value: isinstance(value, bool)),
    str: Kind(str, "text", _is(str)),
    Path: Kind(Path, "text", _is(str, Path)),
    tuple: Kind(str, "a path or a list of paths", _is_paths),
}


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """A row of the table.

    Attributes:
        name: as in Python and in frugal.toml.
        help: what it is for, with its unit.
        group: where `--help` lists it.
        kind: what a value may be, unless `choices` are named.
        choices: all values there are.
        default: None leaves it to frugal.
        shown_default: in words, where `default` does not say it.
        least: the smallest number allowed.
        most: the largest number allowed.
        is_first: one of the ten that most people need; they lead `--help`.
        is_expert: only `--help-all` lists it.
        is_repeatable: a flag may be given several times.
        has_opposite: there is `--no-NAME`, too, because None is not the same as False.
        short: other spellings of its flag.
        metavar: what stands for the value in `--help`.
    """

    name: str
    help: str
    group: Group
    kind: Kind
    choices: tuple[str, ...]
    default: Any
    shown_default: str | None
    least: int | None
    most: int | None
    is_first: bool
    is_expert: bool
    is_repeatable: bool
    has_opposite: bool
    short: tuple[str, ...]
    metavar: str | None

    @property
    def flag(self) -> str:
        """Its spelling on a command line."""
        return flag_of(self.name)

    def check(self, value: Any, place: str = "") -> None:
        """Whether it may have this value; None is the same as not given. `place` says where it stands.

        Raises:
            RequestError: it may not.
        """
        if value is None:
            return
        if self.choices:
            is_right, must_be = value in self.choices, f"one of {', '.join(self.choices)}"
        else:
            is_right, must_be = self.kind.accepts(value), self.kind.must_be
        if not is_right:
            raise RequestError(f"`{self.name}`{place} is {value!r}", because=f"it must be {must_be}")

    def check_size(self, value: Any, hint: str | None = None) -> None:
        """Whether a number is large enough.

        Raises:
            RequestError: it is not.
        """
        if value is None or self.least is None:
            return
        if self.kind.word_type is float and not (isfinite(value) and value >= self.least):
            raise RequestError(
                f"{self.flag} is {value:g}", because=f"it must be a finite number, at least {self.least}"
            )
        if value < self.least:
            raise RequestError(f"{self.flag} is {value}", because=f"it must be at least {self.least}", hint=hint)
        if self.most is not None and value > self.most:
            raise RequestError(f"{self.flag} is {value}", because=f"it must be at most {self.most}", hint=hint)


def setting(
    default: Any,
    help_text: str,
    group: Group,
    *,
    kind: Kind | None = None,
    shown_default: str | None = None,
    least: int | None = None,
    most: int | None = None,
    is_first: bool = False,
    is_expert: bool = False,
    short: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is a setting; see `SettingRow` for what the parameters mean."""
    row = {
        "help": help_text, "group": group, "kind": kind, "shown_default": shown_default, "least": least, "most": most,
        "is_first": is_first, "is_expert": is_expert, "short": short, "metavar": metavar,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=row)


@cache
def settings_of(owner: type) -> Mapping[str, SettingRow]:
    """The rows of a dataclass by name; its annotations say kind and choices."""
    annotations = get_type_hints(owner)
    return {
        field.name: _row(field.name, annotations[field.name], field.default, **field.metadata)
        for field in dataclasses.fields(owner)
    }


def _row(name: str, annotation: Any, default: Any, *, kind: Kind | None, **row: Any) -> SettingRow:
    plain, is_optional = annotation, False
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not NoneType]
        is_optional = len(parts) < len(get_args(annotation))
        plain = parts[0]
    is_choice, is_repeatable = get_origin(plain) is Literal, get_origin(plain) is tuple
    return SettingRow(
        name=name,
        default=default,
        kind=kind or _KINDS[str if is_choice else tuple if is_repeatable else plain],
        choices=get_args(plain) if is_choice else (),
        is_repeatable=is_repeatable,
        has_opposite=plain is bool and is_optional,
        **row,
    )


def check_sizes(asked: Any, hint: str | None = None) -> None:
    """Whether all numbers of a dataclass of settings are large enough; `{flag}` in `hint` is the flag.

    Raises:
        RequestError: one is not.
    """
    for row in settings_of(asked.__class__).values():
        row.check_size(getattr(asked, row.name), None if hint is None else hint.format(flag=row.flag))


def unknown_setting(name: str, value: Any, known: Iterable[str], *, place: str, command: str) -> RequestError:
    """No setting has this name; what it is called here, if another trainer has one of it."""
    theirs = answer(name, value, f"`{name}`{place}")
    if theirs is not None:
        return theirs
    close = get_close_matches(name, list(known), n=1)
    return RequestError(
        f"unknown setting `{name}`{place}",
        hint=f"did you mean `{close[0]}`?" if close else f"see `{command} --help`",
    )


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")
