"""One table of settings: the flags of every command, the keys of frugal.toml, `frugal.plan`'s arguments, the messages.

In frugal.toml planning's settings stand at the top, under the flags' names (`global-batch` or `global_batch`), what
only `frugal train` knows in `[train]`, and keys of `--optimizer`, `--lora` and `--schedule` in tables of these names.

`parse` reads the command line of a rank, `--name value`. frugal's own commands use click.
"""

import os
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from frugal import files
from frugal.config import sample_lengths
from frugal.config.adapters import Lora
from frugal.config.hardware.build_cluster import ClusterSettings, build_cluster
from frugal.config.hardware.calibration import Calibration
from frugal.config.hardware.cluster import GENERIC, Card, Cluster
from frugal.config.layers import LayerModes
from frugal.config.optimizers import Optimizer
from frugal.config.request import Request
from frugal.config.run_settings import LaunchSettings, RunSettings
from frugal.config.setting import SettingRow, flag_of, merged, settings_of, unknown_setting
from frugal.errors import RequestError

PLAN_SETTINGS: Mapping[str, SettingRow] = {**settings_of(Request), **settings_of(ClusterSettings)}
TRAIN_SETTINGS: Mapping[str, SettingRow] = {**settings_of(RunSettings), **settings_of(LaunchSettings)}
SETTINGS: Mapping[str, SettingRow] = {**PLAN_SETTINGS, **TRAIN_SETTINGS}
"""All rows: fields of four dataclasses, see `frugal.config.setting`."""


def understand(
    settings: Mapping[str, Any], calibration: Calibration | None = None, unnamed: Card = GENERIC
) -> tuple[Request, Cluster, tuple[str, ...]]:
    """Return the request, the cluster, and the names of the request's fields that were left to their defaults.

    `settings` maps names in `PLAN_SETTINGS` to values; None is the same as not given. Memory is bytes, or text such as
    `12G`; `mem` may be one value per GPU of the node, `12G,24G` or a list, each less what other processes hold of it,
    `24G-2G`; `gpu` is a card, or one per GPU: `a100-40g,a100-80g`. `hostfile` is a path, see
    `frugal.config.hardware.build_cluster`. `unnamed` stands for GPUs whose card is not named.

    Raises:
        RequestError: an unknown name, a value of the wrong kind, or no GPUs or memory given.
    """
    settings = {name: read(name, value) for name, value in settings.items()}
    request, defaults = requested(settings)
    asked = ClusterSettings(**_of(ClusterSettings, settings))
    return request, build_cluster(asked, request.precision, calibration, unnamed), defaults


def requested(settings: Mapping[str, Any]) -> tuple[Request, tuple[str, ...]]:
    """Return the request alone, as `understand` does, and the names of its defaults."""
    given = _of(Request, {name: read(name, value) for name, value in settings.items()})
    lengths, modes = given.get("lengths"), given.get("activation_checkpointing", "")
    if given.get("pack") and not isinstance(lengths, sample_lengths.Lengths | None):
        raise RequestError(
            "--pack was given together with --lengths",
            because="packed samples have other lengths than the documents in them",
            hint="leave --lengths out, or give the documents themselves with --data",
        )
    if lengths is not None:
        given["lengths"] = sample_lengths.of(lengths)
    for name, kind in (("lora", Lora), ("optimizer", Optimizer)):
        if name in given:
            given[name] = kind.of(given[name])
    if not isinstance(modes, str) or ":" in modes:
        given |= {"activation_checkpointing": "auto", "layer_modes": LayerModes.of(modes)}
    offload, has_more, more = given.get("offload", "").partition(":")
    if has_more:
        given |= {"offload_ratio": float(more)} if offload == "optimizer" else {"nvme_path": more}
        given["offload"] = offload
    defaults = tuple(
        field.name
        for field in fields(Request)
        if field.name not in given
        and (field.name != "document_tokens" or given.get("pack"))
        and (field.default is not None or (field.name == "global_batch" and "global_tokens" not in given))
    )
    return Request(**given), defaults


def _of(owner: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None and name in settings_of(owner)}


def read(name: str, value: Any, *, source: str = "") -> Any:
    """Return the value of a setting of planning, checked like its name; `source` names the file it stands in.

    Raises:
        RequestError: there is no such setting, or it may not have this value.
    """
    place = f" in {source}" if source else ""
    if name not in PLAN_SETTINGS:
        raise unknown_setting(name, value, PLAN_SETTINGS, place=place, command="frugal plan")
    return PLAN_SETTINGS[name].read(value, place)


FILE_NAME = "frugal.toml"


@dataclass(frozen=True)
class TomlFile:
    """The settings of a file, and of `--set`, by their names in Python. `path` is None without a file."""

    path: Path | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


def read_toml(path: Path | None, overrides: Sequence[str] = ()) -> TomlFile:
    """Return the settings in `path`; without one, in `frugal.toml` here, if there is one.

    `overrides` are lines such as `optimizer.beta2=0.99`, which win.

    Raises:
        RequestError: no such file, no TOML, or a setting of planning that is unknown or of the wrong kind.
    """
    if path is None and Path(FILE_NAME).is_file():
        path = Path(FILE_NAME)
    if path is None:
        return settings_of_toml({}, overrides)
    try:
        content = msgspec.toml.decode(files.without_bom(path.read_bytes()))
    except OSError as error:
        raise RequestError(f"cannot read {path}", because=str(error.strerror)) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not TOML", because=str(error)) from None
    return settings_of_toml(content, overrides, path)


def settings_of_toml(content: Mapping[str, Any], overrides: Sequence[str], path: Path | None = None) -> TomlFile:
    """Return the settings of a parsed file and of `overrides`. Raises as `read_toml`."""
    given: dict[str, Any] = {}
    for override in overrides:
        _set(given, override)
    (plan, train), (set_plan, set_train) = _by_name(content, str(path or FILE_NAME)), _by_name(given, "--set")
    return TomlFile(path, merged(SETTINGS, plan, set_plan), merged(SETTINGS, train, set_train))


def _by_name(content: Mapping[str, Any], source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of planning and those of the run by their names in Python, wherever `content` has them."""
    plan = _underscored(content)
    train = _table(plan.pop("train", {}), "train", source)
    schedule = plan.pop("schedule", None)
    if isinstance(schedule, dict):  # of which `warmup` is a setting of its own
        schedule = _underscored(schedule)
        train |= {"warmup": schedule.pop("warmup", train.get("warmup"))}
    train |= {"schedule": schedule} if schedule is not None else {}
    return {name: read(name, value, source=source) for name, value in plan.items()}, train


def _table(value: Any, name: str, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"`{name}` in {source} is {value!r}", because="it must be a table", hint=f"write [{name}]")
    return _underscored(value)


def _underscored(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in table.items()}


def _set(content: dict[str, Any], override: str) -> None:
    """Add one line of `--set` to those before; what is no TOML value is text."""
    path, is_given, value = override.partition("=")
    *tables, key = path.strip().replace("-", "_").split(".")
    if not (is_given and key):
        raise RequestError(f"--set {override} sets nothing", hint="write --set optimizer.beta2=0.99")
    for name in tables:
        table = content.get(name)
        content[name] = content = dict(table) if isinstance(table, dict) else {}
    try:
        content[key] = msgspec.toml.decode(f"value = {value}")["value"]
    except (msgspec.DecodeError, ValueError, RecursionError):
        content[key] = value.strip()


Kinds = Mapping[str, type]
"""Types of arguments by name: int, str, Path, ...; bool is a flag without a value."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(message)


def parse(
    words: Sequence[str], kinds: Kinds, settings: Mapping[str, SettingRow] | None = None, *, needed: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values in `words` by name. `kinds` are a program's own, `settings` rows of the table; a repeatable one
    gives a tuple. `--name value` and `--name=value` are the same, and so are `-` and `_` in a name. `@FILE` stands for
    the words in a file, as `RunSettings.rank_words` writes them.

    DeepSpeed's launcher adds `--local_rank`, which is also in the environment; it is dropped.

    Raises:
        RequestError: an unknown name, a missing or wrong value, or one of `needed` is not there.
    """
    parser = _Parser(allow_abbrev=False, add_help=False, argument_default=SUPPRESS)
    parser.add_argument("--local-rank")
    for name, kind in kinds.items():
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        parser.add_argument(flag_of(name), required=name in needed, **how)
    for name, row in (settings or {}).items():
        how = {"type": row.kind.word_type, "choices": row.choices or None}
        if row.kind.word_type is bool:
            how = {"action": BooleanOptionalAction}
        elif row.is_repeatable:
            how["action"] = "append"
        parser.add_argument(flag_of(name), dest=name, **how)
    expanded = [each for word in words for each in (_words_in(Path(word[1:])) if word[:1] == "@" else [word])]
    values = vars(parser.parse_args([_hyphenated(word) for word in expanded]))
    values.pop("local_rank", None)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _hyphenated(word: str) -> str:
    flag, is_given, value = word.partition("=")
    return f"{flag.replace('_', '-')}{is_given}{value}" if word.startswith("--") else word


def _words_in(path: Path) -> list[str]:
    try:
        return [os.fsdecode(word) for word in files.read_regular(path).split(b"\0")]
    except OSError as error:
        raise RequestError(f"cannot read the arguments in {path}", because=str(error.strerror)) from None
