"""`frugal plan`."""

from pathlib import Path
from typing import Any

import click

from frugal.cli.options import SettingsCommand, config_option, options, planned, waiting, what_if_option
from frugal.config.hardware.build_cluster import ClusterSettings
from frugal.config.request import Request
from frugal.config.run_settings import DATA_NAMES, RunSettings
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.planning.report import summary


@click.command("plan", cls=SettingsCommand)
@click.argument("axes", nargs=-1, metavar="[AXIS=...]")
@options(Request, ClusterSettings)
@options(RunSettings, names=DATA_NAMES)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the report.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write plan.json and ds_config.json there.")
@what_if_option
def command(axes: tuple[str, ...], as_json: bool, output: Path | None, with_table: bool, **values: Any) -> None:
    """Choose the fastest plan that fits, and say why."""
    if axes and not with_table:
        raise click.UsageError(f"Got unexpected extra argument ({axes[0]})", click.get_current_context())
    named = _axes(axes) if with_table else {}
    plan = planned(values)
    written = write_plan(plan, output) if output is not None else ()
    if as_json:
        click.echo(plan.to_json().decode(), nl=False)
        return
    click.echo(summary(plan))
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
