"""The optimizers that DeepSpeed cannot make from its JSON, and whether those that it compiles can be had."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler

from frugal.errors import RequestError
from frugal.planning.ds_config import ADAM_BETAS, ADAM_EPSILON
from frugal.planning.plan import Plan
from frugal.planning.request import Request

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


def ready_made(plan: Plan) -> MakeOptimizer | None:
    """What makes the plan's optimizer of parameters; None where DeepSpeed makes it itself.

    Raises:
        RequestError: its library is not installed, or its kernels cannot be compiled here.
    """
    request = plan.request
    if request.optimizer == "adamw-8bit":
        kind = adamw_8bit()
        return lambda parameters: kind(
            parameters,
            lr=request.scaled_learning_rate,
            betas=ADAM_BETAS,
            eps=ADAM_EPSILON,
            weight_decay=request.weight_decay,
        )
    if request.optimizer_implementation == "deepspeed":
        compile_kernels(on_host=plan.strategy.offload_optimizer != "none")
    return None


def leave_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which ZeRO looks for whatever the optimizer is, without compiling it.

    It asks for torch.compile when imported, and that for Inductor: some three seconds of every rank's start.
    """
    compile_function = compiler.compile
    compiler.compile = lambda *_args, **_kwargs: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # for what the import leaves behind
    finally:
        compiler.compile = compile_function


def adamw_8bit() -> Callable[..., torch.optim.Optimizer]:
    """bitsandbytes' class. Its blocks of 256 elements, which share a scale, are cut from ZeRO's flat partitions.

    Raises:
        RequestError: the library is not installed.
    """
    try:
        from bitsandbytes.optim import AdamW8bit  # optional: adamw-8bit alone needs it
    except ImportError as error:
        raise RequestError(
            "--optimizer adamw-8bit needs bitsandbytes",
            because=str(error),
            hint="pip install bitsandbytes, or use --optimizer adamw",
        ) from None
    return AdamW8bit


def compile_kernels(*, on_host: bool) -> None:
    """Compile DeepSpeed's Adam, or load what was compiled before: minutes the first time on a machine.

    Raises:
        RequestError: it cannot be compiled.
    """
    name, called = ("CPUAdamBuilder", "DeepSpeedCPUAdam") if on_host else ("FusedAdamBuilder", "FusedAdam")
    try:
        get_accelerator().create_op_builder(name).load(verbose=False)
    except Exception as error:  # whatever a compiler, a linker or a missing CUDA toolkit makes torch raise
        raise RequestError(
            f"DeepSpeed's {called} cannot be compiled here",
            because=str(error).strip().splitlines()[0],
            hint="install a C++ compiler, ninja and, for GPUs, the CUDA toolkit; or leave out "
            "--optimizer-implementation: torch's fused kernels need none of them",
        ) from None


def describe(request: Request) -> str:
    """The optimizer in the words that a checkpoint keeps: states of one implementation may not suit another."""
    asked = request.optimizer_implementation
    return request.optimizer if asked in (None, "fused") else f"{request.optimizer} ({asked})"
