"""One rank of several, alone in a process, on an emulated card whose NCCL has every other rank be a twin of this one.

What a rank allocates follows from what it does itself: collectives fill tensors that it made. So each rank can be run
by itself, one after another in one process. ProcessGroupNCCL is the real one, with its communicators, streams and
events; it exchanges its identifiers over a store that answers for the others. Groups of gloo, which carry a few bytes
between hosts, are torch's fake ones.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend `fake`
from deepspeed.utils import groups

NCCL_IDENTIFIER_BYTES = 128


class _AnsweringStore(dist.Store):
    """Holds what this rank says; whatever it has not been told is a blank identifier of NCCL."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Keep it."""
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        """Return what is kept, or what another rank would have said."""
        return self._values.get(key, bytes(NCCL_IDENTIFIER_BYTES))

    def add(self, key: str, amount: int) -> int:
        """A counter."""
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(value).encode()
        return value

    def check(self, keys: list[str]) -> bool:
        """Everything is there."""
        return True

    def wait(self, *_: Any) -> None:
        """For nobody."""

    def set_timeout(self, timeout: Any) -> None:
        """Nothing takes any."""


@contextmanager
def alone(rank: int, world_size: int) -> Iterator[None]:
    """Be `rank` of `world_size` inside the `with` block."""
    import deepspeed.comm.comm as deepspeed_comm

    names = [name for name in vars(groups) if name.isupper()]  # process groups that DeepSpeed makes and keeps
    before = {name: copy.copy(getattr(groups, name)) for name in names}
    new_group = dist.new_group

    def among_twins(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return new_group(*args, backend="fake" if backend == "gloo" else backend, **kwargs)

    environment = {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size),
        "EMULATED_GPU_ALONE": "1",
    }  # fmt: skip
    store = _AnsweringStore()  # torch keeps only its C++ half alive
    with patch.dict(os.environ, environment), patch.object(dist, "new_group", among_twins):
        dist.init_process_group("nccl", rank=rank, world_size=world_size, store=store)
        try:
            yield
        finally:
            dist.destroy_process_group()
            deepspeed_comm.cdb = None
            for name, value in before.items():
                setattr(groups, name, value)
