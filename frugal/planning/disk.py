"""What a run takes of a node's disk: states that live on NVMe while it trains, and saved checkpoints.

Left out: the cache of tokenised data, and logs.
"""

from typing import Protocol

from frugal.planning.cluster import Cluster, Node
from frugal.planning.optimizers import state_bytes_per_element
from frugal.planning.request import Request
from frugal.planning.strategy import Strategy


class Sizes(Protocol):
    """Elements of a model."""

    @property
    def parameters(self) -> int: ...
    @property
    def trainable_parameters(self) -> int: ...


def nvme_bytes(request: Request, strategy: Strategy, model: Sizes, node: Node, cluster: Cluster) -> int:
    """What the ranks of `node` keep on its NVMe disk.

    Each rank keeps its share of what ZeRO-3 splits: master weights and the optimizer's states in fp32 and the summed
    gradients, where the optimizer is offloaded; the parameters, where they are. Left out: that DeepSpeed aligns each
    file to a block, a few KiB for each of a model's parameters.
    """
    a_rank = 0.0
    if strategy.offload_optimizer == "nvme":
        states = state_bytes_per_element(request.optimizer, request.momentum)
        a_rank += (4 + states + 4) * model.trainable_parameters / cluster.world_size
    if strategy.offload_parameters == "nvme":
        a_rank += (4 if request.precision == "fp32" else 2) * model.parameters / cluster.world_size
    return int(a_rank * len(node.devices))


def checkpoint_bytes(request: Request, strategy: Strategy, model: Sizes) -> int:
    """One saved checkpoint, of all ranks together.

    The optimizer's states and the fp32 master weights, which only plain fp32 training (ZeRO-0) does without; beside
    them the parameters as they are trained, of which ZeRO-3 saves only those that are not trained. DeepSpeed saves each
    element once, whatever the world size. Held against real checkpoints in tests/training/test_room.py.
    """
    element = 4 if request.precision == "fp32" else 2
    master = 0 if strategy.zero_stage == 0 and request.precision == "fp32" else 4
    states = state_bytes_per_element(request.optimizer, request.momentum)
    beside = model.parameters - (model.trainable_parameters if strategy.zero_stage == 3 else 0)
    return int(element * beside + (master + states) * model.trainable_parameters)
