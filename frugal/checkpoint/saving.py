"""Writing checkpoints, before the next step or behind it; `loading` says what is in one and reads it.

In the background a rank copies its states to host memory, which takes as long as that copy, and trains on while a
thread writes them. The disk has the same content at any moment: a checkpoint gets its name once all ranks have all of
their files there, and not before.

The trained model is written as others load it: a folder for `from_pretrained`, or one file of weights for any module.
"""

import contextlib
import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec
import torch.distributed as dist
from torch import Tensor, nn

from frugal import file_errors, files
from frugal.checkpoint import frozen_base, loading, manifest, other_states, random_state
from frugal.checkpoint.progress import EXTRA, TRAINING, Progress, finite, read_progress
from frugal.deepspeed_adapter.checkpoint_files import CheckpointWriter
from frugal.deepspeed_adapter.stages import Zero
from frugal.distributed.connections.listeners import closed_afterwards
from frugal.distributed.exchange import RanksFailed, together
from frugal.errors import CheckpointError

Score = Callable[[Progress], float | None]
"""The number by which checkpoints are compared, the smaller the better; None if it was not measured."""


class Saver(contextlib.AbstractContextManager["Saver"]):
    """A writer of one run's checkpoints into `folder`, of which it keeps the `keep` newest and the best, by `score`.

    Its methods are collective. `before` is called on rank 0 before each checkpoint, and raises OSError where it cannot
    be saved; `published` after each, also on the thread that writes it. Use it in a `with` block, which waits at its
    end, with an error or without, for what is being written.
    """

    def __init__(
        self,
        engine: loading.Trained,
        folder: Path,
        *,
        keep: int = 2,
        score: Score = lambda progress: progress.validation_loss,
        in_background: bool = False,
        before: Callable[[], None] = lambda: None,
        published: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._folder = folder.absolute()
        self._keep, self._score = keep, score
        self._in_background, self._before, self._published = in_background, before, published
        with closed_afterwards():  # a group of its own: a thread's votes would meet those of the step
            self._votes = dist.new_group(backend="gloo") if in_background else engine.votes
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._complete: tuple[int, Path] | None = None  # a checkpoint that callbacks do not know yet

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is being written; an error inside the block is the one to report."""
        with contextlib.nullcontext() if error is None else contextlib.suppress(Exception):
            self.finish()

    def newest(self) -> Path | None:
        """Return the newest checkpoint, to which `latest` points; None if there is none."""
        return manifest.newest_checkpoint(self._folder)

    def save(self, progress: Progress) -> Path:
        """Write `step-N` and point `latest` to it. In the background: begin to, once the one before is written.

        Raises:
            CheckpointError: a rank could not write this one, or the one before; earlier ones are untouched.
        """
        self.finish()
        engine, aside = self._engine, self._folder / f"step-{progress.step:06d}.tmp"
        writer = CheckpointWriter(later=self._in_background)
        with self._explained(aside):
            together(lambda: self._make_room(aside) if engine.rank == 0 else None, engine.votes)
            together(lambda: _find(aside) if engine.rank != 0 else None, engine.votes)
            together(lambda: _collect(engine, writer, aside, progress), engine.votes)
        made_by = loading.origin(engine, progress.step, {})
        if self._in_background:
            self._writing = threading.Thread(target=self._publish_later, args=(aside, writer, made_by), daemon=True)
            self._writing.start()
        else:
            self._publish(aside, writer, made_by)
            self.finish()
        return aside.with_suffix("")

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is written.

        Raises:
            CheckpointError: a rank could not write it.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._complete is not None:
            (step, folder), self._complete = self._complete, None
            self._engine.callbacks.call("on_save", self._engine, step, folder)

    def _make_room(self, aside: Path) -> None:
        """Make rank 0's new folder for a checkpoint, of which nothing was there before."""
        self._before()
        files.refuse_foreign_link(aside.parent)
        aside.parent.mkdir(parents=True, exist_ok=True)
        if aside.name in (ours := files.written(aside.parent)):
            files.remove(aside)
        files.move_aside(aside)
        files.record_written(aside.parent, {*ours, aside.name})
        aside.mkdir()

    def _publish(self, aside: Path, writer: CheckpointWriter, made_by: manifest.Manifest) -> None:
        rank = self._engine.rank

        def name_it(listed: dict[str, manifest.File]) -> None:
            _prune(manifest.publish(aside, replace(made_by, files=listed)), self._keep, self._score)

        with self._explained(aside):
            shares = together(
                lambda: {path.name: manifest.file_entry(path, rank) for path in writer.finish()},
                self._votes, dict[str, manifest.File] | None,
            )  # fmt: skip
            listed = {name: file for share in shares for name, file in share.items()}
            together(lambda: name_it(listed) if rank == 0 else None, self._votes)
        self._complete = (made_by.step, aside.with_suffix(""))
        self._published()

    def _publish_later(self, aside: Path, writer: CheckpointWriter, made_by: manifest.Manifest) -> None:
        """Publish on a thread. All ranks fail together, and end together after the step that they are in."""
        try:
            self._publish(aside, writer, made_by)
        except BaseException as error:  # reported by the next `finish`
            self._failure = error
            self._engine.wants_to_stop = True

    @contextlib.contextmanager
    def _explained(self, aside: Path) -> Iterator[None]:
        try:
            yield
        except RanksFailed as failed:
            if self._engine.rank == 0 and aside.name in files.written(aside.parent):
                shutil.rmtree(aside, ignore_errors=True)
            last = self.newest()
            raise CheckpointError(
                f"cannot write the checkpoint {aside.with_suffix('')}",
                because=[
                    *failed.reasons,
                    f"the last good checkpoint is {last.name}" if last else "there is no earlier checkpoint",
                ],
                hint=(file_errors.THEN_RESUME if last else file_errors.OR_ELSEWHERE).format(failed.remedy),
            ) from None


def save(engine: loading.Trained, folder: Path, progress: Progress, *, keep: int = 2) -> Path:
    """Write one checkpoint into `folder`; see `Saver`. Collective."""
    return Saver(engine, folder, keep=keep).save(progress)


def _find(aside: Path) -> None:
    """Check that this rank sees the folder that rank 0 made, by making it: no cache of a network disk answers that.

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


def _collect(engine: loading.Trained, writer: CheckpointWriter, aside: Path, progress: Progress) -> None:
    """Give this rank's states to the writer."""
    writer.collect(engine.deepspeed, aside, without_frozen=frozen_base.is_left_out(engine.plan))
    writer.save(random_state.generator_states(engine.device), aside / f"rng_rank_{engine.rank}.pt")
    kept = [engine.zero.inner.state.get(flat, {}) for flat in engine.zero.flat_tensors()]
    layout = replace(engine.zero.layout(), states=tuple(map(other_states.describe, kept)))
    writer.write(msgspec.json.encode(layout), aside / loading.file_name(engine.rank))
    if engine.rank == 0:
        record = replace(finite(progress), learnt=engine.adaptive_limits.learnt(), extra=None)
        writer.write(msgspec.json.encode(record), aside / TRAINING)
        if progress.extra is not None:
            writer.save(progress.extra, aside / EXTRA)
    if writer.failure is not None:
        raise writer.failure


def _prune(current: Path, keep: int, score: Score) -> None:
    """Remove all but the `keep` newest and the best, and whatever lies beyond `current`: a future given up.

    Only what frugal wrote in this folder, by its record. A checkpoint that cannot be read for the moment stays: it may
    be the best.
    """
    folder, ours = current.parent, files.written(current.parent)
    steps = {name: step for name in ours if (step := manifest.step_of(name)) is not None and not name.endswith(".old")}
    newest = sorted((name for name in steps if steps[name] <= steps[current.name]), key=lambda name: -steps[name])
    past = [folder / name for name in newest]
    best = best_of(past, score)
    kept = {*past[: max(keep, 1)], *([] if best is None else [best])}
    for path in (folder / name for name in ours if name not in steps or folder / name not in kept):
        try:
            read_progress(path)
        except manifest.OutOfReachError:
            continue
        except ValueError:
            pass
        shutil.rmtree(path, ignore_errors=True)
    files.record_written(folder, (name for name in ours if os.path.lexists(folder / name)))


def best_of(checkpoints: Iterable[Path], score: Score) -> Path | None:
    """Return the first checkpoint with the smallest score; None if none has a score."""
    scores: dict[Path, float] = {}
    for path in checkpoints:
        with contextlib.suppress(ValueError):
            if (value := score(read_progress(path))) is not None:
                scores[path] = value
    return min(scores, key=lambda path: scores[path], default=None)


def save_model(engine: loading.Trained, folder: Path, tokenizer: Any = None, *, uses_cache: bool | None = None) -> Path:
    """Write the model in the precision it was trained in, and the tokenizer, to `folder`. Collective.

    `uses_cache`: what its configuration said of `use_cache`, which is off in training. A transformers model becomes
    what `from_pretrained` loads; any other module a `model.safetensors` for `load_state_dict`; of a model with peft's
    adapters these are saved, for `PeftModel.from_pretrained`, and the name of its base. An earlier model in
    `folder` is replaced at the end, not before; a folder that frugal did not write is moved aside.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder = folder.absolute()
    is_adapter = frozen_base.is_left_out(engine.plan)
    weights = _whole_weights(engine.zero, engine.module, keep=engine.rank == 0, only_trained=is_adapter)
    try:
        together(
            lambda: (
                write_model(engine.module, weights, folder, tokenizer, uses_cache=uses_cache)
                if engine.rank == 0
                else None
            ),
            engine.votes,
        )
    except RanksFailed as failed:
        raise CheckpointError(
            f"cannot write the model to {folder}",
            because=failed.reasons,
            hint=file_errors.THEN_RESUME.format(failed.remedy),
        ) from None
    return folder


def _whole_weights(zero: Zero, module: nn.Module, *, keep: bool, only_trained: bool = False) -> dict[str, Tensor]:
    """Return parameters and buffers by name, on the host, tied ones shared; nothing unless `keep`. Collective.

    `only_trained`: only parameters that are trained. ZeRO-3 gathers one parameter at a time, so no device ever holds
    more than the largest beside its share.
    """
    copies: dict[int, Tensor] = {}
    for parameter in module.parameters():
        if parameter.requires_grad or not only_trained:
            with zero.gathered(parameter):
                if keep:
                    copies[id(parameter)] = parameter.detach().to("cpu", copy=True)
    if not keep:
        return {}
    if only_trained:
        return {name: copies[id(each)] for name, each in module.named_parameters() if each.requires_grad}
    tensors = module.state_dict(keep_vars=True)
    copies |= {id(each): each.detach().to("cpu", copy=True) for each in tensors.values() if id(each) not in copies}
    return {name: copies[id(each)] for name, each in tensors.items()}


def write_model(
    module: nn.Module,
    weights: dict[str, Tensor],
    folder: Path,
    tokenizer: Any,
    *,
    uses_cache: bool | None = None,
    place: Callable[[Path, Path], None] = files.replace_own_folder,
) -> None:
    """Write `weights` as those of `module`, and the tokenizer; see `save_model`. Not collective.

    `place` gives the complete folder, its first argument, the name `folder`.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside, config = files.unfinished(folder), cast(Any, getattr(module, "config", None))
    text = config.get_text_config() if uses_cache and hasattr(config, "get_text_config") else None
    try:
        if text is not None:
            text.use_cache = True
        _write(module, weights, aside, tokenizer)
        files.flush_all(aside)
        place(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    finally:
        if text is not None:
            text.use_cache = False


def _write(module: nn.Module, weights: dict[str, Tensor], aside: Path, tokenizer: Any) -> None:
    aside.mkdir()
    try:
        if hasattr(module, "peft_config"):  # without a look at the hub, whether it knows a larger vocabulary
            module.save_pretrained(aside, state_dict=weights, save_embedding_layers=False)  # type: ignore[operator]
        elif hasattr(module, "save_pretrained"):
            module.save_pretrained(aside, state_dict=weights)  # type: ignore[operator]  # a transformers model
        else:
            from safetensors.torch import save_file

            save_file({name: tensor.clone() for name, tensor in weights.items()}, aside / "model.safetensors")
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
    except Exception as error:  # safetensors has its own error for a full disk, tokenizers theirs
        files.write_file(aside / "room", bytes(1 << 20))  # raises what the cause is, where it is the disk
        raise OSError(None, f"{type(error).__name__}: {error}") from error
