"""One table of settings: the flags of every command, the keys of frugal.toml, `frugal.plan`'s arguments, the messages.

In frugal.toml planning's settings stand at the top, under the flags' names (`global-batch` or `global_batch`), what
only `frugal train` knows in `[train]`, and keys of `--optimizer`, `--lora` and `--schedule` in tables of these names.
What file, `--set` and flags say is put together by `merged`, and `frugal.config.setting.build` makes dataclasses of it.

`parse` reads the command line of a rank, `--name value`. frugal's own commands use click.
"""

import inspect
import json
import os
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from frugal import files
from frugal.config.hardware.build_cluster import ClusterSettings, build_cluster
from frugal.config.hardware.calibration import Calibration
from frugal.config.hardware.cluster import GENERIC, Card, Cluster
from frugal.config.layers import LayerModes
from frugal.config.other_names import unknown_setting
from frugal.config.request import Request
from frugal.config.run_settings import SAMPLE_NAMES, LaunchSettings, RunSettings
from frugal.config.sample_lengths import Lengths
from frugal.config.setting import SettingRow, build, flag_of, owned, settings_of
from frugal.errors import RequestError, failure, refuse

PLAN_SETTINGS: Mapping[str, SettingRow] = {**settings_of(Request), **settings_of(ClusterSettings)}
TRAIN_SETTINGS: Mapping[str, SettingRow] = {**settings_of(RunSettings), **settings_of(LaunchSettings)}
SETTINGS: Mapping[str, SettingRow] = {**PLAN_SETTINGS, **TRAIN_SETTINGS}
"""All rows: fields of four dataclasses, see `frugal.config.setting`."""

_SHORT = {
    short.removeprefix("--").replace("-", "_"): name for name, row in PLAN_SETTINGS.items() for short in row.short
}
"""`lr` -> `learning_rate`."""

FILE_NAME = "frugal.toml"
_NO_TOML = (msgspec.DecodeError, ValueError, RecursionError)


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
    for name, value in settings.items():
        _row_of(name, value, PLAN_SETTINGS, "")
    request, defaults = requested(settings)
    return request, build_cluster(build(ClusterSettings, settings), request.precision, calibration, unnamed), defaults


def requested(settings: Mapping[str, Any]) -> tuple[Request, tuple[str, ...]]:
    """Return the request alone, as `understand` does, and the names of its defaults. Other settings are left out."""
    rows = settings_of(Request)
    given = {name: rows[name].read(value) for name, value in owned(Request, settings).items() if name in rows}
    modes = given.get("activation_checkpointing", "")
    refuse(
        (
            given.get("pack") and not isinstance(given.get("lengths"), Lengths | None),
            "--pack was given together with --lengths",
            "packed samples have other lengths than the documents in them",
            "leave --lengths out, or give the documents themselves with --data",
        )
    )
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
    return build(Request, given), defaults


def _row_of(name: str, value: Any, rows: Mapping[str, SettingRow], place: str) -> SettingRow:
    """Return the row of a setting of the command that `rows` are of.

    Raises:
        RequestError: there is no such setting.
    """
    if name not in rows:
        command = "frugal plan" if rows is PLAN_SETTINGS else "frugal train"
        raise unknown_setting(name, value, rows, place=place, command=command)
    return rows[name]


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of all layers: later ones win, in a table key by key. None and () are the same as not given.

    A layer that says --steps overrules what those before it say of --epochs, and the other way round.

    Raises:
        RequestError: the keys of a table are wrong.
    """
    result: dict[str, Any] = {}
    for layer in layers:
        given = {name: value for name, value in layer.items() if value not in (None, ())}
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if one in given:
                result.pop(other, None)
        for name, value in given.items():
            if name in SETTINGS and SETTINGS[name].kind.table is not None:
                value = SETTINGS[name].read(value)
            before = result.get(name)
            result[name] = before | value if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def read_toml(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings in `path` by name; without one, in `frugal.toml` here, if there is one.

    `overrides` are lines such as `optimizer.beta2=0.99`, which win.

    Raises:
        RequestError: no such file, no TOML, or a setting that is unknown or of the wrong kind.
    """
    content: dict[str, Any] = {}
    if path is None and Path(FILE_NAME).is_file():
        path = Path(FILE_NAME)
    if path is not None:
        with (
            failure(f"cannot read {path}", OSError, hint="give a settings file with --config"),
            failure(f"{path} is not TOML", *_NO_TOML),
        ):
            content = msgspec.toml.decode(files.without_bom(path.read_bytes()))
    return settings_of_toml(content, overrides, str(path))


def settings_of_toml(content: Mapping[str, Any], overrides: Sequence[str], source: str = FILE_NAME) -> dict[str, Any]:
    """Return the settings of a parsed file and of `overrides`. Raises as `read_toml`."""
    return merged(_by_name(content, source), *(_by_name(_override(each), "--set") for each in overrides))


def _by_name(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of planning and those of the run by their names in Python, wherever `content` has them."""
    plan = _underscored(content)
    train = plan.pop("train", {})
    refuse((not isinstance(train, dict), f"`train` in {source} is {train!r}", "it must be a table", "write [train]"))
    train = _underscored(train)
    schedule = plan.pop("schedule", None)
    if isinstance(schedule, dict):  # of which `warmup` is a setting of its own
        schedule = _underscored(schedule)
        train |= {"warmup": schedule.pop("warmup", train.get("warmup"))}
    train |= {"schedule": schedule} if schedule is not None else {}
    places = ((plan, PLAN_SETTINGS, f" in {source}"), (train, TRAIN_SETTINGS, f" in [train] of {source}"))
    return {
        name: _row_of(name, value, rows, place).read(value, place)
        for table, rows, place in places
        for name, value in table.items()
    }


def _underscored(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in table.items()}


def _override(line: str) -> dict[str, Any]:
    """Return the TOML of one line of `--set`, whose value is text where it is no TOML."""
    key, is_given, value = line.partition("=")
    for each in (value, json.dumps(value.strip(), ensure_ascii=False)) if is_given else ():
        with suppress(*_NO_TOML):
            return dict(msgspec.toml.decode(f"{key} = {each}"))
    raise RequestError(f"--set {line} sets nothing", hint="write --set optimizer.beta2=0.99")


def in_full(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `frugal.plan` by their full names, and paths as text."""
    return {
        _SHORT.get(name, name): os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in settings.items()
        if not (name in _SHORT and value is None)
    }


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `function` with every setting in place of `**settings`, for `help` and notebooks."""
    own = inspect.signature(function)
    named = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    named += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=row.default)
        for name, row in {**PLAN_SETTINGS, **{name: TRAIN_SETTINGS[name] for name in SAMPLE_NAMES}}.items()
    ]
    return own.replace(parameters=named)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(message)


def parse(
    words: Sequence[str],
    kinds: Mapping[str, type],
    settings: Mapping[str, SettingRow] | None = None,
    *,
    needed: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the values in `words` by name. `kinds` are the types of a program's own (int, str, Path; bool is a flag
    without a value), `settings` rows of the table, whose values stay text for `build`. `--name value` and
    `--name=value` are the same.

    DeepSpeed's launcher adds `--local_rank`, which is also in the environment; it is dropped.

    Raises:
        RequestError: an unknown name, a missing or wrong value, or one of `needed` is not there.
    """
    parser = _Parser(allow_abbrev=False, add_help=False, argument_default=SUPPRESS)
    parser.add_argument("--local_rank")
    for name, kind in kinds.items():
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        parser.add_argument(flag_of(name), required=name in needed, **how)
    for name, row in (settings or {}).items():
        how = {"action": "append" if row.is_repeatable else "store"}
        if row.kind.word_type is bool:
            how = {"action": BooleanOptionalAction}
        parser.add_argument(flag_of(name), dest=name, **how)
    values = vars(parser.parse_args(words))
    values.pop("local_rank", None)
    return values
