"""The command line of a rank: words that launchers hand on, as plain as `--name value`.

`frugal`'s own commands have a library for this; a rank is started hundreds of times at once, by programs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from frugal.config.settings.setting import SettingRow, flag_of
from frugal.errors import RequestError

Kinds = Mapping[str, type]
"""What each argument becomes, by name: int, str, Path, ...; bool is a flag without a value."""


def parse(
    words: Sequence[str], kinds: Kinds, settings: Mapping[str, SettingRow] | None = None, *, needed: Sequence[str] = ()
) -> dict[str, Any]:
    """The values in `words`, by name: `kinds` are a program's own, `settings` rows of the table, of which a repeatable
    one gives a tuple. `--name value` and `--name=value` are the same, and so are `-` and `_` in a name.

    DeepSpeed's launcher adds `--local_rank`, which the environment says, too; it is dropped.

    Raises:
        RequestError: an unknown name, a missing or wrong value, or one of `needed` is not there.
    """
    settings = settings or {}
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        flag, has_value, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        row = settings.get(name)
        kind = kinds.get(name) or (None if row is None else row.kind.word_type)
        if name == "local_rank":
            kind = int
        if kind is None or not flag.startswith("--"):
            raise RequestError(f"no such option {flag}", hint=f"there are {_shown([*kinds, *settings])}")
        if kind is bool:
            values[name] = True
            continue
        if not has_value:
            if not rest:
                raise RequestError(f"{flag} was given without a value")
            value = rest.pop(0)
        read = _read(flag_of(name), kind, value, () if row is None else row.choices)
        values[name] = (*values.get(name, ()), read) if row is not None and row.is_repeatable else read
    values.pop("local_rank", None)
    for name in needed:
        if name not in values:
            raise RequestError(f"{flag_of(name)} was not given")
    return values


def _read(flag: str, kind: type, word: str, choices: Sequence[str]) -> Any:
    if choices and word not in choices:
        raise RequestError(f"{flag} is {word}", because=f"it must be one of {', '.join(choices)}")
    try:
        return kind(word)
    except ValueError:
        raise RequestError(
            f"{flag} is {word}", because=f"it must be a {'whole ' if kind is int else ''}number"
        ) from None


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(flag_of, names))
