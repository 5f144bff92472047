"""The command line: parse, call, print. The only place that prints results or ends the process."""

import atexit
import errno
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import click

from frugal.distributed import rank_logs
from frugal.errors import INTERRUPTED, FrugalError, RequestError

# Each command lives in its own module and is imported when it is called: `frugal plan` must not wait for torch.
COMMANDS = {
    "plan": ("frugal.cli.plan", "Choose the fastest plan that fits."),
    "train": ("frugal.cli.train", "Train with a plan; without one, plan first."),
    "explain": ("frugal.cli.explain", "Explain the decisions of a plan, and what would make it faster."),
    "export": ("frugal.cli.export", "Export a model from a run, or a plan to another trainer."),
    "report": ("frugal.cli.report", "Summarize a run, or compare several, as a table and a page."),
    "measure": ("frugal.cli.measure", "Run a plan for two steps, and compare its memory with the prediction."),
    "dryrun": ("frugal.cli.dryrun", "Predict a step's memory by running it on meta tensors."),
    "doctor": ("frugal.cli.doctor", "Check hosts for problems that would prevent a run."),
    "check": ("frugal.cli.check", "Check whether a configuration of another trainer fits."),
}


CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


class _Commands(click.Group):
    """The commands above as a click group."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[name][0]).command
        command.context_settings.update(CONTEXT_SETTINGS)  # click keeps the names of the first context, whoever made it
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])


@click.group(cls=_Commands, no_args_is_help=True, context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="frugal-trainer", prog_name="frugal")
def cli() -> None:
    """Train any global batch on the GPUs you have, with predictable memory."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. A closed pipe behind standard output changes nothing else."""
    rank_logs.guard_console()
    code = run(arguments)
    sys.stdout.flush()
    error = rank_logs.lost_console.get("standard output")
    is_training = "train" in (sys.argv[1:] if arguments is None else arguments)[:1]  # its output is in files, too
    if error is not None and error.errno != errno.EPIPE and not is_training:
        click.echo(f"error: cannot write to standard output\n  because {error.strerror}", err=True)
        code = code or RequestError.exit_code
    if code == INTERRUPTED:
        atexit._run_exitfuncs()
        os._exit(code)  # taking down an interpreter with torch in it takes seconds
    sys.exit(code if code >= 0 else 128 - code)  # ended by a signal, as shells report it


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Errors of the user become text here."""
    try:
        result = cli.main(args=arguments, prog_name="frugal", standalone_mode=False)
    except FrugalError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"error: {_in_our_voice(error)}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _in_our_voice(error: click.ClickException) -> str:
    """Return click's message in lower case, without full stop, its suggestions as a hint."""
    hint = "see `frugal --help`"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"see `{error.ctx.command_path} --help`"
    message = error.format_message()
    possibilities = getattr(error, "possibilities", None)
    if isinstance(error, click.NoSuchOption):
        message = f"no such option {error.option_name}"
        possibilities = get_close_matches(error.option_name, possibilities or (), cutoff=0.75)  # click's 0.6 is too far
    if possibilities:
        hint = f"did you mean {' or '.join(sorted(possibilities))}?"
    return f"{message[:1].lower()}{message[1:].rstrip('.')}\n\nhint: {hint}"
