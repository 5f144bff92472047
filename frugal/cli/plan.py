"""`frugal plan`."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from frugal.cli.options import (
    Count,
    SettingsCommand,
    check_folder,
    collect,
    config_option,
    options,
    plans,
    read_settings,
    verbose_option,
    what_if_option,
)
from frugal.cli.terminal import (
    conclude_draft,
    fits_a_line,
    is_terminal,
    show,
    show_draft,
    show_row,
    show_verdict,
    waiting,
)
from frugal.config.hardware.build_cluster import ClusterSettings
from frugal.config.request import Request
from frugal.config.run_settings import LENGTH_NAMES, SAMPLE_NAMES, RunSettings
from frugal.config.setting import build
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.dryrun.planner import what_helps
from frugal.dryrun.pool import shared_workers
from frugal.planning.plan import Plan, check_run_length
from frugal.planning.report import summary_blocks


@click.command("plan", cls=SettingsCommand)
@click.argument("axes", nargs=-1, metavar="[AXIS=...]")
@options(Request, ClusterSettings)
@options(RunSettings, names=(*SAMPLE_NAMES, *LENGTH_NAMES))
@config_option
@click.option(
    "--train-tokens",
    type=Count(),
    help="Tokens to train on, instead of --steps and --epochs; 2B is 2 x 10^9. Any of these shows the time of a run.",
)
@click.option("--gpu-hour-price", type=float, help="Price of a GPU hour, in any currency, for the cost of a run.")
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the report.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write plan.json, ds_config.json and plan.html there: a page that computes other settings of the model.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the page there with all it can compute: other GPUs, sample lengths, offloading. Takes a while.",
)
@click.option(
    "--draft",
    "only_draft",
    is_flag=True,
    help="Do not wait for the dry run that proves the plan; its memory is then what arithmetic says.",
)
@verbose_option
@what_if_option
@shared_workers()
def command(
    axes: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    html: Path | None,
    only_draft: bool,
    verbose: bool,
    with_table: bool,
    **values: Any,
) -> None:
    """Choose the fastest plan that fits, and say what it comes to; with -v all of it."""
    if axes and not with_table:
        raise click.UsageError(f"Got unexpected extra argument ({axes[0]})", click.get_current_context())
    named: dict[str, tuple[int, ...]] = {}
    if with_table:
        from frugal.planning.what_if import parse_axes  # brings the search along, which a kept plan does not need

        named = parse_axes(axes)
    settings = read_settings(values)
    for folder, flag in ((output, "-o"), (html and html.parent, "--html")):
        if folder is not None:
            check_folder(folder, flag)
    is_watched = is_terminal() and not (as_json or verbose or with_table)
    draft: Plan | None = None  # the last that was shown
    run, asked = _run(values, settings), collect(settings)
    if run:
        check_run_length(**run, knows_samples=asked[0].lengths is not None)  # before the user waits
    with closing(plans(*asked, will_dry_run=not only_draft)) as made:
        plan = next(made)
        cost = plan.cost(**run) if run else None
        while plan.is_draft and not only_draft:
            if is_watched:
                show_draft(plan, draft)
                draft = plan
            plan = next(made)
    written = write_plan(plan, output) if output is not None else ()
    if as_json:
        _write_pages(plan, output, html)
        click.echo(plan.to_json().decode(), nl=False)
        return
    blocks = summary_blocks(plan) if verbose else []
    if with_table:
        from frugal.cli.explain import table  # the search behind it takes a while to import

        with waiting("predicting"):
            blocks.append(table(plan, named, cost))
    if blocks:
        show(blocks)
        click.echo()
    if draft is None:
        show_verdict(replace(plan, warnings=()) if verbose else plan)
    proof = "" if draft is None else conclude_draft(plan, draft)
    if run:
        show_row("run", str(plan.cost(**run)))
    _conclude(plan, output, html, written, proof, verbose=verbose)


def _run(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the length and price of a run that flags and frugal.toml ask for, as `Plan.cost` takes them."""
    given = settings if values["train_tokens"] is None else values
    asked = build(RunSettings, {name: given.get(name) for name in ("stream", *LENGTH_NAMES)})
    length = {
        "steps": asked.steps,
        "epochs": asked.epochs,
        **{name: values[name] for name in ("train_tokens", "gpu_hour_price")},
    }
    return {name: value for name, value in length.items() if value is not None}


def _write_pages(plan: Plan, folder: Path | None, html: Path | None, helps: str = "") -> tuple[Path, ...]:
    """Write the pages that are asked for; their paths."""
    if folder is None and html is None:
        return ()
    from frugal.tools.plan_page.page import write_page  # brings the search along, which a kept plan does not need

    with waiting("making the page"):
        pages = [
            write_page(plan, path, in_full=path is html, helps=helps)
            for path in (folder and folder / "plan.html", html)
            if path is not None
        ]
    return tuple(pages)


def _conclude(
    plan: Plan, folder: Path | None, html: Path | None, written: tuple[Path, ...], proof: str, *, verbose: bool
) -> None:
    """Below the verdict what would help, which may have to be predicted first, what proves it, and where more is."""
    with waiting(f"proven {proof}; predicting what would help" if proof else "predicting what would help"):
        helps = what_helps(plan)
    if helps:
        show_row("helps", helps)
    written += _write_pages(plan, folder, html, helps)
    if written:
        *others, last = map(str, written)
        names = f"{', '.join(others)}{' and ' if others else ''}{last}"
        if proof:
            show_row("proven", f"by a dry run; wrote {names}")
        else:
            more = "" if verbose or folder is None else f"; more: `frugal explain {folder}`"
            show_row("wrote", names + more if fits_a_line(names + more) else names)
    elif proof:
        show_row("proven", f"{proof}; more: `frugal plan -v`")
    elif not verbose:
        show_row("more", "`frugal plan -v`: all of it; `frugal explain`: what binds and what helps")
