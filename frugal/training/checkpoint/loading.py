"""Reading a checkpoint: verified, on the layout that wrote it or on another one, by a run that may have changed.

    checkpoints/
      latest                      the name of the newest complete checkpoint
      step-000100/
        manifest.json             every file's length and SHA-256, and what the checkpoint is of
        training.json             `Progress`: step, position in the data, validation loss
        extra.pt                  the user's own state, if there is any: plain data
        rng_rank_0.pt ...         random number generators of each rank, which DeepSpeed does not save
        layout_rank_0.json ...    which elements of which parameters are where in its files, see `StateLayout`
        *_model_states.pt, *_optim_states.pt      DeepSpeed's own files

`frugal.training.checkpoint.saving` writes them. On the layout that wrote it a checkpoint is read by DeepSpeed and
continued bit for bit. On another one (other ranks, another ZeRO stage, offloading or not) it is resharded: element by
element the states do not depend on the layout. So nothing is converted and nothing is exchanged: every
rank maps the files of all ranks that wrote them into memory, and copies the elements of its own slots to where it
keeps them, piece by piece. It takes no memory beside what it keeps for training; of the files, the disk's cache holds
what it likes. Measured on one CPU rank, 30M parameters, bf16, to ZeRO-3: 7.9 bytes a parameter more than before, at the
peak as afterwards, which are Adam's moments; where the layout is the same, DeepSpeed's own reading peaks at 12.

What it relies on: that states with an element a parameter's element belong to it alone (Adam's moments, momentum), and
that the model's weights are its master weights, rounded. Left out, and refused: states in blocks (8-bit Adam),
and states on NVMe.

What a run that continues may change and what it may not is checked by `resume_checks`, and either is said.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from frugal import files
from frugal.config.hardware import local_host
from frugal.config.learning_rate import Curve
from frugal.config.run_settings import RunSettings
from frugal.deepspeed_adapter import checkpoint_files, kernels
from frugal.deepspeed_adapter.checkpoint_files import Piece, StateFiles, StateLayout
from frugal.deepspeed_adapter.stages import Zero
from frugal.distributed.exchange import from_rank_0, gather
from frugal.errors import CheckpointError, PlanMismatchError, RequestError
from frugal.training.checkpoint import frozen_base, manifest, other_states, random_state, resume_checks
from frugal.training.checkpoint.manifest import File, Manifest, OutOfReachError
from frugal.training.checkpoint.other_states import Expected
from frugal.training.checkpoint.progress import EXTRA, TRAINING, Progress, read_progress
from frugal.training.data.batches import Position
from frugal.training.data.sources import Provenance
from frugal.training.train_step import Stepper

MASTER = "master"  # among the names of a slot's states: the weights themselves
FROZEN = "frozen"
STATES = ("model_states", "optim_states")  # DeepSpeed's files, by how their names end


def file_name(rank: int) -> str:
    """Of the layout of one rank, in a checkpoint."""
    return f"layout_rank_{rank}.json"


def read_layout(folder: Path, rank: int) -> StateLayout:
    """The layout of one rank of those that wrote the checkpoint."""
    return msgspec.json.decode(files.read_regular(folder / file_name(rank)), type=StateLayout)


def restore(engine: Stepper, saved: "Saved") -> None:
    """Bring weights, optimizer and counters of the engine to the checkpoint's, whatever its layout. Collective.

    Ranks meet only where ZeRO-3 gathers its small parameters at the end.
    """
    zero = engine.zero
    with zero.opened(), torch.no_grad():
        _fill_slots(zero, saved)
        zero.fill_weights(
            lambda name, first, into, is_frozen: (
                saved.copy(name, first, into, FROZEN if is_frozen else MASTER)
                if saved.has_base or not is_frozen
                else None
            )
        )
        for name, buffer in engine.module.named_buffers():
            if name in saved.module:
                buffer.copy_(saved.module[name])
    zero.put_counters(saved.common, saved.scaler())


class Saved:
    """The states in a checkpoint's files, by parameter. Nothing is read before it is copied.

    `has_base`: whether parameters that are not trained are there, too.
    """

    def __init__(self, folder: Path, made_by: Manifest) -> None:
        self._stage = made_by.zero_stage
        self.has_base = made_by.base is None
        self._files: dict[tuple[int, str], Path] = {}
        for name, file in made_by.files.items():
            for kind in STATES:
                if name.endswith(f"{kind}.pt"):
                    self._files[file.rank, kind] = folder / name
        num_writers = made_by.world_size if self._stage else 1  # without ZeRO all ranks hold the same
        self._pieces: dict[tuple[str, bool], list[tuple[Piece, int, int]]] = defaultdict(list)
        self._layouts = [read_layout(folder, rank) for rank in range(num_writers)]
        for rank, kept in enumerate(self._layouts):
            for slot, pieces in enumerate(kept.slots):
                for piece in pieces:
                    self._pieces[piece.name, False].append((piece, rank, slot))
            if self._stage == 3 or rank == 0:
                for piece in kept.frozen:
                    self._pieces[piece.name, True].append((piece, rank, -1))
        self._read: dict[tuple[int, str], Any] = {}  # let go with this object, so that nothing stays mapped
        self.common, self.module = self._of(0).common, self._of(0).module

    def copy(self, name: str, first: int, into: Tensor, state: str = MASTER) -> None:
        """Elements `first` and following of a parameter's state, as many as `into` has, shape `(elements,)`."""
        done = 0
        for piece, rank, slot in self._pieces[name, state == FROZEN]:
            begin, end = max(first, piece.first), min(first + len(into), piece.first + piece.number)
            if begin < end:
                place = piece.place + begin - piece.first
                elements = self._flat(rank, slot, state, name)[place : place + end - begin]
                into[begin - first : end - first].copy_(elements)
                done += end - begin
        assert done == len(into), f"{name}: {done} of {len(into)} elements are in the checkpoint"

    def first_wrong(self, expected: Expected, rank: int = 0, world_size: int = 1) -> str | None:
        """Return what is not as expected in the files that this rank answers for; None where all is."""
        for writer in range(rank, len(self._layouts), world_size):
            has_model = self._stage == 3 or writer == 0
            wrong = other_states.first_wrong(self._of(writer), self._layouts[writer], expected, has_model=has_model)
            if wrong is not None:
                return wrong if len(self._layouts) == 1 else f"rank {writer}: {wrong}"
        return other_states.wrong_tiling(self._layouts, expected) if rank == 0 else None

    def parameters(self, *, frozen: bool) -> dict[str, int]:
        """Elements of each parameter that was trained, or that was not."""
        return {
            name: max(piece.first + piece.number for piece, *_ in pieces)
            for (name, is_frozen), pieces in self._pieces.items()
            if is_frozen == frozen
        }

    def optimizer_states(self) -> tuple[list[str], dict[str, Any]]:
        """Names of the states with an element for each of a slot, and those with one value for the whole slot."""
        states = self._of(0).slot(0)
        many = [name for name, value in states.items() if isinstance(value, Tensor) and value.dim() > 0]
        return many, {name: value for name, value in states.items() if name not in many and value is not None}

    def scaler(self) -> dict[str, Any]:
        """What DeepSpeed keeps of fp16's loss scale, and has also where there is none; empty without ZeRO."""
        return self._of(0).scaler()

    def _flat(self, rank: int, slot: int, state: str, name: str) -> Tensor:
        files = self._of(rank)
        if state == FROZEN:
            return files.frozen(name).view(-1)
        if state != MASTER:
            return files.slot(slot)[state].view(-1)
        return files.master(slot) if self._stage else self.module[name].view(-1)

    def _of(self, rank: int) -> StateFiles:
        return StateFiles(self._stage, partial(self._load, rank))

    def _load(self, rank: int, kind: str) -> Any:
        if (rank, kind) not in self._read:
            self._read[rank, kind] = checkpoint_files.read(self._files[rank, kind], mmap=True)
        return self._read[rank, kind]


def _fill_slots(zero: Zero, saved: Saved) -> None:
    """The optimizer's weights and states."""
    many, single = saved.optimizer_states()
    for flat, pieces in zip(zero.flat_tensors(), zero.layout().slots, strict=True):
        states = {MASTER: flat.data, **{name: torch.zeros_like(flat.data) for name in many}}
        for name, tensor in states.items():
            for piece in pieces:
                into = tensor.view(-1)[piece.place : piece.place + piece.number]
                saved.copy(piece.name, piece.first, into, name)
        del states[MASTER]
        zero.put_states(flat, states, single)


logger = logging.getLogger("frugal")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was loaded from where; why newer checkpoints were `refused`, and what `changes` in the run that goes on."""

    progress: Progress
    folder: Path
    refused: tuple[str, ...]
    changes: tuple[str, ...]


def load(engine: Stepper, folder: Path, *, only: str | None = None) -> Loaded:
    """Bring the engine and this rank's generators to the newest good checkpoint in `folder`. Collective.

    `only`: to the one of this name on rank 0, and to no other.

    Raises:
        CheckpointError: there is none, or none that is whole; or the newest is, and holds something else.
        PlanMismatchError: it is of another model, or trains it otherwise, or its states cannot be read on this layout.
    """
    folder = folder.absolute()
    known = [path.name for path in manifest.checkpoints_in(folder)]
    names = from_rank_0(known if only is None else [only], list[str], engine.votes)
    refused: list[str] = []
    out_of_reach: list[str] = []
    for path in (folder / name for name in names):
        damage = [each for each in gather(_damage(engine, path), Damage | None, engine.votes) if each]
        if damage:
            refused.append(damage[0].reason)
            if engine.rank == 0:
                logger.warning("refused a checkpoint: %s", damage[0].reason)
            if any(each.is_for_now for each in damage):
                out_of_reach.append(path.name)
            continue
        if engine.rank == 0:
            _give_away(folder, out_of_reach)
        made_by, this = manifest.read(path), origin(engine, 0, {})
        resume_checks.check_resume(path, made_by, this)
        with other_states.named(path):
            progress = _restore(engine, path, made_by, this)
        return Loaded(
            progress=progress, folder=path, refused=tuple(refused), changes=resume_checks.resume_changes(made_by, this)
        )
    if refused:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole",
            because=refused,
            hint="try again once the disk can be read" if out_of_reach else "start again with another --out",
        )  # fmt: skip
    raise CheckpointError(f"there is no checkpoint in {folder}", hint="start without --resume")


def origin(engine: Stepper, step: int, listed: dict[str, File]) -> Manifest:
    """What this run is, in the manifest's words."""
    plan = engine.recorded_plan
    own = None if engine.own_optimizer is None else engine.own_optimizer.name
    shapes = [(name, engine.zero.shape(p)) for name, p in engine.module.named_parameters()]
    return Manifest(
        step=step,
        world_size=engine.world_size,
        zero_stage=plan.strategy.zero_stage,
        offload=(plan.strategy.offload_optimizer, plan.strategy.offload_parameters),
        strategy=str(plan.strategy),
        optimizer=kernels.describe_optimizer(plan.request, plan.strategy) if own is None else own,
        model=plan.request.model,
        shapes=manifest.digest_of(shapes),
        recipe=resume_checks.recipe(plan) | ({} if own is None else {"optimizer": own}),
        plan_digest=plan.digest,
        versions=local_host.library_versions(),
        files=listed,
        base=frozen_base.digest(engine),
    )


class Damage(NamedTuple):
    """A reason why a rank cannot use a checkpoint. `is_for_now`: its disk could not be read; it may be whole."""

    reason: str
    is_for_now: bool


def _damage(engine: Stepper, path: Path) -> Damage | None:
    """Why this rank cannot use the checkpoint, or None."""
    try:
        made_by, progress = manifest.read(path), read_progress(path)
        damage = (
            manifest.first_damage(path, made_by, engine.rank, engine.world_size)
            or lacking(path, made_by)
            or foreign(path, made_by, engine.rank, engine.world_size)
        )
    except ValueError as error:
        return Damage(str(error), isinstance(error, OutOfReachError))
    if damage is None and progress.step != made_by.step:
        damage = f"{path / TRAINING} is of step {progress.step}, and {manifest.MANIFEST} of step {made_by.step}"
    return None if damage is None else Damage(damage, is_for_now=False)


def _give_away(folder: Path, names: list[str]) -> None:
    """Take checkpoints that cannot be read for the moment from what this run may remove: they may be good."""
    if not names:
        return
    try:
        files.record_written(folder, files.written(folder) - set(names))
    except OSError as error:
        logger.warning("cannot note that %s is to be kept: %s", ", ".join(names), error.strerror)


def lacking(path: Path, made_by: Manifest) -> str | None:
    """What the checkpoint has no file of."""
    if not 0 < made_by.world_size <= len(made_by.files):
        return f"{path / manifest.MANIFEST} is of {made_by.world_size} ranks, and lists {len(made_by.files)} files"
    kinds = {
        (file.rank, kind) for name, file in made_by.files.items() for kind in STATES if name.endswith(f"{kind}.pt")
    }
    for rank in range(made_by.world_size):
        needed = {file_name(rank), f"rng_rank_{rank}.pt"} - made_by.files.keys()
        needed |= {STATES[0]} if (made_by.zero_stage == 3 or rank == 0) and (rank, STATES[0]) not in kinds else set()
        needed |= {STATES[1]} if made_by.zero_stage > 0 and (rank, STATES[1]) not in kinds else set()
        if needed:
            return f"{path} has no {min(needed)} of rank {rank}"
    return None


def foreign(path: Path, made_by: Manifest, rank: int, world_size: int) -> str | None:
    """What no checkpoint of ours holds, in the files that this rank answers for."""
    for name, file in made_by.files.items():
        if name.endswith(".pt") and file.rank % world_size == rank:
            try:
                names = checkpoint_files.foreign(path / name)
            except OSError as error:
                raise manifest.unreadable(error, path / name) from None
            except Exception as error:  # whatever torch's unpickler makes of a file that it did not write
                return f"{path / name} cannot be read: {type(error).__name__}: {error}"
            if names:
                return f"{path / name} holds {', '.join(names)}, which frugal does not save and could run any code"
    return None


def _restore(engine: Stepper, path: Path, made_by: Manifest, this: Manifest) -> Progress:
    is_same = all(gather(_fits(engine, path, made_by, this), bool, engine.votes))
    if not is_same and (refusal := resume_checks.refuse_other_layout(path, made_by, this)) is not None:
        raise refusal
    saved = Saved(path, made_by)
    generators = _generators(path, engine.rank) if made_by.world_size == this.world_size else None
    wrong = saved.first_wrong(_expected(engine, made_by, is_same=is_same), engine.rank, engine.world_size)
    if wrong is None and generators is not None:
        wrong = other_states.wrong_generators(generators)
    if reasons := [reason for reason in gather(wrong, str | None, engine.votes) if reason]:
        raise other_states.refusal(path, reasons[0])
    if is_same:
        del saved
        checkpoint_files.load(engine.deepspeed, path, without_frozen=made_by.base is not None)
    else:
        restore(engine, saved)
    _follow_plan(engine)
    progress = read_progress(path)
    if EXTRA in made_by.files:
        progress = replace(progress, extra=checkpoint_files.read(path / EXTRA))
    engine.adaptive_limits.recall(progress.learnt)
    if generators is not None:
        random_state.restore_generators(generators, engine.device)
    else:  # nobody's generators are this rank's, so it gets some that no rank had
        random_state.seed_all((progress.seed * 1_000_003 + progress.step) * 65_537 + engine.rank)
    return progress


def _generators(path: Path, rank: int) -> Any:
    return checkpoint_files.read(path / f"rng_rank_{rank}.pt")


def _expected(engine: Stepper, made_by: Manifest, *, is_same: bool) -> Expected:
    """Return how this engine has what it is going to read."""
    zero, request = engine.zero, engine.plan.request
    is_adam = engine.own_optimizer is None and request.optimizer == "adamw"
    return Expected(
        zero_stage=made_by.zero_stage,
        world_size=made_by.world_size,
        has_base=made_by.base is None,
        masters=kernels.DTYPES[request.optimizer_states or "fp32"],
        moments=kernels.DTYPES[request.optimizer_states or "fp32"] if is_adam else None,
        scheduler=engine.deepspeed.lr_scheduler,
        slots=tuple(flat.numel() for flat in zero.flat_tensors()) if is_same else None,
        scaler=zero.optimizer.loss_scaler if made_by.zero_stage and engine.plan.strategy.zero_stage else None,
        **other_states.of_module(engine.module, {name: zero.shape(p) for name, p in engine.module.named_parameters()}),
    )


def _fits(engine: Stepper, path: Path, made_by: Manifest, this: Manifest) -> bool:
    """Whether this rank finds its states in one of the files, as it keeps them."""
    if this.zero_stage > 0 and made_by.world_size != this.world_size:
        return False
    kinds = [(each.zero_stage, each.offload, each.optimizer) for each in (made_by, this)]
    written = read_layout(path, engine.rank % made_by.world_size)
    return kinds[0] == kinds[1] and written == engine.zero.layout()


def _follow_plan(engine: Stepper) -> None:
    """Have the optimizer go on with the plan's settings, which DeepSpeed overwrites with those it saved."""
    request, scheduler = engine.plan.request, engine.deepspeed.lr_scheduler
    if engine.own_optimizer is not None:
        _follow_groups(engine)
        return
    peak, factor = request.scaled_learning_rate, 1.0
    if scheduler is not None:
        scheduler.base_lrs = [peak] * len(scheduler.base_lrs)
        factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
    for group in engine.deepspeed.optimizer.param_groups:
        group["lr"] = peak * factor
        group["weight_decay"] = request.weight_decay if request.decays_all else 0.0
        if "momentum" in group:
            group["momentum"] = request.momentum or 0.0
        if "betas" in group:
            group["betas"], group["eps"] = request.betas, request.epsilon


def _follow_groups(engine: Stepper) -> None:
    """The same with an optimizer or groups of the user's own: each group has its own settings."""
    scheduler, factor = engine.deepspeed.lr_scheduler, 1.0
    if scheduler is not None:
        scheduler.base_lrs = [settings["lr"] for settings in engine.group_settings]
        factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
    for group, settings in zip(engine.zero.inner.param_groups, engine.group_settings, strict=True):
        group.update(settings)
        group["lr"] = settings["lr"] * factor


def on_data(progress: "Progress", data: Provenance, settings: RunSettings) -> "tuple[Progress, tuple[str, ...]]":
    """Where a run goes on in data of this provenance, and what is not as it was.

    On other data the place in the order means nothing, so it begins an epoch: each sample comes once in it.

    Raises:
        RequestError: another seed.
        PlanMismatchError: other data, and nobody said that this was all right.
    """
    if progress.seed != settings.seed:
        raise RequestError(
            f"the run in {settings.out} was started with another seed",
            because=f"its seed is {progress.seed}, this one is {settings.seed}",
            hint="resume with the same --seed, or start anew with another --out",
        )
    if progress.data.fingerprint == data.fingerprint:
        return progress, ()
    changes = progress.data.changes(data)
    if not settings.accept_changed_data:
        raise PlanMismatchError(
            f"the data of the run in {settings.out} has changed since step {progress.step}",
            because=changes,
            hint="restore it, start anew with another --out, or go on with --accept-changed-data",
        )
    position = progress.position
    if position.offset or position.stream is not None:
        position = Position(position.epoch + 1, 0)
    words = f"the data ({'; '.join(changes)}), which begins with epoch {position.epoch + 1}"
    return replace(progress, data=data, position=position), (words,)


def on_curve(progress: Progress, curve: Curve) -> tuple[Progress, tuple[str, ...]]:
    """Where a run goes on with this learning rate, and what that means for its next step where the schedule changed."""
    change = None if progress.learning_rate is None else curve.change_from(progress.learning_rate, progress.step)
    return replace(progress, learning_rate=curve), () if change is None else (change,)


def describe_changes(changed: tuple[str, ...], step: int, out: Path) -> str:
    """One line about a run that goes on otherwise than it was."""
    same = [
        name for name in ("global batch", "order", "learning rate") if not any(_tells(each, name) for each in changed)
    ]
    unchanged = f"{', '.join(same[:-1])} and {same[-1]} are unchanged" if same[1:] else f"{same[0]} is unchanged"
    return f"resumed at step {step} of {out}: {', '.join(changed)}; {unchanged}"


def _tells(change: str, name: str) -> bool:
    return change.startswith({"order": "the data"}.get(name, name))
