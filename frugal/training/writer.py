"""How a rank writes DeepSpeed's checkpoint files: without raising in the middle of what all ranks do together."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from frugal.units import format_bytes


class Writer(CheckpointEngine):
    """In place of DeepSpeed's own: remembers the first failure, for a vote after the save.

    A rank that raised halfway would leave the others waiting in a collective.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.written: list[Path] = []
        self.failure: OSError | None = None

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
        if self.failure is not None:
            return
        try:
            torch.save(state_dict, path)
            self.written.append(Path(path))
        except OSError as error:
            self.failure = error
        except RuntimeError as error:  # what torch makes of a failed write
            free = shutil.disk_usage(Path(path).parent).free
            self.failure = OSError(
                None, f"{Path(path).name} cannot be written, {format_bytes(free)} are free there ({_first_line(error)})"
            )

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


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
