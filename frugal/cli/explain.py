"""`frugal explain`, and the table of `--what-if`: what other machines and settings would come to, by arithmetic."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from frugal.cli.display.terminal import show, waiting
from frugal.cli.options import (
    SettingsCommand,
    config_option,
    options,
    plan_path,
    planned,
    planning_flags,
    refuse_beside_a_plan,
    verbose_option,
    what_if_option,
)
from frugal.config.hardware.build_cluster import ClusterSettings
from frugal.config.request import Request
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.pool import Pool, shared_workers
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.planning.report import Block, explanation
from frugal.planning.search.candidate import OpenSource
from frugal.planning.search.frontier import FrontierPoint, frontier, frontier_table
from frugal.planning.search.search import Search
from frugal.planning.what_if import (
    axes_around,
    changes,
    grid,
    improvements,
    parse_axes,
    predicted,
    predicted_with_sharing,
    shorter,
    what_if_table,
)


@click.command("explain", cls=SettingsCommand)
@click.argument("words", nargs=-1, metavar="[PLAN] [AXIS=...]")
@options(Request, ClusterSettings)
@config_option
@verbose_option
@what_if_option
@click.option(
    "--frontier",
    "with_frontier",
    is_flag=True,
    help="Also memory against time: what less memory would cost, and what more would bring, by arithmetic.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the frontier for programs, and nothing else.")
@shared_workers()
def command(
    words: tuple[str, ...], verbose: bool, with_table: bool, with_frontier: bool, as_json: bool, **values: Any
) -> None:  # fmt: skip
    """Say why a plan is what it is, and what would help.

    PLAN is a plan.json or its folder; without one the planning flags are planned for, as `frugal plan` does.
    """
    paths = [word for word in words if not (with_table and "=" in word)]
    if len(paths) > 1:
        raise click.UsageError(f"Got unexpected extra argument ({paths[1]})", click.get_current_context())
    axes = parse_axes([word for word in words if word not in paths])
    plan = _read(paths[0], values) if paths else planned(values)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(frontier_of(plan))).decode())
        return
    blocks = explanation(plan, in_full=verbose)
    with waiting("predicting"):
        blocks.append(help_for(plan))
        if with_table:
            blocks.append(table(plan, axes))
        if with_frontier:
            blocks.append(frontier_table(plan, frontier_of(plan)))
    show(blocks)


def help_for(plan: Plan) -> Block:
    """What would make the step shorter."""
    cases = [*changes(plan), *shorter(plan)]
    with closing(workers()) as pool:
        return improvements(plan, cases, predicted(cases, _arithmetic(pool))) if cases else []


def frontier_of(plan: Plan) -> list[FrontierPoint]:
    """Memory against time for what the plan was asked for, with as many ranks to a sample as it has."""
    shared = plan.strategy.sequence_parallel
    request = replace(plan.request, sequence_parallel=shared) if shared > 1 else plan.request
    with closing(workers()) as pool, _arithmetic(pool)(request, plan.cluster) as source:
        return frontier(Search(request, plan.cluster, source))


def table(plan: Plan, given: dict[str, tuple[int, ...]]) -> list[str]:
    """The what-if table; axes that are not `given` lie around the plan."""
    with closing(workers()) as pool:
        dry_run = _arithmetic(pool)
        with dry_run(plan.request, plan.cluster) as source:
            longest = source.facts().max_positions
        axes: dict[str, Sequence[int]] = {**axes_around(plan, longest), **given}
        if longest is not None and max(axes["seq-len"]) > longest:
            raise RequestError(
                f"seq-len={max(axes['seq-len'])} is longer than {plan.request.model} can read",
                because=f"it has {longest} positions",
            )
        cases = grid(plan, axes)
        predictions = predicted_with_sharing(list(cases.values()), dry_run)
    return what_if_table(plan, axes, cases, dict(zip(cases, predictions, strict=True)))


def _arithmetic(pool: Pool) -> OpenSource:
    """Sources that are asked for drafts only: workers start where a trace is missing."""
    return partial(DryRunSource, pool=pool, will_dry_run=False)


def _read(path: str, values: dict[str, Any]) -> Plan:
    refuse_beside_a_plan(path, planning_flags(values, "config", "hostfile"))
    return Plan.read(plan_path(Path(path)))
