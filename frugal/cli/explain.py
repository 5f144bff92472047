"""`frugal explain`."""

from pathlib import Path
from typing import Any

import click

from frugal.cli.options import SettingsCommand, config_option, options
from frugal.cli.plan import WHAT_IF
from frugal.cli.planned import plan_path, planned, refuse_beside_a_plan, waiting
from frugal.cli.what_if import help_for, table
from frugal.config.build_cluster import ClusterSettings
from frugal.config.request import Request
from frugal.config.schema import PLAN_SETTINGS
from frugal.planning.plan import Plan
from frugal.planning.report import explanation
from frugal.planning.what_if import parse_axes


@click.command("explain", cls=SettingsCommand)
@click.argument("words", nargs=-1, metavar="[PLAN] [AXIS=...]")
@options(Request, ClusterSettings)
@config_option
@click.option("--what-if", "with_table", is_flag=True, help=WHAT_IF)
def command(words: tuple[str, ...], with_table: bool, **values: Any) -> None:
    """Say why a plan is what it is, and what would help.

    PLAN is a plan.json or its folder; without one the planning flags are planned for, as `frugal plan` does.
    """
    paths = [word for word in words if not (with_table and "=" in word)]
    if len(paths) > 1:
        raise click.UsageError(f"Got unexpected extra argument ({paths[1]})", click.get_current_context())
    axes = parse_axes([word for word in words if word not in paths])
    plan = _read(paths[0], values) if paths else planned(values)
    blocks = explanation(plan)
    with waiting("predicting"):
        blocks.append(help_for(plan))
        if with_table:
            blocks.append(table(plan, axes))
    click.echo("\n\n".join("\n".join(block) for block in blocks if block))


def _read(path: str, values: dict[str, Any]) -> Plan:
    refuse_beside_a_plan(path, values, "config", *PLAN_SETTINGS)
    return Plan.read(plan_path(Path(path)))
