"""One table of settings: the flags of every command, the keys of frugal.toml, `frugal.plan`'s arguments, the messages.

In frugal.toml planning's settings stand at the top, under the flags' names (`global-batch` or `global_batch`). A table
`[train]` holds what only `frugal train` knows.

`parse` reads the command line of a rank, words that launchers hand on, as plain as `--name value`. frugal's own
commands have a library for this; a rank is started hundreds of times at once, by programs.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from frugal import files
from frugal.config import sample_lengths
from frugal.config.adapters import Lora
from frugal.config.hardware.build_cluster import ClusterSettings, build_cluster
from frugal.config.hardware.calibration import Calibration
from frugal.config.hardware.cluster import GENERIC, Card, Cluster
from frugal.config.layers import LayerModes
from frugal.config.request import Request
from frugal.config.run_settings import LaunchSettings, RunSettings
from frugal.config.setting import SettingRow, flag_of, settings_of, unknown_setting
from frugal.errors import RequestError

PLAN_SETTINGS: Mapping[str, SettingRow] = {**settings_of(Request), **settings_of(ClusterSettings)}
TRAIN_SETTINGS: Mapping[str, SettingRow] = {**settings_of(RunSettings), **settings_of(LaunchSettings)}
SETTINGS: Mapping[str, SettingRow] = {**PLAN_SETTINGS, **TRAIN_SETTINGS}
"""All rows. A row is a field of one of four dataclasses, see `frugal.config.setting`."""


def understand(
    settings: Mapping[str, Any], calibration: Calibration | None = None, unnamed: Card = GENERIC
) -> tuple[Request, Cluster, tuple[str, ...]]:
    """The request, the cluster, and the names of the request's fields that were left to their defaults.

    `settings` maps names in `PLAN_SETTINGS` to values; None is the same as not given. Memory and disk are bytes, or
    text such as `12G`; `mem` may be one value a GPU of the node, `12G,24G` or a list, and so may `held`, what others
    keep of it; `gpu` is a card, or one a GPU: `a100-40g,a100-80g`. `hostfile` is a path, see
    `frugal.config.hardware.build_cluster`. `calibration` is that of the devices, if they have one and it is wanted.
    `unnamed` is what a GPU is taken for that no card is named of.

    Raises:
        RequestError: an unknown name, a value of the wrong kind, or no GPUs or memory given.
    """
    request, defaults = requested(settings)
    asked = ClusterSettings(**_of(ClusterSettings, settings))
    return request, build_cluster(asked, request.precision, calibration, unnamed), defaults


def requested(settings: Mapping[str, Any]) -> tuple[Request, tuple[str, ...]]:
    """Of `understand` what is asked for, without what there is to run it on. Raises as `understand`."""
    for name, value in settings.items():
        check(name, value)
    given = _of(Request, settings)
    if given.get("pack") and not isinstance(given.get("lengths"), sample_lengths.Lengths | None):
        raise RequestError(
            "--pack was given together with --lengths",
            because="packed samples have other lengths than the documents in them",
            hint="leave --lengths out, or give the documents themselves with --data",
        )
    if "lengths" in given:
        given["lengths"] = sample_lengths.of(given["lengths"])
    if "lora" in given:
        given["lora"] = Lora.of(given["lora"])
    if "layer_modes" in given:
        given["layer_modes"] = LayerModes.of(given["layer_modes"])
    defaults = tuple(
        field.name
        for field in fields(Request)
        if field.name not in given
        and (field.default is not None or (field.name == "global_batch" and "global_tokens" not in given))
    )
    return Request(**given), defaults


def _of(owner: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `settings` that are given and are `owner`'s."""
    return {name: value for name, value in settings.items() if value is not None and name in settings_of(owner)}


def check(name: str, value: Any, *, source: str = "") -> None:
    """Whether planning has a setting of this name, and it may have this value; `source` names the file it stands in.

    Raises:
        RequestError: it has not, or it may not.
    """
    place = f" in {source}" if source else ""
    if name not in PLAN_SETTINGS:
        raise unknown_setting(name, value, PLAN_SETTINGS, place=place, command="frugal plan")
    PLAN_SETTINGS[name].check(value, place)


FILE_NAME = "frugal.toml"


@dataclass(frozen=True)
class TomlFile:
    """What a file sets. `path` is None where there is no file."""

    path: Path | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


def read_toml(path: Path | None) -> TomlFile:
    """The settings in `path`; without one, in `frugal.toml` here, if there is one.

    Raises:
        RequestError: no such file, no TOML, or a setting of planning that is unknown or of the wrong kind.
    """
    if path is None:
        path = Path(FILE_NAME)
        if not path.is_file():
            return TomlFile()
    try:
        content = msgspec.toml.decode(files.without_bom(path.read_bytes()))
    except OSError as error:
        raise RequestError(f"cannot read {path}", because=str(error.strerror)) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not TOML", because=str(error)) from None
    train = content.pop("train", {})
    if not isinstance(train, dict):
        raise RequestError(f"`train` in {path} is {train!r}", because="it must be a table", hint="write [train]")
    plan = {key.replace("-", "_"): value for key, value in content.items()}
    for name, value in plan.items():
        check(name, value, source=str(path))
    return TomlFile(path, plan, {key.replace("-", "_"): value for key, value in train.items()})


Kinds = Mapping[str, type]
"""What each argument becomes, by name: int, str, Path, ...; bool is a flag without a value."""


def parse(
    words: Sequence[str], kinds: Kinds, settings: Mapping[str, SettingRow] | None = None, *, needed: Sequence[str] = ()
) -> dict[str, Any]:
    """The values in `words`, by name: `kinds` are a program's own, `settings` rows of the table, of which a repeatable
    one gives a tuple. `--name value` and `--name=value` are the same, and so are `-` and `_` in a name. `@FILE` stands
    for the words in a file, as `RunSettings.rank_words` writes them.

    DeepSpeed's launcher adds `--local_rank`, which the environment says, too; it is dropped.

    Raises:
        RequestError: an unknown name, a missing or wrong value, or one of `needed` is not there.
    """
    settings = settings or {}
    values: dict[str, Any] = {}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word.startswith("@"):
            rest.extendleft(reversed(_words_in(Path(word[1:]))))
            continue
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        row = settings.get(name)
        if (opposite := settings.get(name.removeprefix("no_"))) is not None and opposite.has_opposite and row is None:
            values[opposite.name] = False
            continue
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
            value = rest.popleft()
        read = _read(flag_of(name), kind, value, () if row is None else row.choices)
        if row is not None and row.is_repeatable:
            values.setdefault(name, []).append(read)
        else:
            values[name] = read
    values.pop("local_rank", None)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name in needed:
        if name not in values:
            raise RequestError(f"{flag_of(name)} was not given")
    return values


def _words_in(path: Path) -> list[str]:
    try:
        return [os.fsdecode(word) for word in files.read_regular(path).split(b"\0")]
    except OSError as error:
        raise RequestError(f"cannot read the arguments in {path}", because=str(error.strerror)) from None


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
