"""Writing checkpoints, in the step's way or behind it; `checkpoint` says what is in one and reads it.

In the background a rank copies its states into its host's memory, which takes as long as that, and trains on while a
thread of it writes the copy. What is on the disk at any moment is the same: a checkpoint has its name once all ranks
have all of their files there, and not before.
"""

import contextlib
import errno
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import torch.distributed as dist

from frugal.errors import CheckpointError
from frugal.training import generators, layout, manifest, resharding
from frugal.training.agreement import RanksFailed, together
from frugal.training.checkpoint import TRAINING, Progress, origin, read_progress
from frugal.training.manifest import File, Manifest
from frugal.training.writer import Writer

if TYPE_CHECKING:
    from frugal.training.engine import Engine


class Saver:
    """Writes a run's checkpoints into `folder`, keeping the `keep` newest and the best. Collective.

    Use it in a `with` block, which does not end, with an error or without, before what was begun is written.
    """

    def __init__(self, engine: "Engine", folder: Path, *, keep: int = 2, in_background: bool = False) -> None:
        self._engine = engine
        self._folder = folder.absolute()
        self._keep = keep
        self._in_background = in_background
        # A thread's votes would meet the step's in one group.
        self._votes = dist.new_group(backend="gloo") if in_background else engine.votes
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        """Nothing is begun yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait; an error that is on its way is the one to tell."""
        with contextlib.nullcontext() if error is None else contextlib.suppress(Exception):
            self.finish()

    def save(self, progress: Progress) -> Path:
        """Write `step-N` and point `latest` to it. In the background: begin to, once the one before is written.

        Raises:
            CheckpointError: a rank could not write this one, or the one before; what was there is untouched.
        """
        self.finish()
        engine, aside = self._engine, self._folder / f"step-{progress.step:06d}.tmp"
        writer = Writer(later=self._in_background)
        with self._explained(aside):
            together(lambda: _make_room(aside) if engine.rank == 0 else None, engine.votes)
            together(lambda: _find(aside) if engine.rank != 0 else None, engine.votes)
            together(lambda: _collect(engine, writer, aside, progress), engine.votes)
        made_by = origin(engine, progress.step, {})
        if self._in_background:
            self._writing = threading.Thread(target=self._finish_later, args=(aside, writer, made_by), daemon=True)
            self._writing.start()
        else:
            self._finish(aside, writer, made_by)
        return aside.with_suffix("")

    def finish(self) -> None:
        """Wait until what was begun is written.

        Raises:
            CheckpointError: a rank could not write it.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            raise self._failure

    def _finish(self, aside: Path, writer: Writer, made_by: Manifest) -> None:
        rank = self._engine.rank
        with self._explained(aside):
            shares = together(lambda: _listed(writer, rank), self._votes)
            whole = replace(made_by, files={name: file for share in shares for name, file in share.items()})
            together(lambda: _publish(aside, whole, self._keep) if rank == 0 else None, self._votes)

    def _finish_later(self, aside: Path, writer: Writer, made_by: Manifest) -> None:
        """On a thread. All ranks fail together, and end at the step that they are at the end of together."""
        try:
            self._finish(aside, writer, made_by)
        except BaseException as error:  # whatever it is, whoever asks next must know
            self._failure = error
            self._engine.wants_to_stop = True

    @contextlib.contextmanager
    def _explained(self, aside: Path) -> Iterator[None]:
        try:
            yield
        except RanksFailed as failed:
            if self._engine.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            last = manifest.newest(self._folder)
            raise CheckpointError(
                f"cannot write the checkpoint {aside.with_suffix('')}",
                because=[
                    *failed.reasons,
                    f"the last good checkpoint is {last.name}" if last else "there is no earlier checkpoint",
                ],
                hint="make room, then continue with --resume" if last else "make room, or choose another --out",
            ) from None


def save(engine: "Engine", folder: Path, progress: Progress, *, keep: int = 2) -> Path:
    """Write one checkpoint into `folder`; see `Saver`. Collective."""
    return Saver(engine, folder, keep=keep).save(progress)


def _make_room(aside: Path) -> None:
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)


def _find(aside: Path) -> None:
    """Whether this rank sees the folder that rank 0 made. Asked by making it, which no cache of a network disk answers.

    Otherwise each host would keep a part of the checkpoint to itself, and lose it with its disk.
    """
    try:
        aside.mkdir()
        aside.rmdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        pass
    raise OSError(
        errno.ENOENT, f"{socket.gethostname()} does not see what rank 0 made, and --out must be shared", str(aside)
    )


def _collect(engine: "Engine", writer: Writer, aside: Path, progress: Progress) -> None:
    """Give this rank's states to the writer."""
    with writer.installed(engine.deepspeed):
        engine.deepspeed.save_checkpoint(str(aside.parent), tag=aside.name, save_latest=False)
    writer.save(generators.state(engine.device), aside / f"rng_rank_{engine.rank}.pt")
    writer.write(msgspec.json.encode(layout.of(engine)), aside / resharding.file_name(engine.rank))
    if engine.rank == 0:
        learnt = replace(progress, learnt=engine.caution.learnt())
        writer.write(msgspec.json.encode(learnt), aside / TRAINING)
    if writer.failure is not None:
        raise writer.failure


def _listed(writer: Writer, rank: int) -> dict[str, File]:
    """This rank's files, on the disk when this returns."""
    return {path.name: manifest.describe(path, rank) for path in writer.finish()}


def _publish(aside: Path, made_by: Manifest, keep: int) -> None:
    final = manifest.seal(aside, made_by)
    manifest.write(final.parent / manifest.POINTER, final.name.encode() + b"\n")
    _prune(final, keep)


def _prune(current: Path, keep: int) -> None:
    """Remove all but the `keep` newest and the best, and whatever lies beyond `current`: a future given up."""
    past = sorted(
        (path for path in current.parent.glob("step-*") if not path.suffix and path.name <= current.name), reverse=True
    )
    losses = {path: loss for path in past if (loss := _validation_loss(path)) is not None}
    kept = {*past[: max(keep, 1)], *([min(losses, key=lambda path: losses[path])] if losses else [])}
    for path in current.parent.glob("step-*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _validation_loss(path: Path) -> float | None:
    with contextlib.suppress(ValueError):
        return read_progress(path).validation_loss
    return None
