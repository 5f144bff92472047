"""The command line: parse, call, print. The only place that prints results or ends the process."""

import errno
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import click

from frugal.distributed import rank_logs
from frugal.errors import INTERRUPTED, FrugalError, RequestError

# Each command lives in its own module and is imported when it is called: `frugal plan` must not wait for torch.
COMMANDS = {
    "plan": ("frugal.cli.plan", "Choose the fastest plan that fits, and say why."),
    "doctor": ("frugal.cli.doctor", "Look at what the hosts have for a run, and say what would stop it."),
    "explain": ("frugal.cli.explain", "Say why a plan is what it is, and what would help."),
    "export": ("frugal.cli.export", "Hand a plan to transformers' Trainer, Accelerate or a DeepSpeed script."),
    "check": ("frugal.cli.check", "Say whether a configuration of another trainer fits, and what is wrong with it."),
    "measure": ("frugal.cli.measure", "Run a plan for two steps, and hold its memory against the dry run."),
    "dryrun": ("frugal.cli.dryrun", "Run a step on tensors without storage, and say what fills the memory."),
    "model": ("frugal.cli.model", "Make a model folder of a checkpoint; merge adapters into their base."),
    "train": ("frugal.cli.train", "Train as planned; without a plan, plan first."),
    "report": ("frugal.cli.report", "Say how a run went, or how several differ, as a table and a page."),
}


CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


class _Commands(click.Group):
    """The table above as a click group."""

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
    """Train any batch on the GPUs you have, with memory that comes out as predicted."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Who stops reading what it prints changes nothing else."""
    rank_logs.guard_console()
    code = run(arguments)
    sys.stdout.flush()
    error = rank_logs.lost_console().get("standard output")
    if error is not None and error.errno != errno.EPIPE and not _trains(arguments):
        click.echo(f"error: cannot write to standard output\n  because {error.strerror}", err=True)
        code = code or RequestError.exit_code
    sys.exit(code if code >= 0 else 128 - code)  # of a rank that a signal ended, as shells say it


def _trains(arguments: Sequence[str] | None) -> bool:
    """Whether it is a run, which has files for what it says."""
    return "train" in (sys.argv[1:] if arguments is None else arguments)[:1]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. The one place where an error of the user's becomes text."""
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
    """click's message: lower case, no full stop, its suggestions as a hint."""
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
