"""What a run leaves when it ends: its page, and where it is out of memory a checkpoint of what it had."""

from collections.abc import Iterator
from contextlib import contextmanager

from frugal.config.run_settings import RunSettings
from frugal.distributed import rank_logs
from frugal.errors import CheckpointError, OutOfMemoryError
from frugal.report import after_run
from frugal.training.checkpoint.held_folder import HeldFolder
from frugal.training.checkpoint.progress import Progress
from frugal.training.checkpoint.saving import Saver
from frugal.training.engine import Engine


@contextmanager
def page_afterwards(held: HeldFolder, rank: int) -> Iterator[None]:
    """Rank 0 writes the run's page behind the `with` block, also where that fails."""
    try:
        yield
    finally:
        if rank == 0 and (why := after_run.write_page(held.settings.out)) is not None:
            rank_logs.to_console(f"note: {after_run.PAGE} could not be written ({why}); `frugal report` makes it")


def saved_and_explained(
    error: OutOfMemoryError, engine: Engine, saver: Saver, settings: RunSettings, now: Progress
) -> OutOfMemoryError:
    """The error with where the steps before it are saved; saves them now if no update is half done. Collective."""
    newest = saver.newest()
    kept = f"the last good checkpoint is {newest.name}" if newest else "there is no checkpoint"
    if engine.update.is_begun:
        kept = f"the weights are between two steps; {kept}"
    elif settings.save_every != 0 and now.step > 0:
        try:
            kept = f"step {now.step} is saved in {saver.save(now)}"
            saver.finish()
        except CheckpointError as failed:
            kept = f"{failed.what}, {kept}"
    return OutOfMemoryError(error.what, because=[*error.because, kept], hint=error.hint)
