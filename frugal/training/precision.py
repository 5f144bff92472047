"""The precisions a request can name."""

import socket

import torch

from frugal.errors import RequestError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""torch's types of them."""


def check_precision(precision: str) -> None:
    """Refuse what DeepSpeed does not train on this device.

    Raises:
        RequestError: with what it does.
    """
    from deepspeed.accelerator import get_accelerator  # takes seconds, and planning needs the types alone

    device = get_accelerator()
    supported = {"fp32": True, "bf16": device.is_bf16_supported(), "fp16": device.is_fp16_supported()}
    if not supported[precision]:
        others = " or ".join(f"--precision {name}" for name, is_supported in supported.items() if is_supported)
        raise RequestError(
            f"--precision {precision} cannot be trained here",
            because=f"DeepSpeed does not support it on the {device.device_name()} of {socket.gethostname()}",
            hint=f"use {others}",
        )
