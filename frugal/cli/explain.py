"""`frugal explain`, and the table of `--what-if`: what other machines and settings would come to, by arithmetic."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from frugal.cli.options import (
    SettingsCommand,
    collect,
    config_option,
    options,
    planned,
    planning_flags,
    read_plan,
    read_settings,
    verbose_option,
    what_if_option,
)
from frugal.cli.terminal import show, waiting
from frugal.config.hardware.build_cluster import ClusterSettings
from frugal.config.request import Request
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.pool import Pool, shared_workers
from frugal.errors import RequestError
from frugal.planning.plan import Plan, RunCost
from frugal.planning.report import explanation
from frugal.planning.search.candidate import OpenSource
from frugal.planning.what_if import (
    KINDS,
    axes_around,
    changes,
    grid,
    improvements,
    kernels_bring,
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
@shared_workers()
def command(words: tuple[str, ...], verbose: bool, with_table: bool, **values: Any) -> None:
    """Explain a plan, and predict what would help.

    PLAN is a plan.json or its folder; without one the planning flags are planned for, as `frugal plan` does.
    """
    paths = [word for word in words if not (with_table and "=" in word)]
    if len(paths) > 1:
        raise click.UsageError(f"Got unexpected extra argument ({paths[1]})", click.get_current_context())
    axes = parse_axes([word for word in words if word not in paths])
    if paths:
        plan = read_plan(Path(paths[0]), planning_flags(values, "config", "hostfile"))
    else:
        plan = planned(*collect(read_settings(values)))
    blocks = explanation(plan, in_full=verbose)
    with waiting("predicting"):
        with closing(workers()) as pool:
            kinds = [kind for kind in KINDS if kind in plan.kernels]
            lines = [f"  {kernels_bring(plan, [kind], _arithmetic(pool))}" for kind in kinds]
            blocks += [["kernels, each beside this strategy without", *lines]] if lines else []
            cases = [*changes(plan), *shorter(plan)]
            blocks += [improvements(plan, cases, predicted(cases, _arithmetic(pool)))] if cases else []
        if with_table:
            blocks.append(table(plan, axes))
    show(blocks)


def table(plan: Plan, given: dict[str, tuple[int, ...]], run: RunCost | None = None) -> list[str]:
    """Return the what-if table; axes that are not `given` lie around the plan. With a `run` it has its time, too."""
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
    return what_if_table(plan, axes, dict(zip(cases, predictions, strict=True)), run)


def _arithmetic(pool: Pool) -> OpenSource:
    """Sources that are asked for drafts only: workers start where a trace is missing."""
    return partial(DryRunSource, pool=pool, will_dry_run=False)
