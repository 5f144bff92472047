"""`torch.cuda` for a script on a pretended card: fixed answers that need no driver.

Other names stay torch's own, which fail on a build without CUDA.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from frugal import torch_internals
from frugal.tools.own_loop.tracker import LoopTracker, asks_for_deepspeed, package_of

SIDE_STREAMS = "work on side streams is counted as if all of it were on one"
COMPILED = "torch.compile is counted as eager: compiled kernels may take less"


class PretendedStream:
    """A CUDA stream, or an event on one, that never waits."""

    cuda_stream = 0
    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> "PretendedStream":
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def elapsed_time(self, _end: Any) -> float:
        """Return milliseconds."""
        return 1.0

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    record = wait = synchronize = wait_event = wait_stream = is_capturing = _nothing

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event or PretendedStream()


class PretendedGenerator(torch.Generator):
    """A generator of random numbers, which is the host's whatever device it says."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Make one; torch's own would ask for a driver."""
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self.named = torch.device("cuda", 0) if str(device).partition(":")[0] == "cuda" else torch.device(device)

    device = property(lambda self: self.named)


@contextmanager
def on_pretended_card(
    tracker: LoopTracker, *, name: str, total_bytes: int, capability: tuple[int, int]
) -> Iterator[None]:
    """Replace names of `torch.cuda`, and others of torch, inside the `with` block."""

    def free_and_total(*_: Any) -> tuple[int, int]:
        return total_bytes - tracker.replays().under().peak_reserved_bytes, total_bytes

    properties = SimpleNamespace(
        name=name, total_memory=total_bytes, major=capability[0], minor=capability[1], multi_processor_count=108,
        gcnArchName="", warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10, shared_memory_per_multiprocessor=164 << 10, is_integrated=0,
        L2_cache_size=40 << 20,
    )  # fmt: skip
    constant: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "get_device_name": name,
        "get_device_capability": capability, "get_device_properties": properties,
        "init": None, "synchronize": None, "set_device": None,
        "ipc_collect": None, "manual_seed": None, "manual_seed_all": None, "seed": None,
        "reset_max_memory_allocated": None, "set_per_process_memory_fraction": None,
        "reset_accumulated_memory_stats": None, "memory_summary": "", "get_arch_list": ["sm_80", "sm_90"],
        "utilization": 0, "set_rng_state": None, "_lazy_init": None, "set_stream": None,
        "is_current_stream_capturing": False, "can_device_access_peer": False, "mem_get_info": None,
    }  # fmt: skip
    table: dict[str, Any] = {key: _always(value) for key, value in constant.items()}
    table |= {
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "mem_get_info": free_and_total,
        "empty_cache": tracker.empty_cache,
        "memory_allocated": lambda *_: tracker.allocated_bytes,
        "max_memory_allocated": lambda *_: tracker.peaks[0],
        "memory_reserved": lambda *_: tracker.replays().under().peak_reserved_bytes,
        "max_memory_reserved": lambda *_: tracker.peaks[1],
        "reset_peak_memory_stats": tracker.reset_peaks,
        "memory_stats": lambda *_: defaultdict(int, {
            f"{what}_bytes.all.{when}": value
            for when, *values in (
                ("current", tracker.allocated_bytes, tracker.replays().under().peak_reserved_bytes),
                ("peak", *tracker.peaks),
            )
            for what, value in zip(("allocated", "reserved"), values, strict=True)
        }),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "Stream": PretendedStream, "Event": PretendedStream, "device": PretendedStream, "stream": PretendedStream,
        "current_stream": PretendedStream, "default_stream": PretendedStream,
    }  # fmt: skip

    def compile_nothing(model: Any = None, **_: Any) -> Any:
        if not asks_for_deepspeed(sys._getframe(1)):  # which compiles small functions of its own
            tracker.note(COMPILED)
        return model if model is not None else lambda function: function

    loading = torch.load

    def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load onto a meta device what goes to the card, and record it."""
        is_card = isinstance(map_location, str | torch.device) and str(map_location).startswith("cuda")
        loaded = loading(file, "meta" if is_card else map_location, *args, **kwargs)
        with torch_internals.without_functions():
            torch_internals.tree_map(
                lambda each: tracker.hold([each] if getattr(each, "is_meta", False) else []), loaded
            )
        return loaded

    def has_accelerator() -> bool:
        """Answer no to torch itself, whose threads cannot pin memory for the card."""
        return package_of(sys._getframe(1)) != "torch"

    accelerator = {
        "current_accelerator": torch.device("cuda"), "device_count": 1, "current_device_index": 0, "synchronize": None,
        "set_device_index": None, "current_stream": PretendedStream(),
    }  # fmt: skip
    replaced: dict[Any, dict[str, Any]] = {
        torch.cuda: table,
        torch.cuda.nvtx: dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), _always(0)),
        torch.accelerator: {name: _always(value) for name, value in accelerator.items()}
        | {"is_available": has_accelerator},
        torch: {"compile": compile_nothing, "Generator": PretendedGenerator, "load": load},
        torch.nn.Module: {"compile": lambda *_, **__: tracker.note(COMPILED)},
        "torch._C": {"_cuda_getCurrentRawStream": _always(0)},  # bitsandbytes takes it at import where there is a card
    }
    with ExitStack() as stack:
        for owner, names in replaced.items():
            stack.enter_context(patch.multiple(owner, create=owner == "torch._C", **names))
        yield


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value
