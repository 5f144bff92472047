"""DeepSpeed's checkpoint files of one rank: read without running code, written without raising between collectives.

A pickle can run any code when it is read. DeepSpeed reads its files so; here torch's restricted unpickler does, which
knows tensors, plain values and the few objects that DeepSpeed puts there.

To read them on other ranks, a rank also records which elements of which parameters it keeps, and where. DeepSpeed hands
its optimizer flat tensors, here called slots. The content of a slot depends on the ZeRO stage and the number of ranks:

    stage 0       a slot a parameter, whole, the same on every rank
    stages 1, 2   a slot a parameter group: all parameters end to end, cut into one equal part a rank
    stage 3       a slot a sub-group: of each parameter one equal part a rank, end to end

Parameters without gradients are in no slot: stages 0 to 2 keep them whole, stage 3 cuts them as it cuts the others.
"""

import copy
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_FRAGMENTS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from frugal import files, torch_internals
from frugal.errors import first_line
from frugal.units import format_bytes


def _stage_by_name(of: Any, name: Any) -> ZeroStageEnum:
    """Return a ZeRO stage as Python 3.11.2 pickles it, `getattr(ZeroStageEnum, "weights")`, and nothing else.

    Raises:
        pickle.UnpicklingError: another attribute is asked for.
    """
    if of is not ZeroStageEnum or not isinstance(name, str) or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError("it asks for an attribute that is no ZeRO stage")
    return ZeroStageEnum[name]


OF_DEEPSPEED: list[Any] = [
    DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, (_stage_by_name, "builtins.getattr")
]  # fmt: skip
"""Objects of DeepSpeed 0.19.8: each file of states has its loss scaler, also if nothing is scaled.

Python 3.11.2, which Debian 12 has, pickles its enum by name.
"""


def foreign(path: Path) -> list[str]:
    """Return the names of objects in a file that do not belong into a checkpoint, without running anything in it.

    Raises:
        ValueError: it is no zip archive as torch.save writes it, or its content is compressed, which may take any
            memory to read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its content is compressed")
    except zipfile.BadZipFile:
        raise ValueError("it is no zip archive, as torch.save makes them") from None
    with torch.serialization.safe_globals(OF_DEEPSPEED):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def read(path: str | Path, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """Return the content of a file of `torch.save`, on the host.

    Raises:
        pickle.UnpicklingError: there are foreign objects in it.
    """
    with torch.serialization.safe_globals(OF_DEEPSPEED):
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)


def load(deepspeed_engine: Any, folder: Path, *, without_frozen: bool = False) -> None:
    """Have DeepSpeed read a checkpoint that was written on the engine's own layout, with states on NVMe. Collective.

    `without_frozen`: parameters that are not trained stay as they are.
    """
    with patch.object(deepspeed_engine.checkpoint_engine, "load", read):
        deepspeed_engine.load_checkpoint(
            str(folder.parent), tag=folder.name, load_module_strict=not without_frozen, load_lr_scheduler_states=False
        )


class StateFiles:
    """The states in the files of one rank, as its ZeRO stage keeps them.

    `contents` reads a file of the rank by the end of its name: `model_states` or `optim_states`. Stages 1 and 2 have
    the former of rank 0 only, stage 0 has no other.
    """

    def __init__(self, zero_stage: int, contents: Callable[[str], dict[str, Any]]) -> None:
        self._stage = zero_stage
        self._contents = contents

    @property
    def common(self) -> dict[str, Any]:
        """Return the model, counters and the learning rate's schedule; at stage 0 the optimizer, too."""
        return self._contents("model_states")

    @property
    def module(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers of the model; under stage 3 only buffers."""
        return self.common["module"]

    def optimizer(self) -> dict[str, Any]:
        """Return the inner optimizer's states and groups."""
        if self._stage == 0:
            return self.common["optimizer"]
        return self._of_zero()[OPTIMIZER_STATE_DICT if self._stage == 3 else BASE_OPTIMIZER_STATE]

    def slot(self, slot: int) -> dict[str, Any]:
        """Return the optimizer's states of one slot; nothing before its first step."""
        return self.optimizer()["state"].get(slot, {})

    def master(self, slot: int) -> torch.Tensor:
        """Return the fp32 weights of one slot, from stage 1 on."""
        return self._of_zero()[FP32_FLAT_GROUPS if self._stage == 3 else SINGLE_PARTITION_OF_FP32_GROUPS][slot]

    def frozen(self, name: str) -> torch.Tensor:
        """Return this rank's part of a parameter that is not trained."""
        return self.common[FROZEN_PARAM_FRAGMENTS][name] if self._stage == 3 else self.module[name]

    def scaler(self) -> dict[str, Any]:
        """Return DeepSpeed's state of fp16's loss scale, which exists also without fp16; nothing without ZeRO."""
        kept = self._of_zero() if self._stage else {}
        return {name: kept[name] for name in (LOSS_SCALER, "dynamic_loss_scale", "overflow") if name in kept}

    def _of_zero(self) -> dict[str, Any]:
        return self._contents("optim_states")[OPTIMIZER_STATE_DICT]


class Piece(NamedTuple):
    """A run of `number` elements of parameter `name`, from element `first` on; in its slot it begins at element
    `place`."""

    name: str
    first: int
    number: int
    place: int


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The pieces in each slot of one rank, in the optimizer's order, and those of frozen parameters.

    `states`: names and kinds, in words, of the optimizer's states in each slot as they were saved; None in older
    checkpoints.
    """

    slots: tuple[tuple[Piece, ...], ...]
    frozen: tuple[Piece, ...] = ()
    states: tuple[dict[str, str], ...] | None = field(default=None, compare=False)


def whole(parameters: Iterable[Any], names: dict[int, str]) -> tuple[Piece, ...]:
    """Return the pieces of a slot at stage 0, and of frozen parameters at stages 1 and 2."""
    return tuple(Piece(names[id(each)], 0, each.numel(), 0) for each in parameters)


def cut(group: Iterable[Any], names: dict[int, str], rank: int, size: int) -> tuple[Piece, ...]:
    """Return the pieces of a slot of `size` elements at stages 1 and 2: this rank's part of all parameters."""
    pieces, start = [], -rank * size
    for each in group:
        first, end = max(start, 0), min(start + each.numel(), size)
        if first < end:
            pieces.append(Piece(names[id(each)], first - start, end - first, first))
        start += each.numel()
    return tuple(pieces)


def parts(group: Iterable[Any], names: dict[int, str], rank: int, world_size: int) -> tuple[Piece, ...]:
    """Return the pieces of a slot at stage 3: this rank's part of each parameter, the last ranks' with padding."""
    pieces, place = [], 0
    for each in group:
        share = -(-each.ds_numel // world_size)
        number = min(share, each.ds_numel - rank * share)
        if number > 0:
            pieces.append(Piece(names[id(each)], rank * share, number, place))
        place += share
    return tuple(pieces)


class CheckpointWriter(CheckpointEngine):
    """A writer in place of DeepSpeed's own that remembers the first failure, for a vote after the save.

    A rank that raised halfway would leave the others waiting in a collective. `later`: states are copied to host
    memory, and written by `finish`.
    """

    def __init__(self, later: bool = False) -> None:
        super().__init__(None)
        self.failure: OSError | None = None
        self._later = later
        self._copies: list[tuple[Any, Path]] = []
        self._written: list[Path] = []
        self._left_out: set[str] = set()

    def collect(self, deepspeed_engine: Any, folder: Path, *, without_frozen: bool = False) -> None:
        """Collect the engine's states, for files in `folder`. `without_frozen`: without untrained parameters."""
        named = deepspeed_engine.module.named_parameters(remove_duplicate=False) if without_frozen else ()
        self._left_out = {name for name, parameter in named if not parameter.requires_grad}
        with (
            patch.object(deepspeed_engine, "checkpoint_engine", self),
            patch.object(deepspeed_engine, "_copy_recovery_script", lambda _path: None),
        ):
            deepspeed_engine.save_checkpoint(
                str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=without_frozen
            )

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Save with torch.save, but remember the first failure instead of raising it."""
        if self.failure is None:
            # DeepSpeed leaves in second names, as of tied heads, and what belongs to a frozen parameter, such as scales
            for name in list(state_dict.get("module") or ()):
                if {name, name.rpartition(".weight.")[0] + ".weight"} & self._left_out:
                    del state_dict["module"][name]
            try:
                self._save(state_dict, Path(path))
            except OSError as error:
                self.failure = error

    def write(self, data: bytes, path: Path) -> None:
        """Write a file that is not torch's."""
        files.write_file(path, data, durable=False)
        self._written.append(path)

    def finish(self) -> list[Path]:
        """Write the remaining files, and return all files of this writer.

        Raises:
            OSError: a file cannot be written.
        """
        self._later = False
        while self._copies:
            self._save(*self._copies.pop(0))
        return self._written

    def _save(self, state_dict: Any, path: Path) -> None:
        try:
            if self._later:
                self._copies.append((_copied(state_dict), path))
                return
            torch.save(state_dict, path)
        except RuntimeError as error:  # of a full disk, without its cause, or of memory that is not there
            raise _cause(error, path) from None
        self._written.append(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: the folder was made before, with a vote."""

    def create(self, info: Any) -> None:
        """Do nothing."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """Raise: reading goes through DeepSpeed's usual engine."""
        raise NotImplementedError  # DeepSpeed's interface asks for it

    def commit(self, info: Any) -> bool:
        """Do nothing: the checkpoint is published later."""
        return True


def _cause(error: RuntimeError, path: Path) -> OSError:
    """Return why torch could not write a file, found by writing more to it."""
    try:
        with path.open("ab") as file:
            file.write(bytes(1 << 20))
    except OSError as cause:
        cause.filename = str(path)
        return cause
    free = format_bytes(shutil.disk_usage(path.parent).free)
    return OSError(None, f"{path.name} cannot be written, {free} are free there ({first_line(error)})")


def _copied(state_dict: Any) -> Any:
    """Return a copy in host memory; tensors that share memory share that of their copies."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        storage, address = leaf.untyped_storage(), torch_internals.address(leaf)
        if address not in storages:
            storages[address] = torch.UntypedStorage(storage.nbytes()).copy_(storage)
        own = torch.empty(0, dtype=leaf.dtype)
        return own.set_(storages[address], leaf.storage_offset(), leaf.size(), leaf.stride())

    return torch_internals.tree_map(copied, state_dict)
