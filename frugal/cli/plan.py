"""`frugal plan`."""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from frugal.cli.options import collect, planning_options
from frugal.planner import make_plan
from frugal.planning.files import write_plan
from frugal.planning.report import report


def waiting(what: str) -> AbstractContextManager[Any]:
    """Show people that something is going on; nothing in a pipe or a log."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console  # takes a tenth of a second

    return Console(stderr=True).status(what)


@click.command("plan")
@planning_options
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the report.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write plan.json and ds_config.json there.")
def command(as_json: bool, output: Path | None, **values: Any) -> None:
    """Choose the fastest plan that fits, and say why."""
    request, cluster, defaults = collect(values)
    with waiting(f"rehearsing {request.model}"):
        plan = make_plan(request, cluster, defaults)
    written = write_plan(plan, output) if output is not None else ()
    if as_json:
        click.echo(plan.to_json().decode(), nl=False)
        return
    click.echo(report(plan))
    if written:
        click.echo(f"\nwrote {' and '.join(map(str, written))}")
