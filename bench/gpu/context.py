"""`python -m bench.gpu.context FILE`: GPU memory beyond tensors, and what each part of a training process adds to it.

Memory in use on the device, less the reserved bytes of this process, after each step in one process that has the GPU
for itself: a context, kernels of products and attention, frugal's engine, which starts no NCCL for one rank, two
training steps, then two communicators of NCCL. `frugal.config.hardware.context` assumes them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def outside() -> int:
    """Bytes in use on the device beyond what torch's allocator holds."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def measured() -> dict[str, Any]:
    """The bytes after each step."""
    import frugal
    from bench.plans import plan_by_hand
    from frugal.distributed import process_group
    from frugal.models.resolve import resolve

    found: dict[str, Any] = {"device": torch.cuda.get_device_properties(0).name, "nccl": torch.cuda.nccl.version()}
    torch.zeros(1, device="cuda")
    found["context"] = outside()
    x = torch.randn(4, 512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x @ x).float().sum().backward()
    found["products"] = outside()
    F.scaled_dot_product_attention(*(x.view(4, 8, 512, 64),) * 3, is_causal=True).float().sum().backward()
    found["attention"] = outside()
    process_group.form()
    plan = plan_by_hand(
        world_size=1, global_batch=4, micro_batch=2, zero_stage=2, request={"precision": "bf16", "seq_len": 512}
    )
    engine = frugal.initialize(resolve("gpt2").build(dtype=torch.bfloat16), plan, frugal.CausalLM())
    found["frugal's engine"] = outside()
    samples = [{"input_ids": torch.randint(50_000, (512,))} for _ in range(4)]
    for number in (1, 2):
        engine.train_step(samples)
        found[f"after {number} steps"] = outside()
    for number in (1, 2):
        dist.all_reduce(torch.ones(1024, device="cuda"), group=dist.new_group(backend="nccl"))
        found[f"after {number} communicators of NCCL"] = outside()
    return found


if __name__ == "__main__":
    torch.cuda.init()
    result = measured()
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    os._exit(0)
