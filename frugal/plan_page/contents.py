"""The contents of a plan's page besides the plan: simulated once, and then kept in the user's cache."""

from contextlib import closing
from functools import partial

from frugal.dryrun.cache import Cache
from frugal.dryrun.client import DryRunSource, workers
from frugal.plan_page.answers import EVENTS_OF_A_PAGE, EVENTS_OF_A_SMALL_PAGE, answers
from frugal.plan_page.page import PageData
from frugal.plan_page.sources import is_of_one_kind
from frugal.planning.plan import Plan
from frugal.planning.search.candidate import OpenSource
from frugal.planning.table import Table
from frugal.planning.what_if import (
    NOT_DRY_RUN,
    axes_around,
    changes,
    grid,
    improvements,
    predicted,
    predicted_with_sharing,
    shorter,
    what_if_legend,
    what_if_rows,
)


def contents(plan: Plan, cache: Cache, in_full: bool) -> PageData:
    """Return the contents computed anew; `in_full`: as in `frugal.plan_page.make.write_page`.

    Raises:
        WorkerError: a trace crashed.
    """
    with closing(workers()) as pool:
        dry_run = partial(DryRunSource, pool=pool, will_dry_run=False)
        if not in_full:
            return PageData(answers(plan, dry_run, EVENTS_OF_A_SMALL_PAGE, only_known=True), ())
        return PageData(answers(plan, dry_run, EVENTS_OF_A_PAGE), tuple(_tables(plan, dry_run)))


def _tables(plan: Plan, dry_run: OpenSource) -> list[Table]:
    """Return the tables of what would help, and of other GPUs, cards and lengths."""
    cases = [*changes(plan), *shorter(plan)]
    tables = []
    if cases:
        rows = improvements(plan, cases, predicted(cases, dry_run))
        head = ("change", "a step", "", "micro-batch x steps", "strategy")
        tables.append(Table(title=rows.title, rows=(head, *rows.rows), has_head=True))
    return [*tables, *_grid(plan, dry_run)] if is_of_one_kind(plan.cluster) else tables


def _grid(plan: Plan, dry_run: OpenSource) -> list[Table]:
    with dry_run(plan.request, plan.cluster) as source:
        longest = source.facts().max_positions
    axes = axes_around(plan, longest)
    cases = grid(plan, axes)
    predictions = dict(zip(cases, predicted_with_sharing(list(cases.values()), dry_run), strict=True))
    tables = []
    for seq_len in axes["seq-len"]:
        rows = what_if_rows(plan, axes, predictions, seq_len)
        title = f"what if: samples of {seq_len} tokens ({NOT_DRY_RUN})"
        tables.append(Table(title=title, rows=tuple(rows), note=what_if_legend(predictions), has_head=True))
    return tables
