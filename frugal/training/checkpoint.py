"""Checkpoints: all of a run's state, whole or not at all, verified when read.

    checkpoints/
      latest                      the name of the newest whole checkpoint
      step-000100/
        manifest.json             every file's length and SHA-256, and what the checkpoint is of
        training.json             `Progress`: step, position in the data, validation loss
        rng_rank_0.pt ...         random number generators of each rank, which DeepSpeed does not save
        layout_rank_0.json ...    which elements of which parameters are where in its files, see `layout`
        *_model_states.pt, *_optim_states.pt      DeepSpeed's own files

`saving` writes them, this module reads. On the layout that wrote it a checkpoint is read by DeepSpeed and continued bit
for bit; on another one `resharding` reads it.
"""

import hashlib
import logging
import pickle
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from frugal.errors import CheckpointError
from frugal.training import continuation, generators, layout, optimizers, reader, resharding
from frugal.training import manifest as files
from frugal.training.agreement import gather
from frugal.training.batches import Position
from frugal.training.caution import Learnt
from frugal.training.manifest import File, Manifest
from frugal.training.provenance import Provenance

if TYPE_CHECKING:
    from frugal.training.engine import Engine

TRAINING = "training.json"
logger = logging.getLogger("frugal")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        position: where the order of the data stands.
        data: where the training data comes from.
        seed: of the order of the data.
        validation_loss: of exactly these weights, where it was measured.
        learnt: what the run has learnt of the memory there is; saving fills it in.
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
        damage = [reason for reason in gather(_damage(engine, path), engine.votes) if reason]
        if damage:
            refused.append(damage[0])
            if engine.rank == 0:
                logger.warning("refused a checkpoint: %s", damage[0])
            continue
        made_by, this = files.read(path), origin(engine, 0, {})
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


def origin(engine: "Engine", step: int, listed: dict[str, File]) -> Manifest:
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
        read_progress(path)
    except ValueError as error:
        return str(error)
    return files.first_damage(path, made_by, engine.rank, engine.world_size) or _foreign(engine, path, made_by)


def _foreign(engine: "Engine", path: Path, made_by: Manifest) -> str | None:
    """What no checkpoint of ours holds, in the files that this rank answers for."""
    for name, file in made_by.files.items():
        if name.endswith(".pt") and file.rank % engine.world_size == engine.rank:
            try:
                names = reader.foreign(path / name)
            except (RuntimeError, pickle.UnpicklingError) as error:
                return f"{path / name} cannot be read: {error}"
            if names:
                return f"{path / name} holds {', '.join(names)}, which frugal does not save and could run any code"
    return None


def read_progress(path: Path) -> Progress:
    """How far the run was at the checkpoint `path`.

    Raises:
        ValueError: its record cannot be read; the message says why.
    """
    try:
        return msgspec.json.decode((path / TRAINING).read_bytes(), type=Progress)
    except OSError as error:
        raise ValueError(f"{path / TRAINING}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path / TRAINING} is no record of a run: {error}") from None


def _restore(engine: "Engine", path: Path, made_by: Manifest, this: Manifest) -> Progress:
    if all(gather(_fits(engine, path, made_by, this), engine.votes)):
        with reader.installed(engine.deepspeed):
            engine.deepspeed.load_checkpoint(str(path.parent), tag=path.name)
    elif (refusal := continuation.refuse_other_layout(path, made_by, this)) is not None:
        raise refusal
    else:
        resharding.restore(engine, path, made_by)
    _follow_plan(engine)
    progress = read_progress(path)
    engine.caution.recall(progress.learnt)
    if made_by.world_size == this.world_size:
        generators.restore(reader.read(path / f"rng_rank_{engine.rank}.pt"), engine.device)
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
