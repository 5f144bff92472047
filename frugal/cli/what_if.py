"""What other machines and settings would come to, predicted by arithmetic for `frugal plan` and `frugal explain`."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial

from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.pool import Pool
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.planning.report import improvements, what_if
from frugal.planning.search.candidate import OpenSource
from frugal.planning.what_if import axes_around, changes, grid, predicted, shorter


def help_for(plan: Plan) -> list[str]:
    """What would make the step shorter."""
    cases = [*changes(plan), *shorter(plan)]
    with closing(workers()) as pool:
        return improvements(plan, cases, predicted(cases, _arithmetic(pool)))


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
        predictions = predicted(list(cases.values()), dry_run)
    return what_if(plan, axes, cases, dict(zip(cases, predictions, strict=True)))


def _arithmetic(pool: Pool) -> OpenSource:
    """Sources that are asked for drafts only: workers start where a trace is missing."""
    return partial(DryRunSource, pool=pool, will_dry_run=False)
