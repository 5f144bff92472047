"""Flags from the table of settings, and `--help` in groups: what people need first, the rest behind `--help-all`."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import click

from frugal.config.schema import SETTINGS
from frugal.config.settings.other_trainers import answer
from frugal.config.settings.setting import Group, SettingRow, settings_of

FIRST = "What most runs need"
OWN = "this command"
_WIDTH = 80
_TYPES: dict[type, Any] = {int: int, float: float, str: str, Path: click.Path(path_type=Path)}


def _option(row: SettingRow) -> click.Option:
    """The flag of a setting. It has no default: `None` means that neither file nor default has been overruled."""
    shown = row.shown_default
    if shown is None and row.default not in (None, (), False):
        shown = " ".join(row.default) if isinstance(row.default, tuple) else str(row.default)
    values: dict[str, Any] = {"help": row.help + (f"  [default: {shown}]" if shown else "")}
    if row.choices:
        values["type"] = click.Choice(row.choices)
    elif row.has_opposite:
        return click.Option([f"{row.flag}/--no-{row.flag.removeprefix('--')}"], default=None, **values)
    elif row.kind.word_type is bool:
        return click.Option([row.flag], is_flag=True, default=None, **values)
    elif row.group == "launch" and row.least is not None:
        values["type"] = click.IntRange(row.least, row.most)
    else:
        values["type"] = _TYPES[row.kind.word_type]
    return click.Option([row.flag, *row.short], metavar=row.metavar, multiple=row.is_repeatable, **values)


def options(*owners: type, names: Iterable[str] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of these dataclasses of settings, or of some `names` among them, and `--help-all`."""
    rows = {name: row for owner in owners for name, row in settings_of(owner).items()}
    chosen = [row for name, row in rows.items() if names is None or name in names]

    def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
        for row in reversed(chosen):
            _add(command, _option(row))
        return command

    return with_options


def config_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--config`, whose value `cli.planned` reads."""
    return click.option(
        "--config", type=click.Path(path_type=Path), help="Settings file.  [default: frugal.toml, if there]"
    )(command)


def what_if_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--what-if`, whose axes are its arguments."""
    return click.option(
        "--what-if",
        "with_table",
        is_flag=True,
        help="Also a table over GPUs x memory x sample length, predicted by arithmetic. Values may be named after it: "
        "--what-if gpus=1,2,4 mem=12G,24G seq-len=512,1024.  [default: half, the same and twice as much of each]",
    )(command)


def _add(command: Any, option: click.Option) -> None:
    """As click's own decorators do, which keep options at the function until it has become a command."""
    command.__dict__.setdefault("__click_params__", []).append(option)


class SettingsCommand(click.Command):
    """A command whose help is in groups, and that knows other trainers' names of its flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings = {"token_normalize_func": _normalised, **self.context_settings}
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_help_all,
                help="Also list the flags for experts.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, but for flags that another trainer has.

        Raises:
            RequestError: there is one; the message names ours.
        """
        known = {spelling for each in self.get_params(ctx) for spelling in (*each.opts, *each.secondary_opts)}
        for word, after in pairwise((*args, "--")):
            if word == "--":
                break
            flag, is_given, value = word.partition("=")
            if not flag.startswith("--") or _normalised(flag) in known:
                continue
            given = value if is_given else after if not after.startswith("-") else None
            theirs = answer(flag.removeprefix("--"), given, flag, known)
            if theirs is not None:
                raise theirs
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The ten flags that people need first, then the others by group."""
        formatter.width = min(formatter.width, _WIDTH)
        with_experts = bool(ctx.meta.get("frugal.help_all"))
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in (FIRST, OWN, *get_args(Group))}
        num_hidden = 0
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None or isinstance(parameter, click.Argument):  # the usage line has those
                continue
            row = SETTINGS.get(parameter.name or "")
            if row is not None and row.is_expert and not with_experts:
                num_hidden += 1
                continue
            groups[OWN if row is None else FIRST if row.is_first else row.group].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name[:1].upper() + name[1:]):
                    formatter.write_dl(records, col_max=28)
        if num_hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{num_hidden} flags for experts are listed by --help-all.")


def _help_all(ctx: click.Context, _option: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta["frugal.help_all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _normalised(word: str) -> str:
    """Flags may be written with `_` for `-`, as some launchers and trainers do."""
    return word.replace("_", "-")
