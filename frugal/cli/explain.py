"""`frugal explain`, and the table of `frugal plan --what-if`."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from frugal.cli.options import collect, planning_options
from frugal.cli.plan import WHAT_IF, waiting, with_lengths
from frugal.config import schema
from frugal.config.schema import NAMES
from frugal.dryrun.planner import make_plan
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.planning.report import explanation, improvements, what_if
from frugal.planning.search.candidate import OpenSource
from frugal.planning.what_if import axes_around, changes, grid, parse_axes, predicted, shorter


@click.command("explain")
@click.argument("words", nargs=-1, metavar="[PLAN] [AXIS=...]")
@planning_options
@click.option("--what-if", "with_table", is_flag=True, help=WHAT_IF)
def command(words: tuple[str, ...], with_table: bool, **values: Any) -> None:
    """Say why a plan is what it is, and what would help.

    PLAN is a plan.json or its folder; without one the planning flags are planned for, as `frugal plan` does.
    """
    paths = [word for word in words if not (with_table and "=" in word)]
    if len(paths) > 1:
        raise click.UsageError(f"Got unexpected extra argument ({paths[1]})", click.get_current_context())
    axes = parse_axes([word for word in words if word not in paths])
    plan = _read(Path(paths[0]), values) if paths else _made(values)
    blocks = explanation(plan)
    with waiting("predicting"):
        blocks.append(help_for(plan))
        if with_table:
            blocks.append(table(plan, axes))
    click.echo("\n\n".join("\n".join(block) for block in blocks if block))


def help_for(plan: Plan) -> list[str]:
    """What would make the step shorter."""
    cases = [*changes(plan), *shorter(plan)]
    with closing(_pool()) as pool:
        return improvements(plan, cases, predicted(cases, _arithmetic(pool)))


def table(plan: Plan, given: dict[str, tuple[int, ...]]) -> list[str]:
    """The what-if table; axes that are not `given` lie around the plan."""
    with closing(_pool()) as pool:
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
        found = predicted(list(cases.values()), dry_run)
    return what_if(plan, axes, cases, dict(zip(cases, found, strict=True)))


def _pool() -> Any:
    from frugal.dryrun.client import workers

    return workers()


def _arithmetic(pool: Any) -> OpenSource:
    """Sources that are asked for drafts only: workers start where a trace is missing."""
    from frugal.dryrun.client import DryRunSource

    return partial(DryRunSource, pool=pool, will_dry_run=False)


def _read(path: Path, values: dict[str, Any]) -> Plan:
    given = [name for name in ("config", *NAMES) if values.get(name) is not None]
    if given:
        raise RequestError(
            f"{path} was given together with --{given[0].replace('_', '-')}",
            because="a plan is a decision already made",
            hint="leave one of them out",
        )
    return Plan.read(path / "plan.json" if path.is_dir() else path)


def _made(values: dict[str, Any]) -> Plan:
    file = schema.read_toml(values["config"])
    request, cluster, defaults = collect(values, file)
    request = with_lengths(request, values, file)
    with waiting(f"dry-running {request.model}"):
        return make_plan(request, cluster, defaults)
