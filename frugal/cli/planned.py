"""From a command's flags to a plan: settings, this machine's devices, the lengths of the data, and `make_plan`."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from frugal.config import calibration as calibrations
from frugal.config.cluster import Cluster, recognise_card
from frugal.config.local_host import allocator_note, held_on_gpus
from frugal.config.request import Request
from frugal.config.schema import PLAN_SETTINGS, TomlFile, read_toml, understand
from frugal.config.settings.run_settings import SAMPLE_NAMES, run_settings
from frugal.dryrun.planner import make_plan
from frugal.errors import RequestError
from frugal.planning.plan import Plan


def waiting(what: str) -> AbstractContextManager[Any]:
    """Show people that something is going on; nothing in a pipe or a log."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console  # takes a tenth of a second

    return Console(stderr=True).status(what)


def planned(values: Mapping[str, Any], file: TomlFile | None = None, *, asks_data: bool = True) -> Plan:
    """The plan for what flags and `file` describe; `asks_data`: the data says how long its samples are.

    Raises: as `collect`, `with_lengths` and `make_plan`.
    """
    file = file or read_toml(values.get("config"))
    request, cluster, defaults = collect(values, file)
    if asks_data:
        if values.get("data") and request.lengths is not None:
            raise RequestError(
                "--data was given together with --lengths",
                because="both say how long the samples are",
                hint="leave one of them out",
            )
        request = with_lengths(request, values, file)
    return planned_for(request, cluster, defaults)


def planned_for(request: Request, cluster: Cluster, defaults: tuple[str, ...]) -> Plan:
    """`make_plan` while people wait. Says what of the environment the plan does not know."""
    with waiting(f"dry-running {request.model}"):
        return make_plan(request, cluster, defaults, warnings=allocator_note(cluster, os.environ))


def collect(values: Mapping[str, Any], file: TomlFile | None = None) -> tuple[Request, Cluster, tuple[str, ...]]:
    """Request, cluster, and the request's fields left to their defaults, from a command's `values`.

    Flags win over `file` (read from `values["config"]` if not given), the file over defaults. Where neither GPUs nor
    memory are named, this machine's GPUs are taken. A calibration of these devices is used; one that cannot be read
    is told on standard error. Values of other commands' flags are ignored.

    Raises:
        RequestError: the request is wrong.
    """
    if file is None:
        file = read_toml(values.get("config"))
    settings = file.plan | {
        name: value for name, value in values.items() if name in PLAN_SETTINGS and value is not None
    }
    is_described = bool({"gpu", "hostfile"} & settings.keys()) or {"gpus", "mem"} <= settings.keys()
    is_described = is_described or "," in str(settings.get("mem", ""))
    gpu_name = None
    if settings.get("device", "cuda") == "cuda" and not is_described:
        here, gpu_name = this_machine(settings.get("gpus"))
        if "mem" in settings:  # then it says what there is to take
            here.pop("held", None)
        settings = here | settings
    calibration, notes = calibrations.chosen(settings, gpu_name)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    return understand(settings, calibration)


def this_machine(num_gpus: int | None) -> tuple[dict[str, Any], str | None]:
    """The settings that describe `num_gpus` of this machine's GPUs (None: all), and what the driver calls them.

    Nothing where torch sees none; no name where they differ.
    """
    import torch  # takes a second: only where flags leave the question open

    num_here = torch.cuda.device_count()
    if not num_here:
        return {}, None
    import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

    held = held_on_gpus()
    cards = [torch.cuda.get_device_properties(i) for i in range(num_here)]
    settings, name = described(cards, held, num_gpus)
    return settings | {"host_mem": psutil.virtual_memory().total}, name


def described(cards: Sequence[Any], held: Mapping[str, int], num_gpus: int | None) -> tuple[dict[str, Any], str | None]:
    """The settings for `num_gpus` of these cards (None: all), and the name they share, if they do.

    `cards` are what torch tells of them; `held` has the bytes that processes hold of each, by UUID.
    """
    cards = cards[:num_gpus]
    if num_gpus is not None and num_gpus > len(cards):
        cards = [min(cards, key=lambda card: card.total_memory)] * num_gpus  # a plan for a larger machine of this kind
        held = {}
    settings: dict[str, Any] = {"gpus": len(cards), "mem": [card.total_memory for card in cards]}
    known = [recognise_card(card.name, card.total_memory) for card in cards]
    if all(known):
        settings["gpu"] = known[0] if len(set(known)) == 1 else ",".join(map(str, known))
    if held:
        settings["held"] = [held.get(str(card.uuid), 0) for card in cards]
    return settings, cards[0].name if len({card.name for card in cards}) == 1 else None


def with_lengths(request: Request, values: Mapping[str, Any], file: TomlFile) -> Request:
    """The request with the lengths of the samples that training will see, where flags or `file` name the data.

    Lengths that the request has win over data that the file names; what --too-long says holds for both. `values` are a
    command's flags, of which only those of data count.

    Raises:
        RequestError: the data cannot be used, or has samples that are too long.
    """
    flags = {name: values.get(name) for name in SAMPLE_NAMES}
    train = {name: value for name, value in file.train.items() if name in SAMPLE_NAMES}
    settings = run_settings(flags, train)
    if request.lengths is not None:
        is_said = flags["too_long"] is not None or "too_long" in train
        return replace(request, lengths=replace(request.lengths, too_long=settings.too_long)) if is_said else request
    if not flags["data"] and "data" not in train:
        return request
    from frugal.distributed.env import silence_libraries
    from frugal.training.data.corpus import lengths_of  # torch takes seconds

    silence_libraries()
    with waiting(f"tokenising {', '.join(settings.data)}"):
        return replace(request, lengths=lengths_of(request, settings))


def refuse_beside_a_plan(what: str, values: Mapping[str, Any], *names: str) -> None:
    """A plan, called `what` in the message, leaves nothing for these flags to say.

    Raises:
        RequestError: one was given.
    """
    for name in names:
        if values.get(name) not in (None, ()):
            raise RequestError(
                f"{what} was given together with --{name.replace('_', '-')}",
                because="a plan is a decision already made",
                hint="leave one of them out",
            )


def plan_path(path: Path) -> Path:
    """The plan.json that is meant: a file, or the one in a folder."""
    return path / "plan.json" if path.is_dir() else path
