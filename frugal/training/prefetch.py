"""What comes next is made while the last is worked on.

One thread works one item ahead. Not `torch.utils.data.DataLoader` with worker processes: samples come tokenised from
a memory map, so that an item is made in milliseconds; on CPU ranks there is no core left for a worker; and a
global batch is cut anew when memory runs out, which a worker would have to be told.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def ahead(items: Iterable[Item], device: torch.device | None = None) -> Generator[Item, None, None]:
    """The same items in the same order, each made on a thread while the caller works on the one before it.

    Never more than one waits. What making an item raises is raised where that item would have come. When the iterator
    is closed, an item in the making is finished first and thrown away. With a CUDA `device` the thread works there,
    and not on GPU 0, where it would open a context of its own.

    Making an item must not draw from the global random generators: the caller may do so at the same time.
    """
    source, end = iter(items), object()
    begin: Callable[[], None] | None = None
    if device is not None and device.type == "cuda":
        begin = partial(torch.cuda.set_device, device)
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch", initializer=begin) as thread:
        coming = thread.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, source, end)
            yield item  # type: ignore[misc]  # mypy does not see that it is not `end`


def pinned(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch whose copy to `device` need not be waited for; where the device is no GPU, as it is."""
    if device.type != "cuda":
        return dict(batch)
    return {name: tensor.pin_memory() for name, tensor in batch.items()}
