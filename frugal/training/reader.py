"""How a rank reads a checkpoint's files: tensors and plain values, and no object but those that DeepSpeed puts there.

A pickle can run any code when it is read. DeepSpeed reads its files so; here torch's restricted unpickler does.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

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
