"""`frugal plan`."""

from pathlib import Path
from typing import Any

import click

from frugal.cli.options import collect, planning_options


@click.command("plan")
@planning_options
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the report.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write plan.json and ds_config.json there.")
def command(as_json: bool, output: Path | None, **values: Any) -> None:
    """Choose the fastest plan that fits, and say why."""
    request, cluster, _defaults = collect(values)
    click.echo(f"{request} {cluster}")
