"""Among one rank, collectives of the process group that takes no memory do what gloo's do."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed import comm
from torch import Tensor

from bench.ranks import Ranks

Collective = Callable[[Tensor, Tensor, Any], Any]

COLLECTIVES: dict[str, Collective] = {
    "all_reduce": lambda out, own, group: dist.all_reduce(out.copy_(own), group=group),
    "all_reduce max": lambda out, own, group: dist.all_reduce(out.copy_(own), dist.ReduceOp.MAX, group=group),
    "reduce": lambda out, own, group: dist.reduce(out.copy_(own), 0, group=group),
    "broadcast": lambda out, own, group: dist.broadcast(out.copy_(own), 0, group=group),
    "all_gather": lambda out, own, group: dist.all_gather([out], own, group=group),
    "all_gather_into_tensor": lambda out, own, group: comm.all_gather_into_tensor(out, own, group=group),
    "reduce_scatter": lambda out, own, group: dist.reduce_scatter(out, [own], group=group),
    "reduce_scatter_tensor": lambda out, own, group: comm.reduce_scatter_tensor(out, own, group=group),
    "all_to_all_single": lambda out, own, group: dist.all_to_all_single(out, own, group=group),
    "gather": lambda out, own, group: dist.gather(own, [out], 0, group=group),
    "scatter": lambda out, own, group: dist.scatter(out, [own], 0, group=group),
}


def differences(seed: int) -> list[str]:
    """Return the collectives whose outputs differ from gloo's; runs on the rank."""
    draw = random.Random(seed)
    gloo = dist.new_group(backend="gloo")
    found = [dist.get_backend()] if dist.get_backend() == "gloo" else []
    for name, collective in COLLECTIVES.items():
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            own = torch.randint(-9, 9, [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]).to(dtype)
            outs = [torch.full_like(own, 77), torch.full_like(own, 77)]
            for out, group in zip(outs, (None, gloo), strict=True):
                collective(out, own.clone(), group)
            if not torch.equal(*outs):
                found.append(f"{name} of {dtype}, {tuple(own.shape)}")
    for kind in ([1, None], {"a": torch.ones(2).tolist()}):
        objects: list[Any] = [None]
        dist.all_gather_object(objects, kind)
        found += [] if objects == [kind] else [f"all_gather_object of {kind}"]
    dist.barrier()
    dist.destroy_process_group(gloo)
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_collectives_of_one_rank_are_those_of_gloo(seed: int, one_rank: Ranks) -> None:
    assert one_rank.run(differences, seed) == [[]]
