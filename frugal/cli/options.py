"""Flags from the table of settings, and `--help` in groups, with the flags for experts behind `--help-all`.

`read_settings` puts flags and frugal.toml together, `collect` adds this machine's devices and the lengths of the data,
`plans` searches.
"""

import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, get_args

import click

from frugal.cli.terminal import PATIENCE, waiting
from frugal.config.hardware import calibration as calibrations
from frugal.config.hardware.calibration import Calibration
from frugal.config.hardware.cluster import GENERIC, Card, Cluster, of_driver, recognise_card, similar_cards
from frugal.config.hardware.local_host import has_cuda_driver, held_on_gpus
from frugal.config.other_names import answer
from frugal.config.request import Request
from frugal.config.run_settings import SAMPLE_NAMES
from frugal.config.schema import PLAN_SETTINGS, SETTINGS, merged, read_toml, settings_of_toml, understand
from frugal.config.setting import Group, SettingRow, flag_of, settings_of
from frugal.dryrun.cache import Cache, digest
from frugal.dryrun.planner import plans_here, with_lengths
from frugal.errors import RequestError, failure
from frugal.planning.plan import Plan
from frugal.units import format_seconds, parse_count

FIRST = "What most runs need"
OWN = "this command"
_OF_TRAIN = ", which `frugal train` has"
_WIDTH = 80
_TYPES: dict[type, Any] = {float: float, str: str, Path: click.Path(path_type=Path)}


class Count(click.types.IntParamType):
    """A whole number such as 512, 128k, 4M or 2B; `k` stands for `thousand`."""

    def __init__(self, thousand: int = 1000) -> None:
        self.thousand = thousand

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        try:
            return parse_count(value, self.thousand) if isinstance(value, str) else value
        except RequestError as error:
            cards = " or ".join(similar_cards(re.sub(r"^\d+ ?[x*] ?", "", value)))
            self.fail(
                f"`{value}` is a card, and no number of them; write --gpu {cards}, and --gpus N"
                if cards
                else f"{error.what}; {error.hint}",
                param,
                ctx,
            )


def _option(row: SettingRow) -> click.Option:
    """Return the flag of a setting, whose default `None` leaves the value to file and table."""
    shown = row.shown_default
    if shown is None and row.default not in (None, (), False):
        shown = " ".join(row.default) if isinstance(row.default, tuple) else str(row.default)
    names = [row.flag, *row.short]
    values: dict[str, Any] = {"metavar": row.metavar, "multiple": row.is_repeatable}
    if row.kind.table is not None:
        values["type"] = row.read
    elif row.choices:
        values["type"] = click.Choice(row.choices)
    elif row.has_opposite:
        names, values = [f"{row.flag}/--no-{row.flag.removeprefix('--')}"], {"default": None}
    elif row.kind.word_type is bool:
        values = {"is_flag": True, "default": None}
    else:
        values["type"] = Count(row.kind.thousand) if row.kind.thousand else _TYPES[row.kind.word_type]
    shown = f"  [default: {shown}]" if shown else ""
    return click.Option(names, help=row.help + shown, hidden=row.is_expert, **values)


def options(*owners: type, names: Iterable[str] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of these dataclasses of settings, or of some `names` among them."""
    every = [row for owner in owners for row in settings_of(owner).values() if row.is_flag]
    rows = [row for row in reversed(every) if names is None or row.name in names]

    def with_options(command: Any) -> Any:  # as click's own decorators do, which keep options at the function
        command.__dict__.setdefault("__click_params__", []).extend(map(_option, rows))
        return command

    return with_options


def config_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--config` and `--set`, which `read_settings` reads."""
    command = click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE",
        help="One setting of the settings file, such as optimizer.beta2=0.99; repeatable.",
    )(command)  # fmt: skip
    return click.option(
        "--config", type=click.Path(path_type=Path), help="Settings file.  [default: frugal.toml, if there]"
    )(command)


what_if_option = click.option(
    "--what-if",
    "with_table",
    is_flag=True,
    help="Also a table over GPUs x memory x sample length, predicted by arithmetic. Values may be named after it: "
    "--what-if gpus=1,2,4 mem=12G,24G seq-len=512,1024.  [default: half, the same and twice as much of each]",
)
"""Gives a command `--what-if`, whose axes are its arguments."""

verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show everything: memory by category, reasons, strategies, assumptions.",
)


class SettingsCommand(click.Command):
    """A command with help in groups, which knows other trainers' names of its flags."""

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
        """Parse as click does, and answer flags that another trainer has.

        Raises:
            RequestError: there is one, or a setting that is only a key of frugal.toml; the message names frugal's flag.
        """
        words = [*args, "-"]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not error.option_name.startswith("--"):
                raise
            name = error.option_name.removeprefix("--").replace("-", "_")
            number = next(i for i, word in enumerate(words) if _normalised(word.partition("=")[0]) == error.option_name)
            flag, _, given = words[number].partition("=")
            if not given and not words[number + 1].startswith("-"):
                given = words[number + 1]
            known = {spelling for each in self.get_params(ctx) for spelling in (*each.opts, *each.secondary_opts)}
            asked = (answer(each, given or None, flag, known) for each in (name, name.removeprefix("no_")))
            theirs = next(filter(None, asked), None)
            row = SETTINGS.get(name.removeprefix("no_"))
            if theirs is None and row is not None and not row.is_flag:
                if row.kind.word_type is bool:
                    given = "false" if name.startswith("no_") else "true"
                theirs = RequestError(
                    f"{flag} is no flag",
                    because="this setting stands in frugal.toml, or in --set",
                    hint=f"--set {row.flag}={given or 'VALUE'}" + ("" if "--set" in known else _OF_TRAIN),
                )
            raise theirs or error from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags that most runs need first, then the others by group."""
        formatter.width = min(formatter.width, _WIDTH)
        with_experts = bool(ctx.meta.get("frugal.help_all"))
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in (FIRST, OWN, *get_args(Group))}
        num_hidden = 0
        for parameter in self.get_params(ctx):
            if not isinstance(parameter, click.Option):  # the usage line has arguments
                continue
            parameter.hidden = parameter.hidden and not with_experts
            num_hidden += parameter.hidden
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            row = SETTINGS.get(parameter.name or "")
            groups[OWN if row is None else FIRST if row.is_first else row.group].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name[:1].upper() + name[1:]):
                    formatter.write_dl(records, col_max=28)
        if num_hidden:
            formatter.write_paragraph()
            formatter.write_text(
                f"{num_hidden} flags for experts are listed by --help-all; frugal.toml and --set have more keys."
            )


def _help_all(ctx: click.Context, _option: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta["frugal.help_all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _normalised(word: str) -> str:
    """Accept `_` for `-` in flags, as some launchers and trainers write them."""
    return word.replace("_", "-")


def read_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a command's `values` are: flags win over `--set`, then frugal.toml.

    Raises:
        RequestError: the file cannot be read, a setting in it is wrong, or flags contradict it.
    """
    flags = {name: value for name, value in values.items() if name in SETTINGS}
    overrides = values.get("overrides", ())
    settings = merged(read_toml(values.get("config"), overrides), flags)
    if flags.get("data") and merged(settings_of_toml({}, overrides), flags).get("lengths") is None:
        settings.pop("lengths", None)  # of the file, which the flag overrules
    elif flags.get("data"):
        raise RequestError(
            "--data was given together with --lengths",
            because="both say how long the samples are",
            hint="leave one of them out",
        )
    return settings


def plans(
    request: Request, cluster: Cluster, defaults: tuple[str, ...], *, will_dry_run: bool = True
) -> Generator[Plan]:
    """Yield drafts and last the plan for a request, with a line on the terminal while the user waits: what is done, and
    how many seconds that took here the last time that there was such a line, if possible for the same model.

    `will_dry_run`: whether more than the first is wanted.

    Raises: as `frugal.dryrun.planner.plan`.
    """
    made, plan = plans_here(request, cluster, defaults, will_dry_run=will_dry_run), None
    what = f"{request.model}{' with LoRA' if request.lora is not None else ''}"
    doing, hint, cache = "tracing {} and searching", "; its trace is kept for other plans", Cache.of_user()
    while plan is None or plan.is_draft:
        keys, start = [digest("seconds", doing, *of_model) for of_model in ([what], [])], monotonic()
        last = next(filter(None, (cache.read(key, tuple[str, float]) for key in keys)), None)
        with waiting(doing.format(what) + (f", the last took {format_seconds(last[1])} ({last[0]})" if last else hint)):
            plan = next(made)
        for key in keys if monotonic() - start > PATIENCE else ():
            cache.write(key, (what, monotonic() - start))
        yield plan
        doing, hint = "dry-running {}", ""


def planned(request: Request, cluster: Cluster, defaults: tuple[str, ...]) -> Plan:
    """Return the plan for a request."""
    return list(plans(request, cluster, defaults))[-1]


def collect(settings: Mapping[str, Any], *, asks_data: bool = True) -> tuple[Request, Cluster, tuple[str, ...]]:
    """Return request, cluster, and the names of the request's defaults; `asks_data`: with the lengths of the data.

    Where neither GPUs nor memory are named, this machine's GPUs are taken. A calibration of these devices is used.

    Raises:
        RequestError: the request is wrong, or the data cannot be used.
    """
    asked = {name: value for name, value in settings.items() if name in PLAN_SETTINGS}
    is_described = bool({"gpu", "hostfile"} & asked.keys()) or {"gpus", "mem"} <= asked.keys()
    is_described = is_described or "," in str(asked.get("mem", "")) or asked.get("device", "cuda") != "cuda"
    asked, calibration, unnamed = with_devices(asked, None if is_described else this_machine(asked.get("gpus")))
    request, cluster, defaults = understand(asked, calibration, unnamed)
    return with_data(request, settings, defaults) if asks_data else request, cluster, defaults


def with_data(request: Request, settings: Mapping[str, Any], defaults: tuple[str, ...]) -> Request:
    """Return the request with the lengths of the data that settings name, if any. Raises as `collect`."""
    samples = {name: settings[name] for name in SAMPLE_NAMES if name in settings}
    with waiting("tokenising the data") if samples else nullcontext():
        return with_lengths(request, samples, defaults)


Here = tuple[dict[str, Any], str | None, Card]
"""Settings that describe GPUs, the driver's name of them, and the card that stands for those of no known card."""


def with_devices(asked: dict[str, Any], here: Here | None) -> tuple[dict[str, Any], Calibration | None, Card]:
    """Return settings with those of the GPUs `here`, the calibration of these devices, and the card of unnamed ones.

    A calibration that cannot be read is reported on standard error.
    """
    of_here, gpu_name, unnamed = here or ({}, None, GENERIC)
    asked = of_here | asked
    calibration, notes = calibrations.chosen(asked, gpu_name)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    return asked, calibration, unnamed


def this_machine(num_gpus: int | None) -> Here:
    """Return what describes `num_gpus` of this machine's GPUs (None: all).

    Settings and name are empty if torch sees no GPU; the name also where GPUs differ.
    """
    if not has_cuda_driver():
        return {}, None, GENERIC
    import torch  # takes seconds: only where flags leave the question open, and there may be a GPU

    num_here = torch.cuda.device_count()
    if not num_here:
        return {}, None, GENERIC
    import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

    cards = [torch.cuda.get_device_properties(i) for i in range(num_here)]
    settings, name, unnamed = described(cards, held_on_gpus(), num_gpus)
    return settings | {"host_mem": psutil.virtual_memory().total}, name, unnamed


def described(cards: Sequence[Any], held: Mapping[str, int], num_gpus: int | None) -> Here:
    """Return what describes `num_gpus` of these cards (None: all). Of several kinds that no table has, the card that
    takes the most memory stands for all.

    `cards` are torch's properties of them; `held` has the bytes that processes use of each, by UUID.
    """
    cards = cards[:num_gpus]
    if num_gpus is not None and num_gpus > len(cards):
        cards = [min(cards, key=lambda card: card.total_memory)] * num_gpus  # a plan for a larger machine of this kind
        held = {}
    names = [recognise_card(card.name, card.total_memory) for card in cards]
    unnamed = GENERIC
    if None in names:
        unnamed = of_driver(
            cards[names.index(None)].name,
            min((card.major, card.minor) for card in cards),
            max(card.multi_processor_count * card.max_threads_per_multi_processor for card in cards),
        )
    sizes = [(card.total_memory, held.get(str(card.uuid), 0)) for card in cards]
    settings: dict[str, Any] = {
        "gpus": len(cards),
        "mem": [f"{total}-{in_use}" if in_use else total for total, in_use in sizes],
    }
    if all(names):
        settings["gpu"] = names[0] if len(set(names)) == 1 else ",".join(map(str, names))
    return settings, cards[0].name if len({card.name for card in cards}) == 1 else None, unnamed


def check_folder(folder: Path, flag: str) -> None:
    """Refuse a folder that cannot be made or written to, before anything is computed for it.

    Raises:
        RequestError: it cannot; `flag` names another.
    """
    # not Path.exists, which fails where we may not look
    there = next(filter(os.path.exists, (folder, *folder.absolute().parents)))
    hint = f"see to it that it can be written, or choose another folder with {flag}"
    with failure(f"cannot write to {folder}", OSError, hint=hint):
        tempfile.TemporaryFile(dir=there).close()  # os.access would say that the root user may write to /proc


def planning_flags(values: Mapping[str, Any], *others: str) -> list[str]:
    """Return the flags given that say how to plan, and those of `others`; a hostfile also says where to run a plan."""
    names = [name for name in (*PLAN_SETTINGS, *others) if name != "hostfile" or "hostfile" in others]
    flags = [flag_of(name) for name in names if values.get(name) not in (None, ())]
    overrides = settings_of_toml({}, values.get("overrides", ()))
    return [*flags, "--set"] if PLAN_SETTINGS.keys() & overrides.keys() else flags


def read_plan(path: Path, flags: Sequence[str] = (), *, what: str | None = None) -> Plan:
    """Return the plan in a plan.json or in its folder. In the message about `flags` given beside it, it is `what`.

    Raises:
        RequestError: it cannot be read, or a flag was given.
    """
    if flags:
        raise RequestError(
            f"{what or path} was given together with {flags[0]}",
            because="a plan is a decision already made",
            hint="leave one of them out",
        )
    return Plan.read(path / "plan.json" if path.is_dir() else path)
