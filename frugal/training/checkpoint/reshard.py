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
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from frugal.deepspeed_adapter import checkpoint_files
from frugal.deepspeed_adapter.checkpoint_files import Piece, StateFiles, StateLayout
from frugal.deepspeed_adapter.stages import Zero
from frugal.training.checkpoint.manifest import Manifest
from frugal.training.train_step import Stepper

MASTER = "master"  # among the names of a slot's states: the weights themselves
FROZEN = "frozen"


def file_name(rank: int) -> str:
    """Of the layout of one rank, in a checkpoint."""
    return f"layout_rank_{rank}.json"


def read_layout(folder: Path, rank: int) -> StateLayout:
    """The layout of one rank of those that wrote the checkpoint."""
    return msgspec.json.decode((folder / file_name(rank)).read_bytes(), type=StateLayout)


def restore(engine: Stepper, folder: Path, made_by: Manifest) -> None:
    """Bring weights, optimizer and counters of the engine to the checkpoint's, whatever its layout. Collective.

    Ranks meet only where ZeRO-3 gathers its small parameters at the end.
    """
    saved, zero = Saved(folder, made_by), engine.zero
    with zero.opened(), torch.no_grad():
        _fill_slots(zero, saved)
        zero.fill_weights(
            lambda name, first, into, is_frozen: saved.copy(name, first, into, FROZEN if is_frozen else MASTER)
        )
        for name, buffer in engine.module.named_buffers():
            if name in saved.module:
                buffer.copy_(saved.module[name])
    zero.put_counters(saved.common, saved.scaler())


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
        self._pieces: dict[tuple[str, bool], list[tuple[Piece, int, int]]] = defaultdict(list)
        for rank in range(num_writers):
            kept = read_layout(folder, rank)
            for slot, pieces in enumerate(kept.slots):
                for piece in pieces:
                    self._pieces[piece.name, False].append((piece, rank, slot))
            if self._stage == 3 or rank == 0:
                for piece in kept.frozen:
                    self._pieces[piece.name, True].append((piece, rank, -1))
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

    @cache  # noqa: B019  # gone with the one call of `restore`
    def _of(self, rank: int) -> StateFiles:
        return StateFiles(self._stage, partial(self._load, rank))

    @cache  # noqa: B019  # as above
    def _load(self, rank: int, kind: str) -> Any:
        return checkpoint_files.read(self._files[rank, kind], mmap=True)


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
