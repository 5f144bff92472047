"""The model of a run, its weights where the plan trains them as soon as they are known.

Of pretrained weights each rank reads what it keeps, tensor by tensor. Random ones are made by rank 0, as one process
would make them, and sent to the others, whose model has shapes alone until then. A user's factory is called on every
rank, and what it makes is on the host until DeepSpeed's engine takes it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.deepspeed_adapter.placement import Placement
from frugal.models.spec import ModelSpec
from frugal.planning.memory.breakdown import way_of
from frugal.planning.plan import Plan


def build(spec: ModelSpec, plan: Plan, device: torch.device, *, seed: int) -> nn.Module:
    """Return the module that `frugal.engine.engine.initialize` takes, in training mode. Collective.

    Its weights are those that `spec.build` gives one process with the same seed, bit for bit.

    Raises:
        RequestError: its factory fails, or its weights cannot be read.
    """
    dtype = DTYPES[plan.request.precision]
    way = way_of(plan.strategy, spec.origin, is_quantised=spec.quantize is not None)
    if way == "by-every-rank":
        return spec.build(dtype=dtype, seed=seed)
    placement = Placement(plan.request, plan.strategy, plan.batch, device)
    if way == "by-tensor":
        return spec.build(dtype=dtype, seed=seed, place=placement.put, adapting=placement.told(), quantising_on=device)
    model = spec.build(dtype=dtype, seed=seed, device="cpu" if dist.get_rank() == 0 else "meta")
    # tensors that are neither parameters nor buffers cannot be found to be sent
    if any(isinstance(value, Tensor) for module in model.modules() for value in vars(module).values()):
        return model if dist.get_rank() == 0 else spec.build(dtype=dtype, seed=seed)
    placement.send(model)
    return model
