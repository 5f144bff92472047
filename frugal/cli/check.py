"""`frugal check`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from frugal.cli.options import SettingsCommand, options, this_machine, with_devices
from frugal.cli.terminal import waiting
from frugal.config.adapters import Lora
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.build_cluster import ClusterSettings
from frugal.config.request import Request
from frugal.errors import FrugalError, RequestError, refuse
from frugal.tools.check import out_of_memory, report
from frugal.tools.check.checked import Check, check
from frugal.tools.check.document import Tool
from frugal.tools.check.gather import gather
from frugal.tools.check.tools import FLAGS


class _Documented(SettingsCommand):
    """A command whose errors, also in its own words, are documents where `--json` or `--sarif` asks for them."""

    def parse_args(self, context: click.Context, words: list[str]) -> list[str]:
        """Return the words that are left."""
        asked = [*words]
        try:
            return super().parse_args(context, words)
        except (click.UsageError, FrugalError) as error:
            said = RequestError(error.format_message()) if isinstance(error, click.UsageError) else error
            _print_error(said, Path(next((word for word in asked if word[:1] != "-"), "")), *asked)
            raise


def _print_error(error: FrugalError, path: Path, *words: str) -> None:
    """Print an error as the document that `words` ask for, if they do."""
    if "--json" in words:
        click.echo(report.error_as_json(error).decode())
    elif "--sarif" in words:
        click.echo(report.error_as_sarif(error, path).decode())


@click.command("check", cls=_Documented)
@click.argument("paths", metavar="FILE...", nargs=-1, type=click.Path(path_type=Path))
@options(Request, names=FLAGS)
@options(ClusterSettings)
@click.option(
    "--as", "tool", type=click.Choice(get_args(Tool)),
    help="Tool of the first file, if its keys leave that open: TRL's arguments are Trainer's with other defaults.",
)  # fmt: skip
@click.option(
    "--config", "more", multiple=True, metavar="FILE", type=click.Path(path_type=Path), help="The same as FILE."
)
@click.option(
    "--oom", "log", metavar="LOG", type=click.Path(path_type=Path),
    help="Explain the out-of-memory message in LOG, for the card that it names.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the check for programs.")
@click.option(
    "--sarif", "as_sarif", is_flag=True, help="Print it as SARIF 2.1.0, which code hosts show next to the lines."
)
@click.option("--no-plan", is_flag=True, help="Leave out the plan that frugal would make, which takes longest.")
def command(
    paths: tuple[Path, ...], tool: Tool | None, more: tuple[Path, ...], log: Path | None,
    as_json: bool, as_sarif: bool, **values: Any,
) -> None:  # fmt: skip
    """Check whether a configuration of another trainer fits, and what is wrong with it.

    FILE is a JSON of DeepSpeed, TrainingArguments of transformers (JSON, YAML, or a shell script with the command
    line), or a configuration of TRL, axolotl, LLaMA-Factory or accelerate; those that belong to one run together.

    The exit code is 0 where it fits, 3 where it does not, 2 where it does not start or cannot be checked.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed says that it chose so
    asked = ["--json"] * as_json + ["--sarif"] * as_sarif
    refuse((as_json and as_sarif, "--json was given together with --sarif", "", "leave one of them out"))
    try:
        refuse((not (paths or more), "no file was given", "", "see `frugal check --help`"))
        done = _checked((*paths, *more), tool, log, values)
    except FrugalError as error:
        _print_error(error, next(iter((*paths, *more)), Path()), *asked)
        raise
    if as_json or as_sarif:
        click.echo((report.as_sarif if as_sarif else report.as_json)(done).decode())
    else:
        click.echo(report.report(done))
    click.get_current_context().exit(done.exit_code)


def _checked(paths: Sequence[Path], tool: Tool | None, log: Path | None, values: dict[str, Any]) -> Check:
    """Check the files on the hardware that the flags describe, or on this machine."""
    with_plan = not values.pop("no_plan")
    flags = {name: values.pop(name) for name in FLAGS}
    if flags["lora"] is not None:
        flags["lora"] = Lora.of(flags["lora"])
    settings, documents = gather(paths, flags, tool)
    if settings.expandable_segments is None:
        settings.expandable_segments = cuda_allocator.expandable(os.environ)
    hardware = {name: value for name, value in values.items() if value is not None}
    message = None if log is None else out_of_memory.read(log)
    here = None
    if not {"gpu", "mem", "hostfile"} & hardware.keys():
        if message is not None and message.total_bytes:
            hardware["mem"] = message.total_bytes
        else:
            here = this_machine(hardware.get("gpus", settings.gpus))
    hardware, calibration, unnamed = with_devices(hardware, here)
    with waiting(f"dry-running {settings.model}"):
        return check(
            settings, documents, hardware, calibration=calibration, unnamed=unnamed, with_plan=with_plan,
            message=message,
        )  # fmt: skip
