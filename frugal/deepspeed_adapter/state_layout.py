"""Which elements of which parameters a rank keeps, and where: what it takes to read a checkpoint on other ranks.

DeepSpeed hands its optimizer flat tensors, here called slots. What a slot holds depends on the ZeRO stage and the
number of ranks:

    stage 0       a slot a parameter, whole, the same on every rank
    stages 1, 2   a slot a parameter group: all parameters end to end, cut into one equal part a rank
    stage 3       a slot a sub-group: of each parameter one equal part a rank, end to end

Parameters without gradients are in no slot: stages 0 to 2 keep them whole, stage 3 cuts them as it cuts the others.
Names of DeepSpeed 0.19.8.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """`number` elements of parameter `name`, from element `first` on; in their slot they begin at element `place`."""

    name: str
    first: int
    number: int
    place: int


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """What one rank keeps: the pieces in each slot, in the optimizer's order, and those of frozen parameters."""

    slots: tuple[tuple[Piece, ...], ...]
    frozen: tuple[Piece, ...] = ()


def of(engine: Any, zero_stage: int) -> StateLayout:
    """The layout of this rank of DeepSpeed's engine."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    frozen = [parameter for parameter in engine.module.parameters() if not parameter.requires_grad]
    match zero_stage:
        case 0:
            slots = tuple(_whole([parameter], names) for parameter in slots_of(engine, 0))
        case 3:
            slots = tuple(_parts(group, names, engine.global_rank) for group in optimizer.fp16_groups)
            kept = tuple(piece for each in frozen for piece in _parts([each], names, engine.global_rank))
            return StateLayout(slots=slots, frozen=kept)
        case _:
            slots = tuple(_linked(group, names) for group in optimizer.bit16_groups)
    return StateLayout(slots=slots, frozen=_whole(frozen, names))


def slots_of(engine: Any, zero_stage: int) -> list[Any]:
    """The optimizer's flat tensors, fp32."""
    optimizer = engine.optimizer
    match zero_stage:
        case 0:
            return [parameter for group in optimizer.param_groups for parameter in group["params"]]
        case 3:
            return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def _whole(parameters: Iterable[Any], names: dict[int, str]) -> tuple[Piece, ...]:
    return tuple(Piece(names[id(each)], 0, each.numel(), 0) for each in parameters)


def _linked(group: Iterable[Any], names: dict[int, str]) -> tuple[Piece, ...]:
    """Stages 1 and 2: what DeepSpeed itself keeps of how its parameters lie in this rank's part of their group."""
    links = [(names[id(each)], each._hp_mapping) for each in group if each._hp_mapping is not None]
    return tuple(
        Piece(name, link.lp_fragment_address.start, link.lp_fragment_address.numel, link.hp_fragment_address.start)
        for name, link in links
    )


def _parts(group: Iterable[Any], names: dict[int, str], rank: int) -> tuple[Piece, ...]:
    """Stage 3: of each parameter the part of this rank; the last ranks' are filled up with padding."""
    pieces, place = [], 0
    for each in group:
        share = each.partition_numel()
        number = min(share, each.ds_numel - rank * share)
        if number > 0:
            pieces.append(Piece(names[id(each)], rank * share, number, place))
        place += share
    return tuple(pieces)
