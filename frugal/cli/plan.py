"""`frugal plan`."""

from pathlib import Path
from typing import Any

import click

from frugal.cli.options import collect, planning_options
from frugal.planner import make_plan
from frugal.planning.files import write_plan
from frugal.planning.report import report


@click.command("plan")
@planning_options
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the report.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write plan.json and ds_config.json there.")
def command(as_json: bool, output: Path | None, **values: Any) -> None:
    """Choose the fastest plan that fits, and say why."""
    plan = make_plan(*collect(values))
    written = write_plan(plan, output) if output is not None else ()
    if as_json:
        click.echo(plan.to_json().decode(), nl=False)
        return
    click.echo(report(plan))
    if written:
        click.echo(f"\nwrote {' and '.join(map(str, written))}")
