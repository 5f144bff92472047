"""`frugal report`: runs in a few lines for a terminal of 80 columns, and all of their numbers for programs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from frugal import file_errors, files
from frugal.cli.terminal import print_json, show
from frugal.planning.report import Block, Table
from frugal.report import words
from frugal.report.after_run import PAGE
from frugal.report.page import page
from frugal.report.run import RecordedRun, read_run

MOST_EVENTS = 12
"""In the summary; the page has all."""

WIDEST = 28
"""Characters of a setting's value beside others."""


@click.command("report")
@click.argument("folders", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
    help=f"Where the page is written.  [default: RUN/{PAGE}; of several runs none]",
)  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, help="Print the numbers for programs; a page is written with -o alone."
)
def command(folders: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """Summarize a run and write its page; compare several runs.

    RUN is the --out of a run, which may still be running.
    """
    runs = [read_run(folder) for folder in folders]
    names = words.renamed([run.name for run in runs], [str(folder) for folder in folders])
    runs = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    words.check(runs)
    if output is None and len(runs) == 1 and not as_json:
        output = folders[0] / PAGE
    if output is not None:
        with file_errors.failure(f"cannot write the page {output}", output, "{}, or name another with -o"):
            files.write_file(output, page(runs).encode(), durable=False)
    if as_json:
        print_json({
            "runs": [_data(run) for run in runs],  # as recorded, in bytes and seconds
            "differing": [{"name": row[0], "values": row[1:]} for row in words.differing(runs)],
            "notes": words.notes(runs),
        })  # fmt: skip
    else:
        show([*_summary(runs), [f"page   {output}"] if output is not None else ["page   none; -o FILE writes one"]])


def _summary(runs: Sequence[RecordedRun]) -> list[Block]:
    """Return a summary of the page."""
    blocks = _of_one(runs[0]) if len(runs) == 1 else _of_several(runs)
    return [*blocks, [f"note   {note}" for note in words.notes(runs)]]


def _of_one(run: RecordedRun) -> list[Block]:
    blocks: list[Block] = [[f"{run.name}: {run.state_in_words}"], Table(title="in short", rows=tuple(words.facts(run)))]
    if run.plan is not None:
        blocks[0] = [f"{run.name}: {run.state_in_words}", str(run.plan.strategy), run.plan.arithmetic]
    columns, rows = words.memory_columns(run)
    if rows:
        named = [(*row, phase.name) for row, phase in zip(rows, words.phase_rows(run), strict=True)]
        note = words.of_which_steps(run)
        blocks.append(Table(title="peak memory", rows=((*columns, "phase"), *named), has_head=True, note=note))
    events = tuple(
        (words.shown(event.seconds, "seconds"), event.kind.replace("_", " "), f"step {event.step:,}", event.words)
        for event in run.events
    )
    shown = (*events[: MOST_EVENTS - 1], events[-1]) if len(events) > MOST_EVENTS else events
    note = f"{len(events) - len(shown)} more are in the page" if len(events) > len(shown) else ""
    if shown:
        blocks.append(Table(title="starts, restarts and recoveries", rows=shown, note=note))
    if run.versions:
        blocks.append([f"with   {', '.join(f'{name} {value}' for name, value in run.versions.items())}"])
    return blocks


def _of_several(runs: Sequence[RecordedRun]) -> list[Block]:
    head = (*(run.name for run in runs), "")
    rows = [(*row[1:], row[0]) for row in words.comparison(runs)]
    different = [
        (*(text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..." for text in row[1:]), row[0])
        for row in words.differing(runs)
    ]
    differing: Block = Table(title="what differs", rows=(head, *different), has_head=True)
    return [
        Table(title=f"{len(runs)} runs", rows=(head, *rows), has_head=True),
        differing if different else ["no setting and no version differs"],
    ]


def _data(run: RecordedRun) -> dict[str, Any]:
    best = run.best_evaluation
    return {
        "name": run.name,
        "state": run.state,
        "steps": run.last_step,
        "total_steps": run.total_steps,
        "unit": run.unit,
        "loss": run.steps[-1].loss if run.steps else None,
        "best_validation_loss": None if best is None else best.loss,
        "best_validation_step": None if best is None else best.step,
        "units_per_second": run.speed,
        "padding_share": run.padding_share,
        "seconds": run.seconds,
        "memory": [
            {"phase": row.name, "planned_bytes": row.planned, "measured_bytes": row.measured,
             "reserved_bytes": row.reserved}
            for row in words.phase_rows(run)
        ],
        "restarts": len(run.restarts),
        "recoveries": len(run.recoveries),
        "events": [
            {"kind": each.kind, "step": each.step, "seconds": each.seconds, "words": each.words} for each in run.events
        ],
        "versions": run.versions,
        "plan_digest": None if run.plan is None else run.plan.digest,
        "settings": run.facts,
    }  # fmt: skip
