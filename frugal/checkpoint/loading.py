"""Reading a checkpoint: verified, on the layout that wrote it or on another one, by a run that may have changed.

    checkpoints/
      latest                      the name of the newest complete checkpoint
      step-000100/
        manifest.json             length and SHA-256 of every file, and what wrote the checkpoint
        training.json             `Progress`: step, position in the data, validation loss
        extra.pt                  the user's own state, if there is any: plain data
        rng_rank_0.pt ...         random number generators of each rank, which DeepSpeed does not save
        layout_rank_0.json ...    which elements of which parameters are where in its files, see `StateLayout`
        *_model_states.pt, *_optim_states.pt      DeepSpeed's own files

`frugal.checkpoint.saving` writes them. There is one way to read them, on the layout that wrote them and on any
other (other ranks, another ZeRO stage, offloading or not): element by element the states do not depend on the layout,
so nothing is converted and nothing is exchanged. Every rank maps the files of all ranks that wrote them into memory,
and copies the elements of its own slots to where it keeps them, piece by piece. On the same layout that continues the
run bit for bit. It takes no memory beyond what training keeps: measured on one CPU rank, 30M parameters, bf16, to
ZeRO-3, 7.9 bytes a parameter more than before, which are Adam's moments; DeepSpeed's own reading peaks at 12.

It relies on states with one element for each element of a parameter (Adam's moments, momentum), and on weights that are
the master weights, rounded. States in blocks (8-bit Adam) are read on their own layout only, and so are states on NVMe,
which only DeepSpeed reads.

`resume_checks` checks what a resumed run may change, and describes it.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from frugal import files, torch_internals
from frugal.checkpoint import frozen_base, manifest, other_states, random_state, resume_checks
from frugal.checkpoint.manifest import File, Manifest, OutOfReachError
from frugal.checkpoint.progress import EXTRA, TRAINING, Progress, read_progress
from frugal.config.hardware import local_host
from frugal.deepspeed_adapter import checkpoint_files, kernels
from frugal.deepspeed_adapter.stages import Zero
from frugal.distributed.exchange import from_rank_0, gather
from frugal.errors import CheckpointError, logger
from frugal.planning.plan import Plan

MASTER = "master"  # among the names of a slot's states: the weights themselves
FROZEN = "frozen"
STATES = ("model_states", "optim_states")  # the ends of the names of DeepSpeed's files


class Trained(Protocol):
    """An engine whose state is saved and loaded, see `frugal.engine.train_step.Stepper`."""

    zero: Zero
    deepspeed: Any
    plan: Plan
    votes: dist.ProcessGroup | None
    rank: int
    world_size: int
    device: torch.device
    adaptive_limits: Any
    own_optimizer: Any
    group_settings: list[dict[str, Any]]
    callbacks: Any
    wants_to_stop: bool

    @property
    def module(self) -> nn.Module:
        """The model."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The progress that was loaded, its folder, why newer checkpoints were refused, and what changes in the run."""

    progress: Progress
    folder: Path
    refused: tuple[str, ...]
    changes: tuple[str, ...]


def load(engine: Trained, folder: Path, *, only: str | None = None) -> Loaded:
    """Bring the engine and this rank's generators to the newest good checkpoint in `folder`. Collective.

    `only`: use the one that has this name on rank 0, and no other.

    Raises:
        CheckpointError: there is none, or all are damaged, or the newest good one holds other states.
        PlanMismatchError: it is of another model, or trains it otherwise, or its states cannot be read on this layout.
    """
    folder = folder.absolute()
    known = [path.name for path in manifest.checkpoints_in(folder)]
    names = from_rank_0(known if only is None else [only], list[str], engine.votes)
    refused: list[str] = []
    out_of_reach: list[str] = []
    for path in (folder / name for name in names):
        damage = [each for each in gather(_damage(engine, path), tuple[str, bool] | None, engine.votes) if each]
        if not damage:
            if engine.rank == 0 and out_of_reach:
                try:  # they may be good: this run may not remove what cannot be read for the moment
                    files.record_written(folder, files.written(folder) - set(out_of_reach))
                except OSError as error:
                    logger.warning("cannot note that %s is to be kept: %s", ", ".join(out_of_reach), error.strerror)
            return _restore(engine, path, tuple(refused))
        refused.append(damage[0][0])
        if engine.rank == 0:
            logger.warning("refused a checkpoint: %s", damage[0][0])
        if any(is_for_now for _, is_for_now in damage):
            out_of_reach.append(path.name)
    if refused:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole",
            because=refused,
            hint="try again once the disk can be read" if out_of_reach else "start again with another --out",
        )
    raise CheckpointError(f"there is no checkpoint in {folder}", hint="start without --resume")


def _damage(engine: Trained, path: Path) -> tuple[str, bool] | None:
    """Return why this rank cannot use a checkpoint, and whether that is for now: a disk that could not be read."""
    try:
        made_by, progress = manifest.read(path), read_progress(path)
        reason = first_damage(path, made_by, engine.rank, engine.world_size)
    except ValueError as error:
        return str(error), isinstance(error, OutOfReachError)
    if reason is None and progress.step != made_by.step:
        reason = f"{path / TRAINING} is of step {progress.step}, and {manifest.MANIFEST} of step {made_by.step}"
    return None if reason is None else (reason, False)


def first_damage(path: Path, made_by: Manifest, rank: int = 0, world_size: int = 1) -> str | None:
    """Return why the checkpoint `path` is not as it was written, in the files that this rank checks; None if it is.

    Raises:
        OutOfReachError: a file cannot be read for the moment.
    """
    return (
        manifest.first_damage(path, made_by, rank, world_size)
        or _missing(path, made_by)
        or _foreign(path, made_by, rank, world_size)
    )


def _missing(path: Path, made_by: Manifest) -> str | None:
    """Return which file of which rank is not listed."""
    if not 0 < made_by.world_size <= len(made_by.files):
        return f"{path / manifest.MANIFEST} is of {made_by.world_size} ranks, and lists {len(made_by.files)} files"
    there = {
        (file.rank, kind) for name, file in made_by.files.items() for kind in STATES if name.endswith(f"{kind}.pt")
    }
    for rank in range(made_by.world_size):
        needed = {file_name(rank), f"rng_rank_{rank}.pt"} - made_by.files.keys()
        if made_by.zero_stage == 3 or rank == 0:
            needed |= {STATES[0]} - {kind for of, kind in there if of == rank}
        if made_by.zero_stage > 0:
            needed |= {STATES[1]} - {kind for of, kind in there if of == rank}
        if needed:
            return f"{path} has no {min(needed)} of rank {rank}"
    return None


def _foreign(path: Path, made_by: Manifest, rank: int, world_size: int) -> str | None:
    """Return which file holds objects that frugal does not save."""
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


def origin(engine: Trained, step: int, listed: dict[str, File]) -> Manifest:
    """Return the manifest of a checkpoint that `engine` writes after `step` steps."""
    plan = engine.plan
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
        recipe=resume_checks.recipe(plan.request) | ({} if own is None else {"optimizer": own}),
        plan_digest=plan.digest,
        versions=local_host.library_versions(),
        files=listed,
        base=frozen_base.digest(engine),
    )


def _restore(engine: Trained, path: Path, refused: tuple[str, ...]) -> Loaded:
    """Check that the checkpoint is one of this run, and of its states, then bring the engine to it. Collective."""
    made_by, this = manifest.read(path), origin(engine, 0, {})
    resume_checks.check_resume(path, made_by, this)
    with other_states.named(path):
        is_same = all(gather(_fits(engine, path, made_by, this), bool, engine.votes))
        if not is_same:
            resume_checks.check_other_layout(path, made_by, this)
        is_same_number = made_by.world_size == this.world_size
        generators = checkpoint_files.read(path / f"rng_rank_{engine.rank}.pt") if is_same_number else None
        saved = Saved(path, made_by, kernels.DTYPES[engine.plan.request.optimizer.states or "fp32"])
        on_nvme = "nvme" in this.offload

        def check() -> None:
            if generators is not None:
                other_states.check_generators(generators)
            _check_counters(engine, saved)
            if on_nvme:  # of the model DeepSpeed reads buffers, and casts them
                _fill_buffers(engine, saved, writes=False)
            else:
                _fill(engine, saved, is_same=is_same, writes=False)

        engine.deepspeed.empty_partition_cache()  # parameters that ZeRO-3 has gathered are gathered again
        with torch.no_grad():
            wrong = gather(other_states.first_wrong(check), str | None, engine.votes)
            if reasons := [reason for reason in wrong if reason]:
                raise other_states.refusal(path, reasons[0])
            if not on_nvme:
                _fill(engine, saved, is_same=is_same, writes=True)
                engine.zero.put_counters(saved.common, saved.files[0].scaler())
        if on_nvme:
            checkpoint_files.load(engine.deepspeed, path, without_frozen=made_by.base is not None)
        _follow_plan(engine, saved.common["lr_scheduler"])
        progress = read_progress(path)
        if EXTRA in made_by.files:
            progress = replace(progress, extra=checkpoint_files.read(path / EXTRA))
        engine.adaptive_limits.recall(progress.learnt)
        if generators is not None:
            random_state.restore_generators(generators, engine.device)
        else:  # none of the saved generators is this rank's, so it gets some that no rank had
            random_state.seed_all((progress.seed * 1_000_003 + progress.step) * 65_537 + engine.rank)
    return Loaded(progress=progress, folder=path, refused=refused, changes=resume_checks.resume_changes(made_by, this))


def _fits(engine: Trained, path: Path, made_by: Manifest, this: Manifest) -> bool:
    """Return whether this rank finds its states in one of the files, as it keeps them."""
    if this.zero_stage > 0 and made_by.world_size != this.world_size:
        return False
    kinds = [(each.zero_stage, each.offload, each.optimizer) for each in (made_by, this)]
    return kinds[0] == kinds[1] and read_layout(path, engine.rank % made_by.world_size) == engine.zero.layout()


def _check_counters(engine: Trained, saved: "Saved") -> None:
    for name in ("global_steps", "global_samples", "skipped_steps"):
        other_states.check_count(saved.common.get(name), name)
    if engine.zero.schedule is not None:
        schedule = saved.common.get("lr_scheduler") or {}
        other_states.check_count(schedule.get("last_epoch"), "last_epoch of the learning rate's schedule")
    if engine.plan.strategy.zero_stage and (scaler := saved.files[0].scaler()):
        other_states.check_scaler(scaler, engine.zero.optimizer.loss_scaler)


def _follow_plan(engine: Trained, saved_schedule: dict[str, Any] | None) -> None:
    """Have optimizer and schedule continue with the plan's settings, or those of the user's own optimizer's groups.

    Of the saved schedule only the number of its step is used.
    """
    request, scheduler, factor = engine.plan.request, engine.zero.schedule, 1.0
    groups, settings = engine.zero.inner.param_groups, engine.group_settings
    if engine.own_optimizer is None:
        groups = engine.deepspeed.optimizer.param_groups
        planned = {
            "lr": request.scaled_learning_rate,
            "weight_decay": request.weight_decay if request.decays_all else 0.0,
            "momentum": request.optimizer.momentum,
            "betas": request.optimizer.betas,
            "eps": request.optimizer.epsilon,
        }
        settings = [{name: value for name, value in planned.items() if name in group} for group in groups]
    if scheduler is not None:
        scheduler.base_lrs = [each["lr"] for each in settings]
        if saved_schedule is not None:
            scheduler.last_epoch = saved_schedule["last_epoch"]
        factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
    for group, each in zip(groups, settings, strict=True):
        group.update(each, lr=each["lr"] * factor)


def file_name(rank: int) -> str:
    """Return the name of the layout of one rank, in a checkpoint."""
    return f"layout_rank_{rank}.json"


def read_layout(folder: Path, rank: int) -> checkpoint_files.StateLayout:
    """Return the layout of one of the ranks that wrote the checkpoint."""
    return msgspec.json.decode(files.read_regular(folder / file_name(rank)), type=checkpoint_files.StateLayout)


class Saved:
    """The states in a checkpoint's files, by parameter. A file is mapped into memory when it is first needed.

    `masters`: type of the weights that the optimizer updates; None: any. `has_base`: whether parameters that are not
    trained are there, too. `files`: of each rank that keeps parts, or of one if each keeps all.
    """

    def __init__(self, folder: Path, made_by: Manifest, masters: torch.dtype | None = None) -> None:
        self._stage, self._masters = made_by.zero_stage, masters
        self.has_base = made_by.base is None
        paths = {
            (file.rank, kind): folder / name
            for name, file in made_by.files.items()
            for kind in STATES
            if name.endswith(f"{kind}.pt")
        }

        @cache  # which goes with this object, so that nothing stays mapped
        def content(rank: int, kind: str) -> Any:
            return checkpoint_files.read(paths[rank, kind], mmap=True)

        num_writers = made_by.world_size if self._stage else 1
        self.files = [checkpoint_files.StateFiles(self._stage, partial(content, rank)) for rank in range(num_writers)]
        self._layouts = [read_layout(folder, rank) for rank in range(num_writers)]
        self._pieces: dict[tuple[str, bool], list[tuple[checkpoint_files.Piece, int, int]]] = defaultdict(list)
        for rank, layout in enumerate(self._layouts):
            for slot, pieces in enumerate(layout.slots):
                for piece in pieces:
                    self._pieces[piece.name, False].append((piece, rank, slot))
            if self._stage == 3 or rank == 0:
                for piece in layout.frozen:
                    self._pieces[piece.name, True].append((piece, rank, -1))
        self.common, self.module = self.files[0].common, self.files[0].module

    def copy(
        self, name: str, first: int, into: Tensor, state: str = MASTER, *, writes: bool = True, casts: bool = False
    ) -> None:
        """Copy elements of a parameter's state from element `first` on, as many as `into` has, shape `(elements,)`.

        `writes`: False only checks that they are there. `casts`: other types are converted, except those of masters.

        Raises:
            ValueError: they are not there, each once, in the type of the masters or of `into`.
        """
        dtype = None if casts else into.dtype
        if state == MASTER and self._stage:
            dtype = self._masters
        done, end = first, first + len(into)
        for piece, rank, slot in sorted(self._pieces[name, state == FROZEN], key=lambda each: each[0].first):
            begin, stop = max(first, piece.first), min(end, piece.first + piece.number)
            if begin < stop:
                place = piece.place + begin - piece.first
                elements = self._flat(rank, slot, state, name)[place : place + stop - begin]
                wanted = torch.empty(stop - begin, dtype=dtype or elements.dtype, device="meta")
                other_states.check_kind(elements, wanted, f"{state} of {name}")
                if begin != done or place < 0:
                    raise ValueError(f"elements of {name} from {done} on are not kept once")
                if writes:
                    into[begin - first : stop - first].copy_(elements)
                done = stop
        if done != end:
            raise ValueError(f"elements of {name} from {done} on are not kept once")

    def parameters(self, *, frozen: bool) -> dict[str, int]:
        """Return the number of elements of each parameter that was trained, or that was not."""
        return {
            name: max(piece.first + piece.number for piece, *_ in pieces)
            for (name, is_frozen), pieces in self._pieces.items()
            if is_frozen == frozen
        }

    def states(self, name: str | None, place: tuple[int, int] | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimizer's tensors of one slot, and its numbers, by their names.

        `place`: rank and number of the slot; None: of the first one that has elements of parameter `name`.
        """
        if place is None:
            place = next((each[1:] for each in self._pieces[name or "", False]), (0, 0))
        rank, slot = place[0] % len(self.files), place[1]
        states = self._slot(rank, slot)
        many = {name: value for name, value in states.items() if isinstance(value, Tensor) and value.dim() > 0}
        single = {name: value for name, value in states.items() if name not in many and value is not None}
        for name, value in single.items():
            other_states.check_number(value, f"{name} of slot {slot}")
        return many, single

    def buffer(self, name: str, like: Tensor, *, casts: bool = False) -> Tensor:
        """Return a buffer of the model, which must be like another tensor, or `casts`: have its shape.

        Raises:
            ValueError: it is not.
        """
        value: Any = self.module.get(name)
        wanted = like.to("meta", value.dtype if casts and isinstance(value, Tensor) else None)
        other_states.check_kind(value, wanted, name)
        return value

    def _slot(self, rank: int, slot: int) -> dict[str, Any]:
        states, recorded = self.files[rank].slot(slot), self._layouts[rank].states
        if recorded is not None and other_states.describe(states) != recorded[slot]:
            raise ValueError(f"states of slot {slot} of rank {rank} are not as they were saved")
        return states

    def _flat(self, rank: int, slot: int, state: str, name: str) -> Tensor:
        files = self.files[rank]
        if state == FROZEN:
            return files.frozen(name).view(-1)
        if state != MASTER:
            return self._slot(rank, slot)[state].view(-1)
        return files.master(slot) if self._stage else self.module[name].view(-1)


def _fill(engine: Trained, saved: Saved, *, is_same: bool, writes: bool) -> None:
    """Bring weights, optimizer and buffers of the engine to the checkpoint's. `writes`: False only checks them.

    `is_same`: this rank's slots are those in its own file, so states in blocks can be read.
    """
    zero = engine.zero
    is_adam = engine.own_optimizer is None and engine.plan.request.optimizer.name == "adamw"

    def copy_weights(name: str, first: int, into: Tensor, is_frozen: bool) -> None:
        if is_same and not is_frozen:  # as they are saved beside the masters, in half of the bytes
            value = saved.module[name].view(-1)
            other_states.check_kind(value, into, name)
            if writes:
                into.copy_(value)
        elif saved.has_base or not is_frozen:
            saved.copy(name, first, into, FROZEN if is_frozen else MASTER, writes=writes)

    for slot, (flat, pieces) in enumerate(zip(zero.flat_tensors(), zero.layout().slots, strict=True)):
        many, single = saved.states(pieces[0].name if pieces else None, (engine.rank, slot) if is_same else None)
        states = {}
        for name, value in many.items():
            dtype = flat.dtype if is_adam else value.dtype
            if is_same:  # whole, with padding and blocks
                if name in other_states.BY_ELEMENT:
                    wanted = torch.empty(flat.shape, dtype=dtype, device="meta")
                    other_states.check_kind(value, wanted, f"{name} of slot {slot}")
                states[name] = value.to(flat.device, copy=True) if writes else value
            else:
                states[name] = torch.zeros(flat.shape, dtype=dtype, device=flat.device if writes else "meta")
        for piece in pieces:
            part = slice(piece.place, piece.place + piece.number)
            saved.copy(piece.name, piece.first, flat.data.view(-1)[part], writes=writes)
            for name, tensor in states.items() if not is_same else ():
                saved.copy(piece.name, piece.first, tensor.view(-1)[part], name, writes=writes)
        if writes:
            zero.put_states(flat, states, single)
    zero.fill_weights(copy_weights)
    _fill_buffers(engine, saved, writes=writes)


def _fill_buffers(engine: Trained, saved: Saved, *, writes: bool) -> None:
    for name, buffer in torch_internals.saved_buffers(engine.module).items():
        value = saved.buffer(name, buffer)
        if writes:
            buffer.copy_(value)
