"""Every storage that an operator makes, seen from its birth to its death, without changing either.

Not seen: memory that a kernel takes and returns inside one call.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class StorageWatch(TorchDispatchMode):
    """Calls `born` for every new storage that an operator returns, and `died` when it is gone.

    A storage that existed before the mode is not born, whatever views of it appear: an output is new only if no
    input has its storage. The mode changes no value and no lifetime, with one correction: while any mode is active
    autograd adds up gradients out of place, so `_added_in_place` does what it would do without.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0
        self._known: dict[int, int] = {}  # address of a live storage -> its bytes
        self._random_states = (
            patch.object(torch, "get_rng_state", partial(self._random_state, torch.get_rng_state)),
            patch.object(torch.random, "fork_rng", partial(_forked, torch.random.fork_rng)),
        )

    def __enter__(self) -> Self:
        """Watch from here on."""
        for each in self._random_states:
            each.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """The end."""
        super().__exit__(*exception)
        for each in self._random_states:
            each.stop()

    def _random_state(self, get: Callable[[], Tensor]) -> Tensor:
        """The state of the random generator, which no operator returns: activation checkpointing keeps one a layer."""
        state = get()
        self._see(state, "get_rng_state", ())
        return state

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that keeps torch.compile out would hide the caller

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """A storage of `size_bytes` began to live as that of `tensor`, an output of `operator`."""

    def died(self, address: int, size_bytes: int) -> None:
        """The storage that was born at `address` is gone."""

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count storages that are there already."""
        for tensor in tensors:
            self._see(tensor, None, ())

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operator and look at what it returns."""
        self.num_operators += 1
        if func in _VIEWS or (func not in _OTHERS and _is_view(func)):
            return func(*args, **(kwargs or {}))
        if func is aten.add.Tensor and _added_in_place(args, sys._getframe(1)):
            return aten.add_.Tensor(args[0], args[1])
        out = self.execute(func, args, kwargs or {})
        if isinstance(out, Tensor):
            self._see(out, func, args)
        else:
            for tensor in tensors_in(out):
                self._see(tensor, func, args)
        return out

    def _see(self, tensor: Tensor, operator: Any, inputs: tuple[Any, ...]) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        known = self._known.get(address)
        if known == size:
            return
        if known is not None:  # resized: the old one ends, a new one begins
            self.died(address, known)
        elif any(address == other.untyped_storage()._cdata for other in tensors_in(inputs)):
            return
        else:
            weakref.finalize(storage, self._gone, address).atexit = False
        self._known[address] = size
        self.born(address, size, tensor, operator)

    def _gone(self, address: int) -> None:
        self.died(address, self._known.pop(address))


_VIEWS: set[Any] = set()
_OTHERS: set[Any] = set()


def _is_view(operator: Any) -> bool:
    """Whether it only ever returns its input's storage, unchanged; remembered. `reshape` and its like may copy."""
    returns = operator._schema.returns
    views = bool(returns) and all(value.alias_info and not value.alias_info.is_write for value in returns)
    views = views and not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    (_VIEWS if views else _OTHERS).add(operator)
    return views


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Every tensor in an operator's arguments or results: lists of tensors are the deepest they go."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)


def _forked(fork: Callable[..., Any], *args: Any, device_type: str | None = None, **kwargs: Any) -> Any:
    """`torch.random.fork_rng`; on meta, where it does nothing, it sets the host's state aside as on any device."""
    return fork(*args, device_type="cpu" if device_type == "meta" else device_type, **kwargs)


def _added_in_place(args: tuple[Any, ...], caller: Any) -> bool:
    """Whether this `args[0] + args[1]` is autograd's own sum of two gradients, into a buffer nobody else holds.

    Then, without a dispatch mode, `InputBuffer::accumulate` would add in place (torch/csrc/autograd/
    input_buffer.cpp). It asks for one reference to tensor and storage; seen from here Python adds one reference to
    the storage and the call itself three to the tensor. The caller must be the engine: Python code inside a hook
    that adds two tensors holds neither of them less.
    """
    if caller.f_code is not _engine_run_backward.__code__ or torch.is_grad_enabled():
        return False
    buffer, other = args[0], args[1]
    return (
        isinstance(other, Tensor)
        and buffer.shape == other.shape
        and buffer.dtype == other.dtype
        and torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) <= 2
        and buffer._use_count() <= 4
        and is_non_overlapping_and_dense_or_false(buffer)
    )
