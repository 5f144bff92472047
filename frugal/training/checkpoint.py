"""Checkpoints: all of a run's state, whole or not at all, verified when read.

    checkpoints/
      latest                      the name of the newest whole checkpoint
      step-000100/
        manifest.json             every file's length and SHA-256, and what the checkpoint is of
        training.json             `Progress`: step, position in the data, validation loss
        rng_rank_0.pt ...         random number generators of each rank, which DeepSpeed does not save
        layout_rank_0.json ...    which elements of which parameters are where in its files, see `layout`
        *_model_states.pt, *_optim_states.pt      DeepSpeed's own files

Ranks never act on their own: each step of saving and loading ends in a vote, so a full disk on one rank is an error
on all of them and a hang on none. On the layout that wrote it a checkpoint is read by DeepSpeed and continued bit for
bit; on another one `resharding` reads it.
"""

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from frugal.errors import CheckpointError
from frugal.training import continuation, generators, layout, optimizers, resharding
from frugal.training import manifest as files
from frugal.training.batches import Position
from frugal.training.caution import Learnt
from frugal.training.manifest import File, Manifest
from frugal.training.provenance import Provenance
from frugal.training.writer import Writer

if TYPE_CHECKING:
    from frugal.training.engine import Engine

TRAINING = "training.json"
logger = logging.getLogger("frugal")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        position: where the order of the data stands.
        data: where the training data comes from.
        seed: of the order of the data.
        validation_loss: of exactly these weights, where it was measured.
        learnt: what the run has learnt of the memory there is; `save` fills it in.
    """

    step: int
    position: Position = field(default_factory=Position)
    data: Provenance = field(default_factory=Provenance)
    seed: int = 0
    validation_loss: float | None = None
    learnt: Learnt | None = None


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was loaded from where; why newer checkpoints were `refused`, and what `changes` in the run that goes on."""

    progress: Progress
    folder: Path
    refused: tuple[str, ...]
    changes: tuple[str, ...]


def save(engine: "Engine", folder: Path, progress: Progress, *, keep: int = 2) -> Path:
    """Write `folder/step-N` and point `latest` to it; keep the `keep` newest and the best. Collective.

    Raises:
        CheckpointError: a rank could not write; the previous checkpoint is untouched.
    """
    folder = folder.absolute()
    aside = folder / f"step-{progress.step:06d}.tmp"
    try:
        together(engine, lambda: _make_room(aside) if engine.rank == 0 else None)
        shares = together(engine, lambda: _write_share(engine, aside, progress))
        made_by = _origin(engine, progress.step, {name: file for share in shares for name, file in share.items()})
        together(engine, lambda: _publish(aside, made_by, keep) if engine.rank == 0 else None)
    except RanksFailed as failed:
        if engine.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        last = files.newest(folder)
        raise CheckpointError(
            f"cannot write the checkpoint {aside.with_suffix('')}",
            because=[
                *failed.reasons,
                f"the last good checkpoint is {last.name}" if last else "there is no earlier checkpoint",
            ],
            hint="make room, then continue with --resume" if last else "make room, or choose another --out",
        ) from None
    return aside.with_suffix("")


def load(engine: "Engine", folder: Path) -> Loaded:
    """Bring the engine and this rank's generators to the newest good checkpoint in `folder`. Collective.

    Raises:
        CheckpointError: there is none, or none that is whole.
        PlanMismatchError: it is of another model, or trains it otherwise, or its states cannot be read on this layout.
    """
    folder = folder.absolute()
    names: list[Any] = [[path.name for path in files.candidates(folder)]]
    dist.broadcast_object_list(names, src=0, group=engine.votes)
    refused: list[str] = []
    for path in (folder / name for name in names[0]):
        damage = [reason for reason in gather(engine, _damage(engine, path)) if reason]
        if damage:
            refused.append(damage[0])
            if engine.rank == 0:
                logger.warning("refused a checkpoint: %s", damage[0])
            continue
        made_by, this = files.read(path), _origin(engine, 0, {})
        continuation.check(path, made_by, this)
        progress = _restore(engine, path, made_by, this)
        return Loaded(
            progress=progress, folder=path, refused=tuple(refused), changes=continuation.changes(made_by, this)
        )
    if refused:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole", because=refused, hint="start again with another --out"
        )
    raise CheckpointError(f"there is no checkpoint in {folder}", hint="start without --resume")


class RanksFailed(Exception):  # noqa: N818  # never leaves the training room; named for what happened
    """Some rank could not do its part; raised on every rank with all ranks' reasons."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


def gather(engine: "Engine", value: T) -> list[T]:
    """Every rank's value, in rank order."""
    values: list[Any] = [None] * engine.world_size
    dist.all_gather_object(values, value, group=engine.votes)
    return values


def together(engine: "Engine", action: Callable[[], T]) -> list[T]:
    """Run `action` on each rank, then vote: its results from all ranks, or `RanksFailed` on all."""
    result, problem = None, None
    try:
        result = action()
    except OSError as error:
        problem = f"rank {engine.rank}: {error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    answers = gather(engine, (result, problem))
    reasons = [reason for _, reason in answers if reason is not None]
    if reasons:
        raise RanksFailed(reasons)
    return [value for value, _ in answers]  # type: ignore[misc]  # no problem means a result


def _make_room(aside: Path) -> None:
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)


def _write_share(engine: "Engine", aside: Path, progress: Progress) -> dict[str, File]:
    """This rank's files, on the disk when this returns."""
    writer = Writer()
    with writer.installed(engine.deepspeed):
        engine.deepspeed.save_checkpoint(str(aside.parent), tag=aside.name, save_latest=False)
    writer.save(generators.state(engine.device), aside / f"rng_rank_{engine.rank}.pt")
    if writer.failure is not None:
        raise writer.failure
    kept = aside / resharding.file_name(engine.rank)
    kept.write_bytes(msgspec.json.encode(layout.of(engine)))
    written = [*writer.written, kept]
    if engine.rank == 0:
        (aside / TRAINING).write_bytes(msgspec.json.encode(replace(progress, learnt=engine.caution.learnt())))
        written.append(aside / TRAINING)
    return {path.name: files.describe(path, engine.rank) for path in written}


def _publish(aside: Path, made_by: Manifest, keep: int) -> None:
    final = files.seal(aside, made_by)
    files.write(final.parent / files.POINTER, final.name.encode() + b"\n")
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
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((path / TRAINING).read_bytes(), type=Progress).validation_loss
    return None


def _origin(engine: "Engine", step: int, listed: dict[str, File]) -> Manifest:
    """What this run is, in the manifest's words."""
    plan = engine.plan
    shapes = [(name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in engine.module.named_parameters()]
    return Manifest(
        step=step,
        world_size=engine.world_size,
        zero_stage=plan.strategy.zero_stage,
        offload=(plan.strategy.offload_optimizer, plan.strategy.offload_parameters),
        strategy=str(plan.strategy),
        optimizer=optimizers.describe(plan.request),
        model=plan.request.model,
        shapes=hashlib.sha256(repr(shapes).encode()).hexdigest(),
        recipe=continuation.recipe(plan),
        plan_digest=plan.digest,
        versions={name: version(name) for name in ("torch", "deepspeed", "transformers")},
        files=listed,
    )


def _damage(engine: "Engine", path: Path) -> str | None:
    """Why this rank cannot use the checkpoint, or None."""
    try:
        made_by = files.read(path)
    except ValueError as error:
        return str(error)
    return files.first_damage(path, made_by, engine.rank, engine.world_size)


def _restore(engine: "Engine", path: Path, made_by: Manifest, this: Manifest) -> Progress:
    if all(gather(engine, _fits(engine, path, made_by, this))):
        engine.deepspeed.load_checkpoint(str(path.parent), tag=path.name)
    elif (refusal := continuation.refuse_other_layout(path, made_by, this)) is not None:
        raise refusal
    else:
        resharding.restore(engine, path, made_by)
    _follow_plan(engine)
    progress = msgspec.json.decode((path / TRAINING).read_bytes(), type=Progress)
    engine.caution.recall(progress.learnt)
    if made_by.world_size == this.world_size:
        generators.restore(torch.load(path / f"rng_rank_{engine.rank}.pt", weights_only=True), engine.device)
    else:  # nobody's generators are this rank's, so it gets some that no rank had
        generators.seed_all((progress.seed * 1_000_003 + progress.step) * 65_537 + engine.rank)
    return progress


def _fits(engine: "Engine", path: Path, made_by: Manifest, this: Manifest) -> bool:
    """Whether this rank finds its states in one of the files, as it keeps them."""
    if this.zero_stage > 0 and made_by.world_size != this.world_size:
        return False
    kinds = [(each.zero_stage, each.offload, each.optimizer) for each in (made_by, this)]
    return kinds[0] == kinds[1] and resharding.read_layout(path, engine.rank % made_by.world_size) == layout.of(engine)


def _follow_plan(engine: "Engine") -> None:
    """Have the optimizer go on with the plan's settings, which DeepSpeed overwrites with those it saved."""
    request, scheduler = engine.plan.request, engine.deepspeed.lr_scheduler
    peak, factor = request.scaled_learning_rate, 1.0
    if scheduler is not None:
        scheduler.base_lrs = [peak] * len(scheduler.base_lrs)
        factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
    for group in engine.deepspeed.optimizer.param_groups:
        group["lr"] = peak * factor
        group["weight_decay"] = request.weight_decay
        if "momentum" in group:
            group["momentum"] = request.momentum or 0.0
