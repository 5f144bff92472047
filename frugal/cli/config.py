"""`frugal.toml`: the same settings as the flags, in a file.

Planning's settings stand at the top, under the flags' names (`global-batch` or `global_batch`). A table `[train]`
holds what only `frugal train` knows.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from frugal.errors import RequestError
from frugal.planning.settings import check

FILE_NAME = "frugal.toml"


@dataclass(frozen=True)
class Config:
    """What a file sets. `path` is None where there is no file."""

    path: Path | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


def read(path: Path | None) -> Config:
    """The settings in `path`; without one, in `frugal.toml` here, if there is one.

    Raises:
        RequestError: no such file, no TOML, or a setting that is unknown or of the wrong kind.
    """
    if path is None:
        path = Path(FILE_NAME)
        if not path.is_file():
            return Config()
    try:
        content = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise RequestError(f"cannot read {path}", because=str(error.strerror)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not TOML", because=str(error)) from None
    train = content.pop("train", {})
    if not isinstance(train, dict):
        raise RequestError(f"`train` in {path} is {train!r}", because="it must be a table", hint="write [train]")
    plan = {_name(key): value for key, value in content.items()}
    for name, value in plan.items():
        check(name, value, source=str(path))
    return Config(path, plan, {_name(key): value for key, value in train.items()})


def _name(key: str) -> str:
    """A flag's spelling, as a Python name."""
    return key.replace("-", "_")
