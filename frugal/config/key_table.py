"""Tables: settings that have several keys, such as `--lora`, `--optimizer` and `--schedule`.

A table is text on a command line (`adamw,beta2=0.99`), a table of frugal.toml (`[optimizer]`), one key of it in
`--set optimizer.beta2=0.99`, and a dict in Python. What these say of the same table is put together key by key.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args, get_origin

import msgspec

from frugal.errors import RequestError
from frugal.units import parse_count

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
            key = self._known(str(written))
            if key in given:
                raise self.wrong(key, "there twice", "it has one value")
            given[key] = self._converted(key, each)
        return given

    def text(self, table: Any) -> str:
        """Return the text of a dataclass: its name, and the keys that are not at their defaults."""
        words = [table.name]
        for each in fields(table):
            value = getattr(table, each.name)
            if each.name != "name" and value != each.default:
                words.append(f"{each.name.replace('_', '-')}={str(value).lower()}")
        return ",".join(words)

    def wrong(self, key: str, value: Any, because: str) -> RequestError:
        """Return the error for the value of a key."""
        return RequestError(f"`{key.replace('_', '-')}` of {self.flag} is {value}", because=because)

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
            elif pairs and get_origin(self.types[self._known(pairs[-1][0])]) is list:
                pairs[-1] = pairs[-1][0], f"{pairs[-1][1]},{key}"
            else:
                self._known(key)
                raise RequestError(f"`{key}` of {self.flag} has no value", hint=f"write {self.flag} {self.example}")
        return pairs

    def has(self, key: str) -> bool:
        """Return True if there is such a key, by its name or another trainer's."""
        return key.replace("-", "_") in (*self.types, *self.others)

    def _known(self, written: str) -> str:
        """Return the key that is meant.

        Raises:
            RequestError: there is no such key.
        """
        key = written.replace("-", "_")
        key = self.others.get(key, key)
        if not self.has(key):
            near = next(iter(get_close_matches(key, [*self.types, *self.others], n=1)), "")
            near = self.others.get(near, near).replace("_", "-")
            hint = f"did you mean `{near}`?" if near else f"write {self.flag} {self.example}"
            raise RequestError(
                f"{self.flag} knows no `{written}`",
                because=f"it has {', '.join(self.types).replace('_', '-')}",
                hint=f"it is a setting of its own: {self.settings[key]}" if key in self.settings else hint,
            )
        return key

    def _converted(self, key: str, value: Any) -> Any:
        kind, is_text = self.types[key], isinstance(value, str)
        plain = get_args(kind)[0] if NoneType in get_args(kind) else kind
        if is_text and value.lower() in self.refused:
            because, hint = self.refused[value.lower()]
            raise RequestError(f"{self.flag} {value} is impossible", because=because, hint=hint)
        if is_text and plain is int:
            with suppress(RequestError):  # then the type is wrong
                value = parse_count(value)
        if is_text and get_origin(plain) is list:
            value = value.split(",")
        try:
            return msgspec.convert(value, kind, strict=not is_text)
        except msgspec.ValidationError:
            words = _WORDS.get(get_origin(plain) or plain, f"one of {', '.join(map(str, get_args(plain)))}")
            raise self.wrong(key, value if is_text else repr(value), f"it must be {words}") from None
