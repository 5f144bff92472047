"""The memory of loading a model's weights.

Pretrained weights are read tensor by tensor, each put in its place before the next: a rank's host holds what becomes of
one tensor, or of those that are put together, and the pages of the files they are in, which the kernel can take back.
Random weights are made whole by rank 0, on its host. What a user's factory makes, every rank makes whole.

On a device no loading takes more than training does: it holds the parameters that stay there, and one on its way.
"""

from dataclasses import dataclass
from typing import Literal

from frugal.planning.model_facts import NOT_PACKED, Origin, Packed, Reading, Weights
from frugal.planning.strategy import Strategy

Way = Literal["by-tensor", "by-rank-0", "by-every-rank"]
"""How ranks get their weights: each reads what it keeps, rank 0 makes all and sends them, or each makes all."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Bytes while weights are loaded.

    Attributes:
        way: how ranks get them.
        rank_0_bytes: the peak of rank 0's tensors on its host, and of what it touches of files.
        rank_bytes: the same for any other rank.
        device_bytes: the most that is on a device. Where the host is the device, it is part of the former.
    """

    way: Way
    rank_0_bytes: int
    rank_bytes: int
    device_bytes: int


def way_of(strategy: Strategy, origin: Origin, *, is_quantised: bool = False) -> Way:
    """Return how ranks get weights of this origin. With parameters on NVMe DeepSpeed splits only what every rank has.

    Random weights that are quantised, which nobody trains, are made by every rank: scales are not sent.
    """
    if origin == "pretrained":
        return "by-tensor"
    is_sent = origin == "random" and strategy.offload_parameters != "nvme" and not is_quantised
    return "by-rank-0" if is_sent else "by-every-rank"


def loading_of(
    weights: Weights,
    strategy: Strategy,
    *,
    precision: str,
    parameters: int,
    largest_parameter: int,
    world_size: int,
    kind: str,
    packed: Packed = NOT_PACKED,
) -> Loading:
    """Return the memory that loading takes of a model with `parameters` elements.

    Left out: buffers, and what DeepSpeed makes of parameters afterwards, which is part of training's first phase.
    """
    is_quantised = packed.elements > 0
    element, way = 4 if precision == "fp32" else 2, way_of(strategy, weights.origin, is_quantised=is_quantised)
    largest, whole = element * largest_parameter, packed.weight_bytes(parameters, element)
    kept = packed.scales_bytes + (whole if strategy.zero_stage < 3 else -(-whole // world_size))
    on_device = kept if strategy.offload_parameters == "none" else 0
    on_host = kept if kind == "cpu" or strategy.offload_parameters == "cpu" else 0
    if way == "by-tensor":
        reading = weights.reading.get(precision, Reading(passing_bytes=2 * largest, keeping_bytes=2 * largest + whole))
        host = reading.keeping(on_host, whole + packed.scales_bytes)
        return Loading(way=way, rank_0_bytes=host, rank_bytes=host, device_bytes=on_device)
    arriving = largest if strategy.zero_stage == 3 else 0  # whole, before the rank takes its part
    if is_quantised:  # all of it is made before it is packed
        whole += element * parameters
    if kind == "cpu":  # what is made stays there, or makes room for the parts
        makes, waits = max(whole + arriving // world_size, kept + arriving), kept + arriving
    else:
        makes, waits = whole + on_host, on_host
    rank = makes if way == "by-every-rank" else waits
    return Loading(way=way, rank_0_bytes=makes, rank_bytes=rank, device_bytes=on_device + arriving)
