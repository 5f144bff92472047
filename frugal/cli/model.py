"""`frugal model`."""

from pathlib import Path

import click


@click.command("model")
@click.argument("checkpoint", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option("--step", "which", metavar="N", help="Of a run: `last`, `best` or the number of a step.  [default: last]")
@click.option("--merge", is_flag=True, help="Merge adapters into their base.")
def command(checkpoint: Path, output: Path, which: str | None, merge: bool) -> None:
    """Make a model folder of a checkpoint: of a run's folder, or of one checkpoint in it.

    It runs on the CPU, in memory for the model alone, whichever ranks wrote the checkpoint. Adapters become a folder
    for `PeftModel.from_pretrained`; with --merge, and of a run without adapters, one for `from_pretrained`.
    """
    from frugal.distributed.env import silence_libraries
    from frugal.training.checkpoint import model_folder  # torch takes seconds

    silence_libraries()
    path = model_folder.find(checkpoint, which)
    kind = model_folder.write(path, output, merge=merge)
    click.echo(f"wrote {output}: {kind}")
