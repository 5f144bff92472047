"""`frugal plan`."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from frugal.cli.options import collect, planning_options
from frugal.config import run, schema
from frugal.config.request import Request
from frugal.config.run import SAMPLE_NAMES
from frugal.config.schema import TomlFile
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.dryrun.planner import make_plan
from frugal.errors import RequestError
from frugal.planning.report import report

WHAT_IF = (
    "Also a table over GPUs x memory x sample length, predicted by arithmetic. Values may be named after it: "
    "--what-if gpus=1,2,4 mem=12G,24G seq-len=512,1024.  [default: half, the same and twice as much of each]"
)


def waiting(what: str) -> AbstractContextManager[Any]:
    """Show people that something is going on; nothing in a pipe or a log."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console  # takes a tenth of a second

    return Console(stderr=True).status(what)


@click.command("plan")
@click.argument("axes", nargs=-1, metavar="[AXIS=...]")
@run.data_options
@planning_options
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the report.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write plan.json and ds_config.json there.")
@click.option("--what-if", "with_table", is_flag=True, help=WHAT_IF)
def command(axes: tuple[str, ...], as_json: bool, output: Path | None, with_table: bool, **values: Any) -> None:
    """Choose the fastest plan that fits, and say why."""
    if axes and not with_table:
        raise click.UsageError(f"Got unexpected extra argument ({axes[0]})", click.get_current_context())
    named = _axes(axes) if with_table else {}
    file = schema.read_toml(values["config"])
    request, cluster, defaults = collect(values, file)
    if values["data"] and request.lengths is not None:
        raise RequestError(
            "--data was given together with --lengths",
            because="both say how long the samples are",
            hint="leave one of them out",
        )
    request = with_lengths(request, values, file)
    with waiting(f"dry-running {request.model}"):
        plan = make_plan(request, cluster, defaults)
    written = write_plan(plan, output) if output is not None else ()
    if as_json:
        click.echo(plan.to_json().decode(), nl=False)
        return
    click.echo(report(plan))
    if with_table:
        from frugal.cli.explain import table  # the search behind it takes a while to import

        with waiting("predicting"):
            lines = table(plan, named)
        click.echo("\n" + "\n".join(lines))
    if written:
        click.echo(f"\nwrote {' and '.join(map(str, written))}")


def _axes(words: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    from frugal.planning.what_if import parse_axes  # brings the search along, which a kept plan does not need

    return parse_axes(words)


def with_lengths(request: Request, values: Mapping[str, Any], file: TomlFile) -> Request:
    """The request with the lengths of the samples that training will see, where flags or `file` name the data.

    Lengths that the request has win over data that the file names; what --too-long says holds for both. `values` are a
    command's flags, of which only those of data count.

    Raises:
        RequestError: the data cannot be used, or has samples that are too long.
    """
    flags = {name: values.get(name) for name in SAMPLE_NAMES}
    train = {name: value for name, value in file.train.items() if name in SAMPLE_NAMES}
    asked = run.collect(flags, train)
    if request.lengths is not None:
        is_said = flags["too_long"] is not None or "too_long" in train
        return replace(request, lengths=replace(request.lengths, too_long=asked.too_long)) if is_said else request
    if not flags["data"] and "data" not in train:
        return request
    from frugal.distributed.env import silence_libraries
    from frugal.training.data.corpus import lengths_of  # torch takes seconds

    silence_libraries()
    with waiting(f"tokenising {', '.join(asked.data)}"):
        return replace(request, lengths=lengths_of(request, asked))
