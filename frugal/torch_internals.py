"""torch's private names: nothing else uses them. They are checked, in one table, when this module is first imported."""

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.autograd.graph
import torch.testing._internal.distributed.fake_pg
import torch.utils._device
import torch.utils._python_dispatch
import torch.utils.checkpoint
from torch import Tensor

from frugal import required
from frugal.required import needed

NAMES = (
    *needed("torch", "storages are told apart by their address", "UntypedStorage._cdata"),
    *needed("torch", "who else holds a gradient", "_C._storage_Use_Count", "Tensor._use_count"),
    *needed("torch", "whether a tensor was written to", "Tensor._version"),
    *needed("torch.nn:Module", "buffers that are not saved", "_non_persistent_buffers_set"),
    *needed("torch", "work that no mode is to see", "_C._DisableTorchDispatch"),
    *needed("torch", "writes count in a mode", "_C._SetExcludeDispatchKeyGuard", "_C.DispatchKey.ADInplaceOrView"),
    *needed("torch", "segments as planned, also once CUDA is in use", "_C._accelerator_setAllocatorSettings"),
    *needed(
        "torch", "autocast and devices of users' own loops",
        "_C.DispatchKey.AutocastCUDA", "_C._IncludeDispatchKeyGuard", "_C.DisableTorchFunction",
        "_C._group_tensors_by_device_and_dtype", "_C._swap_tensor_impl",
    ),
    *needed("torch", "masks of packs are made where they are read", "Tensor._make_wrapper_subclass"),
    *needed("torch.utils._device:DeviceContext", "default devices", "__init__(self, device)"),
    *needed("torch", "operators made of others", "_C.DispatchKey.CompositeImplicitAutograd"),
    *needed("torch.library:Library", "kernels of meta tensors", "__init__:m"),
    *needed("torch._ops:OpOverload", "operators", "_schema", "decompose", "has_kernel_for_dispatch_key"),
    *needed("torch.autograd.graph", "autograd's own frame", "_engine_run_backward"),
    *needed("torch.utils.checkpoint", "comparing recomputed tensors", "_allowed_determinism_checks_to_fns"),
    *needed(
        "torch.utils._python_dispatch", "every operator is seen",
        "TorchDispatchMode.__torch_dispatch__", "TorchDispatchMode._should_skip_dynamo", "_disable_current_modes()",
        "_get_current_dispatch_mode_stack()",
    ),
    *needed("torch.testing._internal.distributed.fake_pg", "a process group of any size", "FakeStore"),
    *needed(
        "torch.cuda.memory", "measured timelines",
        "_record_memory_history(enabled, context, stacks, max_entries, device, clear_history)", "_snapshot(device)",
    ),
    *needed("torch.optim.optimizer", "there are no fused kernels on meta", "_get_fused_kernels_supported_devices()"),
    *needed(
        "torch.optim:Adam", "moments are made before the vote",
        "_init_group(self, group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)",
    ),
    *needed("torch.nn:Module", "replaced in place", "__init__:_buffers", "__init__:_parameters"),
    *needed(
        "torch.ops", "operators with a rule of their own",
        "aten._addmm_activation", "aten._amp_foreach_non_finite_check_and_unscale_", "aten._amp_update_scale_",
        "aten._foreach_norm", "aten._fused_adam_", "aten._fused_adamw_", "aten._fused_rms_norm",
        "aten._fused_rms_norm_backward", "aten._fused_sgd_",
        "aten._ctc_loss", "aten._ctc_loss_backward", "aten._grouped_mm", "aten._pack_padded_sequence",
        "aten._unsafe_view",
        "aten._safe_softmax", "aten._softmax_backward_data",
        "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_cudnn_attention_backward",
        "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_efficient_attention_backward",
        "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_backward",
        "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "aten._scaled_mm", "aten._unique2",
    ),
)  # fmt: skip
"""Every private name of torch that this package uses, and why.

Operators of the Core ATen IR, which torch documents, are none: https://pytorch.org/docs/stable/torch.compiler_ir.html.
"""

required.verify("torch", NAMES)

DispatchMode = torch.utils._python_dispatch.TorchDispatchMode
ALONE = "fake"
"""The backend, registered by the module of `FakeStore`, whose collectives do what is right among one rank, and nothing
between several (tests/distributed/test_alone.py)."""

FakeStore = torch.testing._internal.distributed.fake_pg.FakeStore
DETERMINISM_CHECKS = torch.utils.checkpoint._allowed_determinism_checks_to_fns
is_dense: Callable[[Tensor], bool] = torch.ops.aten.is_non_overlapping_and_dense.default

VARLEN = "torch_attn"
"""The namespace of the operators of `torch.nn.attention.varlen`."""

RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
"""The code of the frame in which autograd runs a backward."""

RUN_BY_MODE = torch._ops.OpOverload.__call__.__code__
"""The code of the frame in which a mode runs an operator."""

FUSED_DEVICES = "torch.optim.optimizer._get_fused_kernels_supported_devices"
"""The function that returns the kinds of devices with fused kernels of optimizers."""

Context = Callable[[], AbstractContextManager[Any]]

without_modes: Context = torch.utils._python_dispatch._disable_current_modes
"""A context in which no `TorchDispatchMode` is active."""

modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack

without_dispatch: Context = torch._C._DisableTorchDispatch
"""A context in which operators reach no `TorchDispatchMode`: the cheapest way past one."""


class LazyTensor(Tensor):
    """A tensor that is made when something reads its values; shape, type and device are known before."""

    def __new__(
        cls, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Return a tensor without memory."""
        lazy: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        lazy._make, lazy._made = make, None
        return lazy

    _make: Callable[[], Tensor]
    _made: Tensor | None

    def dense(self) -> Tensor:
        """Return the plain tensor, made at the first call."""
        if self._made is None:
            with torch.no_grad():
                self._made = self._make()
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on the plain tensor, unless it asks for no values."""
        if getattr(func, "__name__", "") in _WITHOUT_VALUES:
            return Tensor.__torch_function__(func, (), args, kwargs)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator that came past `__torch_function__` on the plain tensor."""
        args, kwargs = tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)


_WITHOUT_VALUES = ("__get__", "dim", "size", "stride", "numel", "element_size", "is_floating_point", "untyped_storage")


def _plain(value: Any) -> Any:
    return value.dense() if isinstance(value, LazyTensor) else value


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to CUDA calloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory ran out, on the device, on the host or inside cuBLAS or NCCL."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)
    )


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, unique while it lives."""
    return tensor.untyped_storage()._cdata


def storage_uses(tensor: Tensor) -> int:
    """Return the number of references to a tensor's storage."""
    return torch._C._storage_Use_Count(address(tensor))


uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]  # private, and not in torch's stubs
"""The function that counts the references to a tensor."""


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written to."""
    return tensor._version


def saved_buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are in the module's state dict, without making it: quantised weights cannot on meta."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }


def tree_map(function: Callable[[Any], Any], values: Any) -> Any:
    """Return nested dicts, lists and tuples with each of their leaves as `function` makes it."""
    if isinstance(values, dict):
        changed = copy.copy(values)
        changed.update((key, tree_map(function, value)) for key, value in values.items())
        return changed
    if not isinstance(values, (list, tuple)):
        return function(values)
    mapped = [tree_map(function, value) for value in values]
    return type(values)(*mapped) if hasattr(values, "_fields") else type(values)(mapped)


def tensors_in(values: Any) -> list[Tensor]:
    """Return every tensor in an operator's arguments or results: lists of tensors are the deepest they go."""
    if isinstance(values, Tensor):
        return [values]
    tensors: list[Tensor] = []
    if isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, Tensor):
                tensors.append(value)  # without a call: every operator of a dry run asks several times
            elif isinstance(value, (tuple, list)):
                tensors += tensors_in(value)
    return tensors


def schema(operator: Any) -> Any:
    """Return an operator's schema: its arguments, results and writes."""
    return operator._schema


@functools.cache
def is_composite(operator: Any) -> bool:
    """Return whether a device runs an operator's parts instead of itself: unlike `silu_backward`, it has no kernel."""
    has_kernel, keys = operator.has_kernel_for_dispatch_key, torch._C.DispatchKey
    return has_kernel(keys.CompositeImplicitAutograd) and not has_kernel(keys.CPU)


def runs_whole_on_meta(operator: Any) -> bool:
    """Return whether an operator that is made of others has a kernel for meta tensors now, see `with_kernels`."""
    return bool(operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta))


counting_versions: Context = partial(torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ADInplaceOrView, False)
"""A context, for use in a mode, in which writes count in a tensor's version."""

set_allocator_settings: Callable[[str], None] = torch._C._accelerator_setAllocatorSettings
"""The function that applies settings of `PYTORCH_ALLOC_CONF` to the caching allocator of GPUs, for segments to come."""


def record_memory_history(device: torch.device) -> None:
    """Start recording every block of a GPU's caching allocator, with the stack that requested it."""
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", device=device, clear_history=True)


def memory_history(device: torch.device) -> list[dict[str, Any]]:
    """Return the allocator's recorded history, in order: `action`, `addr`, `size` in bytes, `frames`."""
    return torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]


AUTOCAST = "AutocastCUDA"
"""The dispatch key of the kernels of `torch.autocast("cuda")`."""

COMPOSITE = "CompositeImplicitAutograd"
"""The dispatch key of operators made of others, on all devices."""

without_functions: Context = torch._C.DisableTorchFunction
"""A context in which no `TorchFunctionMode` sees calls."""


@contextmanager
def with_kernels(key: str, kernels: Iterable[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    """Run torch's own operators with other kernels at a dispatch key inside the `with` block: (`name.overload`, kernel)
    each. What these call reaches no `TorchFunctionMode`."""

    def call(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with without_functions():
            return kernel(*args, **kwargs)

    library: Any = torch.library.Library("aten", "IMPL", key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for name, kernel in kernels:
            library.m.impl(name, key, partial(call, kernel), False)  # `library.impl` refuses meta ones of composites
    try:
        yield
    finally:
        del library  # which restores the kernels


DEVICE_CONTEXT = torch.utils._device.DeviceContext
"""The mode behind `with torch.device(...)` and `torch.set_default_device`."""

GROUPING = "torch._C._group_tensors_by_device_and_dtype"
"""The function that groups tensors by device for optimizers and clipping; no mode sees it."""

grouped: Callable[..., dict[Any, Any]] = torch._C._group_tensors_by_device_and_dtype
"""torch's own grouping."""

exchange: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
"""The function that exchanges storage, shape and device of two tensors; the Python objects stay the same."""


autocast_on_every_tensor: Context = partial(torch._C._IncludeDispatchKeyGuard, torch._C.DispatchKey.AutocastCUDA)
"""A context in which autocast's kernels apply to tensors of any device."""

without_autocast: Context = partial(torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.AutocastCUDA, True)
"""A context, for use in one of autocast's kernels, in which they do not apply."""


def make_adam_states(optimizer: torch.optim.Adam, group: dict[str, Any]) -> None:
    """Make the moments of a group's parameters that have gradients and no moments."""
    optimizer._init_group(group, [], [], [], [], [], [])
