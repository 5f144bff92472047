"""`frugal plan`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from frugal.cli.options import SettingsCommand, config_option, options, planned, verbose_option, what_if_option
from frugal.cli.terminal import show, show_row, show_verdict, waiting
from frugal.config.hardware.build_cluster import ClusterSettings
from frugal.config.request import Request
from frugal.config.run_settings import DATA_NAMES, RunSettings
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.dryrun.planner import what_helps
from frugal.planning.plan import Plan
from frugal.planning.report import summary_blocks


@click.command("plan", cls=SettingsCommand)
@click.argument("axes", nargs=-1, metavar="[AXIS=...]")
@options(Request, ClusterSettings)
@options(RunSettings, names=DATA_NAMES)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the report.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write plan.json and ds_config.json there.")
@verbose_option
@what_if_option
def command(
    axes: tuple[str, ...], as_json: bool, output: Path | None, verbose: bool, with_table: bool, **values: Any
) -> None:
    """Choose the fastest plan that fits, and say what it comes to; with -v all of it."""
    if axes and not with_table:
        raise click.UsageError(f"Got unexpected extra argument ({axes[0]})", click.get_current_context())
    named = _axes(axes) if with_table else {}
    plan = planned(values)
    written = write_plan(plan, output) if output is not None else ()
    if as_json:
        click.echo(plan.to_json().decode(), nl=False)
        return
    blocks = summary_blocks(plan) if verbose else []
    if with_table:
        from frugal.cli.explain import table  # the search behind it takes a while to import

        with waiting("predicting"):
            blocks.append(table(plan, named))
    if blocks:
        show(blocks)
        click.echo()
    _conclude(plan, output, written, verbose=verbose)


def _conclude(plan: Plan, folder: Path | None, written: tuple[Path, ...], *, verbose: bool) -> None:
    """The verdict, at once; then what would help, which may have to be predicted first, and where more is."""
    verdict = plan.verdict
    show_verdict(replace(verdict, notes=()) if verbose else verdict)
    with waiting("predicting what would help"):
        helps = what_helps(plan)
    if helps:
        show_row("helps", helps)
    if written:
        more = "" if verbose else f"; more: `frugal explain {folder}`"
        show_row("wrote", f"{' and '.join(map(str, written))}{more}")
    elif not verbose:
        show_row("more", "`frugal plan -v`: all of it; `frugal explain`: what binds and what helps")


def _axes(words: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    from frugal.planning.what_if import parse_axes  # brings the search along, which a kept plan does not need

    return parse_axes(words)
