"""Pages of the reference that are generated from the code, so that they cannot contradict it.

A line `<!-- generated: NAME -->` in a page is replaced by the result of the function of that name in `GENERATED`.
MkDocs calls `on_page_markdown`; `tests/test_docs.py` uses the same functions without MkDocs.
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import click

from frugal import errors
from frugal.cli import COMMANDS, cli
from frugal.config.adapters import LORA, Lora
from frugal.config.learning_rate import SCHEDULE, Schedule
from frugal.config.optimizers import OPTIMIZER, Optimizer
from frugal.config.other_names import OTHER_NAMES
from frugal.config.request import Request
from frugal.config.schema import PLAN_SETTINGS, SETTINGS
from frugal.config.setting import Group
from frugal.planning import plan

_MARKER = re.compile(r"<!-- generated: (\w+) -->")
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {6,}.*)*)", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with the parts that are generated from the code."""
    return _MARKER.sub(lambda marker: GENERATED[marker[1]](), markdown)


def flags() -> str:
    """Return every command with its flags; planning flags are listed once."""
    context = cli.make_context("frugal", [], resilient_parsing=True)
    commands = {name: _command(context, name) for name in COMMANDS}
    planning = set.intersection(*({option.name for option in _options(commands[name])} for name in PLANNERS))
    planning.discard("help_all")
    shared = [option for option in _options(commands["plan"]) if option.name in planning]
    parts = ["## Planning flags", "", "`frugal plan`, `frugal explain`, `frugal dryrun` and `frugal train` have these."]
    parts += _by_group(shared)
    for name, command in commands.items():
        plans = name in PLANNERS
        own = [option for option in _options(command) if not plans or option.name not in planning]
        usage = " ".join(command.collect_usage_pieces(click.Context(command, info_name=name, parent=context)))
        parts += ["", f"## frugal {name}", "", inspect.cleandoc(command.help or ""), "", f"`frugal {name} {usage}`", ""]
        parts += ["The [planning flags](#planning-flags), and:"] if plans else []
        parts += _by_group(own)
    return "\n".join(parts)


PLANNERS = ("plan", "explain", "dryrun", "train")


def _command(context: click.Context, name: str) -> click.Command:
    command = cli.get_command(context, name)
    assert command is not None
    return command


def _options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option)]


def _by_group(options: Sequence[click.Option]) -> list[str]:
    """Return a table for each group of `--help`, first the flags that are no settings."""
    lines: list[str] = []
    for group in ("", *typing.get_args(Group)):
        rows = [option for option in options if _group(option) == group]
        if rows:
            lines += ["", f"**{group.capitalize()}**", ""] if group else [""]
            lines += _table(("flag", "meaning"), map(_flag, rows))
    return lines


def _group(option: click.Option) -> str:
    row = SETTINGS.get(option.name or "")
    return "" if row is None else row.group


def _flag(option: click.Option) -> tuple[str, str]:
    """Return a flag as in a help text: its spelling with its values, and its meaning."""
    record = option.get_help_record(click.Context(click.Command("any")))
    if record is None:  # click hides it
        record = ", ".join(option.opts), option.help or ""
    row = SETTINGS.get(option.name or "")
    for_experts = " *(`--help-all`)*" if row is not None and row.is_expert else ""
    return f"`{record[0]}`", _cell(record[1]) + for_experts


def file_settings() -> str:
    """Return the settings that have no flag, by their place in `frugal.toml`."""
    rows = [(f"`{row.flag}`", _cell(row.help)) for row in SETTINGS.values() if not row.is_flag]
    return "\n".join(_table(("key", "meaning"), rows))


def table_keys() -> str:
    """Return the keys of settings that have several, by their flags."""
    rows = []
    for kind, table in ((Optimizer, OPTIMIZER), (Schedule, SCHEDULE), (Lora, LORA)):
        meanings = dict(_ATTRIBUTE.findall(inspect.cleandoc(kind.__doc__ or "")))
        meanings["r"] = meanings.get("rank", "")
        rows += [(f"`{table.flag}`", f"`{key.replace('_', '-')}`", _cell(meanings[key])) for key in table.types]
    return "\n".join(_table(("flag", "key", "meaning"), rows))


def other_names() -> str:
    """Return the answers to flags of other trainers."""
    rows = [
        (f"`--{name.replace('_', '-')}`", other.whose, _cell(other.hint.replace("{}", other.stand_in)))
        for name, other in OTHER_NAMES.items()
    ]
    return "\n".join(_table(("flag", "whose", "here"), rows))


def plan_schema() -> str:
    """Return the number in `schema`."""
    return f"Its `schema` is {plan.SCHEMA}."


def plan_fields() -> str:
    """Return every field of `plan.json` with its type, by dataclass."""
    parts: list[str] = []
    for part in _parts(plan.Plan):
        text = inspect.cleandoc(part.__doc__ or "")
        prose, _, listed = text.partition("Attributes:\n")
        meanings = {name: " ".join(meaning.split()) for name, meaning in _ATTRIBUTE.findall(listed)}
        if part is Request:
            meanings = {name: row.help for name, row in PLAN_SETTINGS.items()}
        hints = typing.get_type_hints(part)
        header = ("field", "type", "meaning") if meanings else ("field", "type")
        rows = [
            (f"`{field.name}`", _type(hints[field.name]), _cell(meanings.get(field.name, "")))[: len(header)]
            for field in dataclasses.fields(part)
        ]
        parts += ["", f"## {part.__name__}", "", prose.strip(), "", *_table(header, rows)]
    return "\n".join(parts)


def _parts(whole: type) -> list[type]:
    """Return the dataclasses that `whole` is made of, itself first, each once."""
    made_of, waiting = [], [whole]
    while waiting:
        part = waiting.pop(0)
        if part in made_of:
            continue
        made_of.append(part)
        for hint in typing.get_type_hints(part).values():
            waiting += [each for each in _inside(hint) if dataclasses.is_dataclass(each)]
    return made_of


def _inside(hint: Any) -> Iterable[type]:
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for inner in typing.get_args(hint):
        yield from _inside(inner)


def _type(hint: Any) -> str:
    """Return a type hint for a table; dataclasses link to their section."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type, inner))
    if origin is typing.Literal:
        return " or ".join(f"`{value!r}`" for value in inner)
    if origin in (tuple, list, Sequence):
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"object of {_type(inner[1])}"
    return {"NoneType": "null", "str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        getattr(hint, "__name__", str(hint)), getattr(hint, "__name__", str(hint))
    )


def exit_codes() -> str:
    """Return the exit code of each error."""
    kinds = sorted(errors.FrugalError.__subclasses__(), key=lambda kind: kind.exit_code)
    rows = [(str(kind.exit_code), f"`{kind.__name__}`", _cell(inspect.cleandoc(kind.__doc__ or ""))) for kind in kinds]
    return "\n".join(_table(("code", "error", "meaning"), rows))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *lines] if lines else ["It has none of its own."]


def _cell(text: str) -> str:
    """Return text that is safe in a table."""
    return re.sub(r"[|\[\]]", r"\\\g<0>", " ".join(text.split()))


GENERATED = {
    "flags": flags,
    "file_settings": file_settings,
    "table_keys": table_keys,
    "other_names": other_names,
    "plan_schema": plan_schema,
    "plan_fields": plan_fields,
    "exit_codes": exit_codes,
}
