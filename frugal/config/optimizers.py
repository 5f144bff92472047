"""Optimizers: which there are, what they keep of every parameter, and what they do not go with.

The name says what is computed, the implementation how:

    adamw        fused, foreach, for-loop (torch's own words) or deepspeed: its FusedAdam, and on the host its CPUAdam
    sgd          fused, foreach or for-loop
    adamw-8bit   bitsandbytes, whose moments take a byte each

All implementations of one optimizer compute the same, so there is one flag for each question, and the second can be
left out: torch's fused kernels need no compiler, no library and no temporaries. `deepspeed` compiles its kernels when
they are first used. `foreach` and `for-loop` are for devices or types without a fused kernel, and take temporaries.
"""

from typing import Literal

from frugal.errors import RequestError

OptimizerName = Literal["adamw", "sgd", "adamw-8bit"]
OptimizerImplementation = Literal["fused", "foreach", "for-loop", "deepspeed"]

IMPLEMENTATIONS: dict[OptimizerName, tuple[OptimizerImplementation, ...]] = {
    "adamw": ("fused", "foreach", "for-loop", "deepspeed"),
    "sgd": ("fused", "foreach", "for-loop"),
    "adamw-8bit": (),
}
"""The first is taken where none is asked for; none: there is only the library's own."""

EIGHT_BIT_BLOCK = 256
"""Elements that share one scale, fp32, in each moment of bitsandbytes' 8-bit optimizers."""


def implementation(optimizer: OptimizerName, asked: OptimizerImplementation | None) -> OptimizerImplementation | None:
    """The implementation of `optimizer` that runs if `asked` is asked for; None: the library's only one."""
    return asked or next(iter(IMPLEMENTATIONS[optimizer]), None)


def state_bytes_per_element(optimizer: OptimizerName, momentum: float | None = None) -> float:
    """Bytes that the optimizer keeps of each element, without the fp32 master weight.

    AdamW: two moments in fp32. SGD: its momentum, if any. 8-bit AdamW: two moments of a byte, and two scales a block.
    Left out: parameters below 4096 elements, whose moments bitsandbytes keeps in fp32.
    """
    return {
        "adamw": 8.0,
        "sgd": 4.0 if momentum else 0.0,
        "adamw-8bit": 2 + 2 * 4 / EIGHT_BIT_BLOCK,
    }[optimizer]


def check(
    optimizer: OptimizerName,
    asked: OptimizerImplementation | None,
    *,
    momentum: float | None,
    offload: str,
) -> None:
    """Whether these go together.

    Raises:
        RequestError: they do not.
    """
    known = IMPLEMENTATIONS[optimizer]
    if asked is not None and asked not in known:
        raise RequestError(
            f"--optimizer {optimizer} has no {asked} implementation",
            because=f"there is {', '.join(known)}" if known else "there is only that of its library, bitsandbytes",
            hint="leave --optimizer-implementation out",
        )
    if momentum is not None and optimizer != "sgd":
        raise RequestError(
            f"--momentum was given with --optimizer {optimizer}",
            because="only sgd has a momentum to choose",
            hint="leave one of them out, or use --optimizer sgd",
        )
    if optimizer == "adamw-8bit" and offload == "nvme":
        raise RequestError(
            "--optimizer adamw-8bit cannot be used with --offload nvme",
            because="DeepSpeed moves only states in fp32 to disk",
            hint="use --optimizer adamw, or --offload all",
        )
