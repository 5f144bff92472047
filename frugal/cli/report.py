"""`frugal report`."""

from dataclasses import replace
from pathlib import Path

import click

from frugal import file_errors, files
from frugal.cli.terminal import print_json, show
from frugal.report import words
from frugal.report.after_run import PAGE
from frugal.report.page import page
from frugal.report.run import read_run
from frugal.report.summary import as_data, summary


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
        print_json(as_data(runs))
        return
    show([*summary(runs), [f"page   {output}"] if output is not None else ["page   none; -o FILE writes one"]])
