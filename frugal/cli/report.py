"""`frugal report`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from frugal import file_errors, files
from frugal.cli.display.terminal import show
from frugal.errors import RequestError
from frugal.report import words
from frugal.report.after_run import PAGE
from frugal.report.page import page
from frugal.report.run import RecordedRun, read_run
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
    runs = _named(folders, [read_run(folder) for folder in folders])
    words.check(runs)
    if output is None and len(runs) == 1 and not as_json:
        output = folders[0] / PAGE
    if output is not None:
        _write(output, page(runs))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(as_data(runs)), indent=2).decode())
        return
    show([*summary(runs), [f"page   {output}"] if output is not None else ["page   none; -o FILE writes one"]])


def _named(folders: Sequence[Path], runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the runs with different names."""
    names = words.renamed([run.name for run in runs], [str(folder) for folder in folders])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _write(path: Path, text: str) -> None:
    try:
        files.write_file(path, text.encode(), durable=False)
    except OSError as error:
        because, remedy = file_errors.explain(error, path)
        raise RequestError(
            f"cannot write the page {path}", because=because, hint=f"{remedy}, or name another with -o"
        ) from None
