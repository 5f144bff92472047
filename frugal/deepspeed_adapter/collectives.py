"""DeepSpeed's ranks: their process group, and the object through which all their collectives go.

DeepSpeed is imported when a function is called, not with this module: a parent that starts ranks need not wait for it.
"""

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from frugal.required import parameters, put

if TYPE_CHECKING:
    from torch import Tensor

ON_CPU = {"DS_ACCELERATOR": "cpu"}
"""Environment variables of ranks whose device is the host."""

DIRECT = ("all_gather_function", "reduce_scatter_function")
"""Functions of torch.distributed that the backend calls by names of its own."""

Collective = Callable[..., Any]


def init_alone() -> None:
    """Make the process group of a run of one rank.

    Its collectives copy tensors, if they do anything. NCCL's would do so as well, after it has taken 0.2 to 0.9 GiB of
    the GPU for kernels and buffers (docs/facts/cuda.md).
    """
    import torch.distributed as dist

    from frugal import torch_internals

    dist.init_process_group(torch_internals.ALONE, store=dist.HashStore(), rank=0, world_size=1)


def init_distributed(method: str, timeout: timedelta) -> None:
    """Make the process group that torch's rendezvous `method` leads to, or stay in the one there is. Collective.

    `timeout`: of a rank that waits for the others.

    Without DeepSpeed's shared-memory kernel for CPU ranks, which costs more than it saves: it is compiled when first
    used, a process killed while loading it leaves a lock on which later runs wait forever, and its buffers (66 MiB a
    rank) stay in /dev/shm after the run. gloo does the same sums.
    """
    import deepspeed

    # Not `deepspeed.comm.torch.build_shm_op`: that attribute is torch itself.
    put(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)
    deepspeed.init_distributed(auto_mpi_discovery=False, init_method=method, timeout=timeout)


def exchange_within(size: int) -> "Callable[[Tensor, Tensor], None]":
    """Return a function that exchanges tensors among each `size` consecutive ranks: it writes an all-to-all over
    dimension 0 of its second argument into its first. Collective: every rank calls it."""
    import torch.distributed as dist
    from deepspeed import comm

    rank = dist.get_rank()
    groups = [dist.new_group(range(start, start + size)) for start in range(0, dist.get_world_size(), size)]
    own = groups[rank // size]

    def exchange(received: "Tensor", sent: "Tensor") -> None:
        comm.all_to_all_single(received, sent, group=own)

    return exchange


def backend() -> Any:
    """Return the object whose methods are DeepSpeed's collectives, one a process."""
    import deepspeed.comm.comm as deepspeed_comm

    assert deepspeed_comm.cdb is not None, "there is no process group yet"
    return deepspeed_comm.cdb


def guard(guarded: Callable[[str, Collective], Collective]) -> None:
    """Replace each of the process's collectives by `guarded` of its name and it, instead of an earlier guard.

    The function itself may have the name of DeepSpeed's wrapper around it.
    """
    for name in collectives_of(type(backend())):
        vars(backend()).pop(name, None)  # an earlier one's, in front of the class's method
        put(backend(), name, guarded(name, getattr(backend(), name)))


def collectives_of(kind: type) -> list[str]:
    """Return the methods of a backend that ranks enter together, with the like: those that take `async_op`."""
    methods = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_") and name not in _UNLIKE}
    return [name for name, method in methods.items() if callable(method) and "async_op" in parameters(method)]


_UNLIKE = ("barrier", "gather", "scatter")
"""Methods that ranks call with other arguments than rank 0, outside of steps alone."""


@dataclass(frozen=True)
class Entering:
    """A collective that a rank is about to enter.

    Attributes:
        what: words that names continue, such as "reduces gradients of".
        numbers: of the parameters that it takes, in an order that must be the same on all ranks.
        name_of: finds the name that belongs to a number.
    """

    what: str
    numbers: Sequence[int] = ()
    name_of: Callable[[int], str] = str

    def signature(self, sizes: Iterable[int] = ()) -> int:
        """Return 62 bits that are the same on two ranks if they enter the same collective with the same."""
        digest = hashlib.blake2b(self.what.encode(), digest_size=8)
        digest.update(array("q", (*self.numbers, -1, *sizes)).tobytes())
        return int.from_bytes(digest.digest(), "little") >> 2

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters."""
        return list(map(self.name_of, self.numbers))


_entering: list[Entering] = []


@contextmanager
def entering(what: str, numbers: Sequence[int], name_of: Callable[[int], str]) -> Iterator[None]:
    """Name the parameters of collectives inside the `with` block; see `Entering`."""
    _entering.append(Entering(what, numbers, name_of))
    try:
        yield
    finally:
        _entering.pop()


def entered(name: str, arguments: Iterable[Any]) -> tuple[Entering, int]:
    """Return the collective that this rank is about to enter by the backend's method `name`, and its signature."""
    next_ = _entering[-1] if _entering else Entering(f"calls {name}")
    return next_, next_.signature(() if name.startswith("all_to_all") else _sizes(arguments))


def _sizes(arguments: Iterable[Any]) -> Iterator[int]:
    """Yield elements of tensors, and ranks; groups of ranks may exchange parts of samples of different lengths."""
    for each in arguments:
        if isinstance(each, int):
            yield each
        elif isinstance(each, list | tuple):
            yield from _sizes(each)
        elif hasattr(each, "numel"):
            yield each.numel()
