"""Optimizers, precisions and compiled kernels.

- Optimizers that DeepSpeed cannot make from its JSON.
- A run's own folder on an NVMe disk.
- Optimizer states around a step that may run out of memory: made before it, and checked to be untouched.
- The precisions a request can name.
- Kernels that DeepSpeed compiles on first use: its Adam of host and device, and its asynchronous I/O.
"""

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from frugal import torch_internals
from frugal.config.request import Request
from frugal.errors import RequestError, failure, logger
from frugal.planning.strategy import Strategy, optimizer_implementation

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""Makes an optimizer of parameters, or of a list of groups of them."""


def ready_made(request: Request, strategy: Strategy) -> MakeOptimizer | None:
    """Return a function that makes the optimizer of parameters; None where DeepSpeed makes it itself.

    Raises:
        RequestError: its library is not installed, or its kernels cannot be compiled here.
    """
    if request.optimizer.name == "adamw-8bit":
        kind = adamw_8bit()
        return lambda parameters: kind(
            parameters,
            lr=request.scaled_learning_rate,
            betas=request.optimizer.betas,
            eps=request.optimizer.epsilon,
            weight_decay=request.weight_decay,
        )
    if optimizer_implementation(request, strategy) == "deepspeed":
        compile_adam(on_host=strategy.offload_optimizer != "none", in_part=strategy.offload_ratio < 1)
    return None


def adamw_8bit() -> Callable[..., torch.optim.Optimizer]:
    """Return bitsandbytes' class. Its blocks of 256 elements, which share a scale, are cut from ZeRO's flat partitions.

    Raises:
        RequestError: the library is not installed.
    """
    with failure(
        "--optimizer adamw-8bit needs bitsandbytes",
        ImportError,
        hint="pip install bitsandbytes, or use --optimizer adamw",
    ):
        from bitsandbytes.optim import AdamW8bit  # optional: adamw-8bit alone needs it
    return AdamW8bit


_FOLLOWED = ("lr", "betas", "eps", "weight_decay")


def mend_partial_offload(optimizer: Any) -> None:
    """Make the AdamW of the device's sub-groups follow that of the host's, in a ZeRO-3 `optimizer` that has both.

    DeepSpeed 0.19.8 makes it with the settings of that moment, and looks at it in no other place than the update
    (`backup_optimizer` in runtime/zero/stage3.py): learning rates of a schedule, checkpoints and reads of states are
    of the host's optimizer alone. So the two share one table of states, and the settings are copied at each step. It
    is torch's fused AdamW, which needs no memory beside its states.
    """
    host, device = optimizer.optimizer, optimizer.backup_optimizer
    device.param_groups = [dict(device.defaults, params=[], fused=True, foreach=False) for _ in host.param_groups]

    def share_states(*_: Any) -> None:
        device.state = host.state

    def follow(*_: Any) -> None:
        for ours, theirs in zip(device.param_groups, host.param_groups, strict=True):
            ours.update({name: theirs[name] for name in _FOLLOWED})
            for state in (device.state[parameter] for parameter in ours["params"] if device.state[parameter]):
                # read from a checkpoint it is on the host, or a number
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=state["exp_avg"].device)

    share_states()
    host.register_load_state_dict_post_hook(share_states)  # reading puts another table in its place
    device.register_step_pre_hook(follow)


def describe_optimizer(request: Request, strategy: Strategy) -> str:
    """Return the optimizer as checkpoints name it: states of one implementation may not suit another."""
    requested = optimizer_implementation(request, strategy)
    if strategy.offload_ratio < 1:  # the two count steps in different types
        return f"{request.optimizer.name} ({requested}, {strategy.offload_ratio:g} of it on the host)"
    return request.optimizer.name if requested in (None, "fused") else f"{request.optimizer.name} ({requested})"


def uses_nvme(strategy: Strategy) -> bool:
    """Return whether optimizer or parameters live on disk."""
    return "nvme" in (strategy.offload_optimizer, strategy.offload_parameters)


def own_nvme_folder(strategy: Strategy, votes: dist.ProcessGroup | None) -> Path:
    """Make a folder for this run alone in the one that the strategy names: DeepSpeed empties what it uses. Collective.

    Raises:
        RequestError: the folder cannot be made, or DeepSpeed's I/O cannot be compiled.
    """
    _load(
        "AsyncIOBuilder",
        "DeepSpeed's asynchronous I/O",
        "install libaio with its headers (`apt install libaio-dev`), a C++ compiler and ninja; or plan without "
        "--offload nvme",
    )
    number = torch.tensor(secrets.randbits(48))
    dist.broadcast(number, src=0, group=votes)
    folder = Path(str(strategy.nvme_path)).expanduser() / f"frugal-{number.item():012x}"
    with failure(
        f"cannot write to {strategy.nvme_path} of --offload", OSError, hint="name a folder on a local disk of each node"
    ):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_states(optimizer: torch.optim.Adam, masters: Sequence[Tensor]) -> None:
    """Make Adam's missing moments of the tensors that it updates."""
    group = optimizer.param_groups[0]
    for each in masters:
        if optimizer.state.get(each):
            continue
        gradient, each.grad = each.grad, each.detach()  # only its being there matters
        try:
            torch_internals.make_adam_states(optimizer, {**group, "params": [each]})
        except BaseException:
            optimizer.state.pop(each, None)  # half a state is taken for a whole one
            raise
        finally:
            each.grad = gradient


def versions(optimizer: Any) -> dict[int, int]:
    """Return how often each tensor that the step may write to was written to, by the tensor's id."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    states = [kept for each in parameters for kept in optimizer.state.get(each, {}).values() if torch.is_tensor(kept)]
    return {id(each): torch_internals.version(each) for each in (*parameters, *states)}


def is_untouched(optimizer: Any, before: dict[int, int]) -> bool:
    """Return whether a failed step has written nothing, and remove states that it had begun to make."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return False  # kernels of others do not count what they write
    if any(before.get(each, version) != version for each, version in versions(optimizer).items()):
        return False
    for group in optimizer.param_groups:
        for each in group["params"]:
            kept = optimizer.state.get(each, {}).values()
            if any(torch.is_tensor(tensor) and id(tensor) not in before for tensor in kept):
                optimizer.state.pop(each)
    return True


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""torch's types by the names of precisions."""


def check_precision(precision: str) -> None:
    """Refuse a precision that DeepSpeed does not train on this device.

    Raises:
        RequestError: it lists the supported ones.
    """
    device = get_accelerator()
    supported = {"fp32": True, "bf16": device.is_bf16_supported(), "fp16": device.is_fp16_supported()}
    if not supported[precision]:
        others = " or ".join(f"--precision {name}" for name, is_supported in supported.items() if is_supported)
        raise RequestError(
            f"--precision {precision} cannot be trained here",
            because=f"DeepSpeed does not support it on the {device.device_name()} of {socket.gethostname()}",
            hint=f"use {others}",
        )


def compile_adam(*, on_host: bool, in_part: bool = False) -> None:
    """Compile DeepSpeed's Adam, or load what was compiled before: minutes the first time on a machine.

    Raises:
        RequestError: it cannot be compiled.
    """
    name, called = ("CPUAdamBuilder", "DeepSpeedCPUAdam") if on_host else ("FusedAdamBuilder", "FusedAdam")
    other_way = "plan with --offload optimizer:1" if in_part else "leave out optimizer.implementation"
    _load(
        name,
        f"DeepSpeed's {called}",
        f"install a C++ compiler, ninja and, for GPUs, the CUDA toolkit; or {other_way}: torch's fused kernels need "
        "none of them",
    )


def _load(builder_name: str, what: str, hint: str) -> None:
    """Compile one of DeepSpeed's kernels, or load what was compiled before: minutes the first time on a machine."""
    from torch.utils.cpp_extension import get_default_build_root  # needed only to compile

    # Whatever a compiler, a linker, or a missing library or toolkit makes torch raise.
    with failure(f"{what} cannot be compiled here", Exception, hint=hint):
        builder = get_accelerator().create_op_builder(builder_name)
        root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
        with ExitStack() as held:
            with suppress(OSError):  # no locks, or nothing can be written there: then all is compiled
                root.mkdir(parents=True, exist_ok=True)
                ours = held.enter_context((root / f".frugal-{builder.name}").open("w"))
                fcntl.flock(ours, fcntl.LOCK_EX)  # ranks come here one by one
            for lock in root.glob(f"**/{builder.name}/lock"):
                wait_for_compiler(lock)
            builder.load(verbose=False)


QUIET_SECONDS = 180.0
"""A source of DeepSpeed takes about a minute of a core to compile, after which its object is written."""


def wait_for_compiler(lock: Path, quiet_seconds: float = QUIET_SECONDS) -> None:
    """Return once the file `lock` is gone, or remove it when nothing in its folder has changed for `quiet_seconds`.

    While torch compiles an extension a file of that name lies in the extension's folder, and others wait for its end,
    silently and without a limit. A process that is killed meanwhile leaves it behind. Other ranks of a run do not
    compile meanwhile, other programs or hosts with the same home may.
    """
    if lock.exists():
        logger.warning("waiting for another process to compile %s", lock.parent)
    while lock.exists():
        last = 0.0
        for each in lock.parent.iterdir():
            with suppress(FileNotFoundError):  # the compiler has removed it
                last = max(last, each.stat().st_mtime)
        if time.time() - last > quiet_seconds:
            lock.unlink(missing_ok=True)
            logger.warning("removed %s: the process that compiled there has ended", lock)
        time.sleep(0.5)
