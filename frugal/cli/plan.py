"""`frugal plan`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from frugal.cli.display.terminal import is_terminal, show, waiting
from frugal.cli.display.verdict import show_row, show_verdict
from frugal.cli.options import SettingsCommand, config_option, options, planned, verbose_option, what_if_option
from frugal.config.hardware.build_cluster import ClusterSettings
from frugal.config.request import Request
from frugal.config.run_settings import DATA_NAMES, RunSettings
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.dryrun.planner import what_helps
from frugal.planning.plan import Plan
from frugal.planning.report import summary_blocks
from frugal.units import format_bytes


@click.command("plan", cls=SettingsCommand)
@click.argument("axes", nargs=-1, metavar="[AXIS=...]")
@options(Request, ClusterSettings)
@options(RunSettings, names=DATA_NAMES)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the report.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write plan.json and ds_config.json there.")
@click.option(
    "--draft",
    "only_draft",
    is_flag=True,
    help="Do not wait for the dry run that proves the plan; its memory is then what arithmetic says.",
)
@verbose_option
@what_if_option
def command(
    axes: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    only_draft: bool,
    verbose: bool,
    with_table: bool,
    **values: Any,
) -> None:
    """Choose the fastest plan that fits, and say what it comes to; with -v all of it."""
    if axes and not with_table:
        raise click.UsageError(f"Got unexpected extra argument ({axes[0]})", click.get_current_context())
    named = _axes(axes) if with_table else {}
    is_watched = is_terminal() and not (as_json or verbose or with_table)
    drafts = _Drafts(is_shown=is_watched, are_enough=only_draft)
    try:
        plan = planned(values, on_draft=drafts.take)
    except _DraftTaken as taken:
        plan = taken.plan
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
    if drafts.last is None:
        show_verdict(replace(plan.verdict, notes=()) if verbose else plan.verdict)
    else:
        drafts.conclude(plan)
    _conclude(plan, output, written, verbose=verbose)


class _DraftTaken(Exception):  # noqa: N818 - no error
    """A draft is enough."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class _Drafts:
    """Plans that are about to be dry-run: shown at once to people who wait, or taken as they are."""

    def __init__(self, *, is_shown: bool, are_enough: bool) -> None:
        self._is_shown = is_shown
        self._are_enough = are_enough
        self.last: Plan | None = None

    def take(self, plan: Plan, whole: Callable[[], Plan]) -> None:
        """One more draft.

        Raises:
            _DraftTaken: it is enough.
        """
        if self._are_enough:
            plan = whole()
            raise _DraftTaken(replace(plan, warnings=(UNPROVEN, *plan.warnings)).sealed())
        if not self._is_shown:
            return
        if self.last is not None:
            show_row("draft", "refused, a dry run takes more; the next:")
        show_verdict(plan.verdict)
        self.last = plan

    def conclude(self, plan: Plan) -> None:
        """Say whether the plan is the last draft, and what it is where it is another.

        With short samples dry runs also decide how many of them share a micro-batch: what that changes is shown.
        """
        assert self.last is not None
        takes = f"{format_bytes(plan.memory.total_bytes)} by a dry run of DeepSpeed's own code"
        samples, of_draft = (replace(each.batch, shortest=None) for each in (plan, self.last))
        if (plan.strategy, samples) == (self.last.strategy, of_draft):
            show_row("proven", takes)
            for row in plan.verdict.rows:
                if row[0] != "fits" and row not in self.last.verdict.rows:
                    show_row(*row)
            for note in plan.warnings:  # what only the dry run has shown, and what is computed beside it
                if note not in self.last.warnings:
                    show_row("note", note)
        else:
            show_row("draft", f"refused, and this is the plan, which takes {takes}:")
            show_verdict(plan.verdict)


UNPROVEN = "a draft: its memory is arithmetic, and no dry run has proven it"


def _conclude(plan: Plan, folder: Path | None, written: tuple[Path, ...], *, verbose: bool) -> None:
    """Below the verdict what would help, which may have to be predicted first, and where more is."""
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
