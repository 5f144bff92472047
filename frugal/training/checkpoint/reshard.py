"""A checkpoint read into another layout than it was written in: other ranks, another ZeRO stage, offloading or not.

Element by element the states do not depend on the layout. So nothing is converted and nothing is exchanged: every
rank maps the files of all ranks that wrote them into memory, and copies the elements of its own slots to where it
keeps them, piece by piece. It takes no memory beside what it keeps for training; of the files, the disk's cache holds
what it likes. Measured on one CPU rank, 30M parameters, bf16, to ZeRO-3: 7.9 bytes a parameter more than before, at the
peak as afterwards, which are Adam's moments; where the layout is the same, DeepSpeed's own reading peaks at 12.

What it relies on: that states with an element a parameter's element belong to it alone (Adam's moments, momentum), and
that the model's weights are its fp32 master weights, rounded. Left out, and refused: states in blocks (8-bit Adam),
and states on NVMe.
"""

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from frugal.deepspeed_adapter import checkpoint_files, state_layout
from frugal.deepspeed_adapter.state_layout import StateLayout
from frugal.training.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from frugal.training.engine import Engine

MASTER = "master"  # among the names of a slot's states: the weights themselves
FROZEN = "frozen"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def file_name(rank: int) -> str:
    """Of the layout of one rank, in a checkpoint."""
    return f"layout_rank_{rank}.json"


def read_layout(folder: Path, rank: int) -> StateLayout:
    """The layout of one rank of those that wrote the checkpoint."""
    return msgspec.json.decode((folder / file_name(rank)).read_bytes(), type=StateLayout)


def restore(engine: "Engine", folder: Path, made_by: Manifest) -> None:
    """Bring weights, optimizer and counters of the engine to the checkpoint's, whatever its layout. Collective.

    Ranks meet only where ZeRO-3 gathers its small parameters at the end.
    """
    saved = Saved(folder, made_by)
    optimizer = engine.deepspeed.optimizer
    stage = engine.plan.strategy.zero_stage
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    with torch.no_grad():
        _fill_slots(engine, saved)
        if stage == 3:
            _fill_parts(engine, saved)
        else:
            _fill_whole(engine, saved)
        for name, buffer in engine.module.named_buffers():
            if name in saved.module:
                buffer.copy_(saved.module[name])
    if stage == 3:
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()
    _restore_counters(engine, saved)


class Saved:
    """The states in a checkpoint's files, by parameter. Nothing is read before it is copied."""

    def __init__(self, folder: Path, made_by: Manifest) -> None:
        self._stage = made_by.zero_stage
        self._files: dict[tuple[int, str], Path] = {}
        for name, file in made_by.files.items():
            for kind in ("model_states", "optim_states"):
                if name.endswith(f"{kind}.pt"):
                    self._files[file.rank, kind] = folder / name
        num_writers = made_by.world_size if self._stage else 1  # without ZeRO all ranks hold the same
        self._pieces: dict[tuple[str, bool], list[tuple[state_layout.Piece, int, int]]] = defaultdict(list)
        for rank in range(num_writers):
            kept = read_layout(folder, rank)
            for slot, pieces in enumerate(kept.slots):
                for piece in pieces:
                    self._pieces[piece.name, False].append((piece, rank, slot))
            if self._stage == 3 or rank == 0:
                for piece in kept.frozen:
                    self._pieces[piece.name, True].append((piece, rank, -1))
        self.common = self._load(0, "model_states")
        self.module = self.common["module"]

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

    def parameters(self, *, frozen: bool) -> dict[str, int]:
        """Elements of each parameter that was trained, or that was not."""
        return {
            name: max(piece.first + piece.number for piece, *_ in pieces)
            for (name, is_frozen), pieces in self._pieces.items()
            if is_frozen == frozen
        }

    def optimizer_states(self) -> tuple[list[str], dict[str, Any]]:
        """Names of the states with an element for each of a slot, and those with one value for the whole slot."""
        states = self._slot(0, 0)
        many = [name for name, value in states.items() if isinstance(value, Tensor) and value.dim() > 0]
        return many, {name: value for name, value in states.items() if name not in many and value is not None}

    def scaler(self) -> dict[str, Any]:
        """What DeepSpeed keeps of fp16's loss scale, and has also where there is none; empty without ZeRO."""
        kept = self._load(0, "optim_states")["optimizer_state_dict"] if self._stage else {}
        return {name: kept[name] for name in ("loss_scaler", "dynamic_loss_scale", "overflow") if name in kept}

    def _slot(self, rank: int, slot: int) -> dict[str, Any]:
        """The optimizer's states of one slot; empty before its first step."""
        if self._stage == 0:
            return self.common["optimizer"]["state"].get(slot, {})
        kept = self._load(rank, "optim_states")["optimizer_state_dict"]
        return kept["optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"]["state"].get(slot, {})

    def _flat(self, rank: int, slot: int, state: str, name: str) -> Tensor:
        if state == FROZEN and self._stage == 3:
            return self._load(rank, "model_states")["frozen_param_fragments"][name].view(-1)
        if state == FROZEN or (state == MASTER and self._stage == 0):
            return self.module[name].view(-1)
        if state != MASTER:
            return self._slot(rank, slot)[state].view(-1)
        kept = self._load(rank, "optim_states")["optimizer_state_dict"]
        return kept["fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"][slot]

    @cache  # noqa: B019  # gone with the one call of `restore`
    def _load(self, rank: int, kind: str) -> Any:
        return checkpoint_files.read(self._files[rank, kind], mmap=True)


def _fill_slots(engine: "Engine", saved: Saved) -> None:
    """The optimizer's weights and states."""
    optimizer = engine.deepspeed.optimizer
    base = optimizer if engine.plan.strategy.zero_stage == 0 else optimizer.optimizer
    many, single = saved.optimizer_states()
    kept = state_layout.of(engine.deepspeed, engine.plan.strategy.zero_stage).slots
    for flat, pieces in zip(
        state_layout.slots_of(engine.deepspeed, engine.plan.strategy.zero_stage), kept, strict=True
    ):
        states = {MASTER: flat.data, **{name: torch.zeros_like(flat.data) for name in many}}
        for name, tensor in states.items():
            for piece in pieces:
                into = tensor.view(-1)[piece.place : piece.place + piece.number]
                saved.copy(piece.name, piece.first, into, name)
        del states[MASTER]
        base.state[flat] = states | {name: _single(base, value, flat) for name, value in single.items()}
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False  # ZeRO 1 and 2 link parameters to states in the next step


def _single(base: Any, value: Any, flat: Tensor) -> Any:
    """Adam's number of steps as this optimizer keeps it: torch's as fp32 beside its kernel, DeepSpeed's as an int."""
    if type(base).__module__.startswith("deepspeed."):
        return int(value)
    beside = any(group.get("fused") or group.get("capturable") for group in base.param_groups)
    return torch.tensor(float(value), dtype=torch.float32, device=flat.device if beside else "cpu")


def _fill_whole(engine: "Engine", saved: Saved) -> None:
    """The model's weights, where every rank has them all."""
    for name, parameter in engine.module.named_parameters():
        saved.copy(name, 0, parameter.data.view(-1), MASTER if parameter.requires_grad else FROZEN)


def _fill_parts(engine: "Engine", saved: Saved) -> None:
    """The model's weights under ZeRO-3, of which this rank has a part: rounded from the optimizer's, as in a step."""
    optimizer = engine.deepspeed.optimizer
    groups = (optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat)
    for master, rounded, parts in zip(*groups, optimizer.fp16_partitioned_groups, strict=True):
        rounded.data.copy_(master.data)
        for part, elements in zip(parts, optimizer.unflatten(rounded, parts), strict=True):
            part.data = elements.data
    parameters = dict(engine.module.named_parameters())
    for piece in state_layout.of(engine.deepspeed, engine.plan.strategy.zero_stage).frozen:
        into = parameters[piece.name].ds_tensor.data.view(-1)[: piece.number]  # type: ignore[attr-defined]  # from DeepSpeed
        saved.copy(piece.name, piece.first, into, FROZEN)


def _restore_counters(engine: "Engine", saved: Saved) -> None:
    deepspeed = engine.deepspeed
    for name in _COUNTERS:
        setattr(deepspeed, name, saved.common[name])
    if deepspeed.lr_scheduler is not None and saved.common["lr_scheduler"] is not None:
        deepspeed.lr_scheduler.load_state_dict(saved.common["lr_scheduler"])
    if engine.plan.strategy.zero_stage > 0:
        for name, value in saved.scaler().items():
            setattr(deepspeed.optimizer, name, value)
