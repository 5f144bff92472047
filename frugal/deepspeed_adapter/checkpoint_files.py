"""How a rank reads a checkpoint's files: tensors and plain values, and no object but those that DeepSpeed puts there.

A pickle can run any code when it is read. DeepSpeed reads its files so; here torch's restricted unpickler does.

How a rank writes DeepSpeed's checkpoint files: without raising in the middle of what all ranks do together.
"""

import contextlib
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from frugal import torch_internals
from frugal.units import format_bytes

OF_DEEPSPEED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
"""Of DeepSpeed 0.19.8: each file of states has its loss scaler, also where nothing is scaled."""


def foreign(path: Path) -> list[str]:
    """Names of the objects in a file that do not belong into a checkpoint; nothing in it is run."""
    with torch.serialization.safe_globals(OF_DEEPSPEED):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def read(path: str | Path, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """What `torch.save` wrote, on the host.

    Raises:
        pickle.UnpicklingError: there are foreign objects in it.
    """
    with torch.serialization.safe_globals(OF_DEEPSPEED):
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)


@contextlib.contextmanager
def installed(deepspeed_engine: Any) -> Iterator[None]:
    """Have the engine read so."""
    checkpoint_engine = deepspeed_engine.checkpoint_engine
    checkpoint_engine.load = read
    try:
        yield
    finally:
        del checkpoint_engine.load


class CheckpointWriter(CheckpointEngine):
    """In place of DeepSpeed's own: remembers the first failure, for a vote after the save.

    A rank that raised halfway would leave the others waiting in a collective. `later`: what it is given is copied to
    the host's memory, and written by `finish`.
    """

    def __init__(self, later: bool = False) -> None:
        super().__init__(None)
        self.failure: OSError | None = None
        self._later = later
        self._copies: list[tuple[Any, Path]] = []
        self._written: list[Path] = []

    @contextlib.contextmanager
    def installed(self, deepspeed_engine: Any) -> Iterator[None]:
        """Have the engine write through this writer, and leave out the scripts it copies beside a checkpoint."""
        usual = deepspeed_engine.checkpoint_engine
        deepspeed_engine.checkpoint_engine = self
        deepspeed_engine._copy_recovery_script = lambda _path: None
        try:
            yield
        finally:
            deepspeed_engine.checkpoint_engine = usual
            del deepspeed_engine._copy_recovery_script

    def save(self, state_dict: Any, path: str | Path) -> None:
        """torch.save, remembering the first failure instead of raising it."""
        if self.failure is None:
            try:
                self._save(state_dict, Path(path))
            except OSError as error:
                self.failure = error

    def write(self, data: bytes, path: Path) -> None:
        """A file that is not torch's."""
        path.write_bytes(data)
        self._written.append(path)

    def finish(self) -> list[Path]:
        """Write what is not written yet; all files of this writer.

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
        except RuntimeError as error:  # what torch makes of a failed write, or of memory that is not there
            free = shutil.disk_usage(path.parent).free
            raise OSError(
                None, f"{path.name} cannot be written, {format_bytes(free)} are free there ({_first_line(error)})"
            ) from None
        self._written.append(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: the folder was made before, with a vote."""

    def create(self, info: Any) -> None:
        """Nothing to announce."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """Never called: reading goes through DeepSpeed's usual engine."""
        raise NotImplementedError  # DeepSpeed's interface asks for it

    def commit(self, info: Any) -> bool:
        """Nothing to finish; `files.seal` does it."""
        return True


def _copied(state_dict: Any) -> Any:
    """The same in the host's memory, with nothing in common; tensors that share memory share their copies'."""
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


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
