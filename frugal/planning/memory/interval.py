"""The bounds of the memory that a device needs, and their causes.

| cause     | below                                              | above                                              |
|-----------|----------------------------------------------------|----------------------------------------------------|
| allocator | as above, at most all slack: live tensors must fit | 40 MiB, two segments of which a step begins none   |
|           |                                                    | in the dry run, and 0.7 % of all segments: other   |
|           |                                                    | requests and another order                         |
| kernels   | 0.1 % of the live tensors on a known card, 0.5 % on| the same                                           |
|           | one of which only the memory is known: workspaces, |                                                    |
|           | and which kernel is chosen                         |                                                    |
| context   | down to the least of                               | up to the most; 64 MiB once it has been measured   |
|           | `frugal.config.hardware.context`                   |                                                    |
| data      | activations and temporary tensors, where the dry   | 5 % of them: the code may take another branch on   |
|           | run took the fullest case of what depends on data  | its data than it did                               |
| lengths   | what the drawn runs of other lengths need more     | the same, where the device may not have it: a run  |
|           | than equal ones, where the device has it           | goes on in smaller micro-batches then              |

A CPU rank has no caching allocator and no context; its kernels are 0.5 % below and 0.2 % above, the bounds of
`python -m bench.memory.accuracy`. The others are from emulated cards, rounded up: allocated peaks were off by at most
0.044 %, the smallest capacity of a run's own requests was 0.4 % more than predicted, and 46 MiB or 1.8 % once, for a
small model. The row of data is a guess. `python -m bench.memory.coverage` counts what is inside.

The margin of a device is what all causes but the last two come to above a plan that fills it. So where a plan fits, its
upper bound fits, unless it is data that may exceed it; then the plan says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from frugal.config.hardware.cluster import (
    ALLOCATOR_BYTES,
    ALLOCATOR_SHARE,
    CARDS,
    KERNELS_SHARE,
    UNKNOWN_KERNELS_SHARE,
    Device,
)

CPU_BELOW, CPU_ABOVE = 0.005, 0.002
DATA_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Cause:
    """By how many bytes something may make the total smaller or larger."""

    below_bytes: int
    above_bytes: int

    def __post_init__(self) -> None:
        assert self.below_bytes >= 0 and self.above_bytes >= 0, self


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of the memory that one device needs, and what each cause has to do with them."""

    lower_bytes: int
    upper_bytes: int
    causes: dict[str, Cause]

    @classmethod
    def around(cls, total_bytes: int, causes: dict[str, Cause]) -> "Bounds":
        """Return bounds as far from `total_bytes` as all causes together may lead."""
        return cls(
            lower_bytes=max(0, total_bytes - sum(cause.below_bytes for cause in causes.values())),
            upper_bytes=total_bytes + sum(cause.above_bytes for cause in causes.values()),
            causes=causes,
        )


def of_tensors(live_bytes: int, capacity_bytes: int, *, on_cpu: bool, is_known_card: bool) -> dict[str, Cause]:
    """Return the causes without context and data: `live_bytes` at the peak, `capacity_bytes` with the allocator's
    slack.
    """
    if on_cpu:
        return {"kernels": Cause(below_bytes=int(CPU_BELOW * live_bytes), above_bytes=int(CPU_ABOVE * live_bytes))}
    other_order = ALLOCATOR_BYTES + int(ALLOCATOR_SHARE * capacity_bytes)
    off = int(live_bytes * (KERNELS_SHARE if is_known_card else UNKNOWN_KERNELS_SHARE))
    return {
        "allocator": Cause(below_bytes=max(0, min(capacity_bytes - live_bytes, other_order)), above_bytes=other_order),
        "kernels": Cause(below_bytes=off, above_bytes=off),
    }


def of_device(live_bytes: int, capacity_bytes: int, device: Device) -> Bounds:
    """Return the bounds of tensors and context on `device`."""
    on_cpu = device.kind == "cpu"
    causes = of_tensors(live_bytes, capacity_bytes, on_cpu=on_cpu, is_known_card=device.name in CARDS)
    if not on_cpu:
        causes["context"] = Cause(below_bytes=device.context_below_bytes, above_bytes=device.context_above_bytes)
    return Bounds.around(capacity_bytes + device.context_bytes, causes)


def widened(interval: Bounds, total_bytes: int, of_data_bytes: int, assumptions: Sequence[str]) -> Bounds:
    """Widen bounds where a dry run assumed something of its data, which `of_data_bytes` may depend on."""
    if not assumptions:
        return interval
    data = Cause(below_bytes=of_data_bytes, above_bytes=int(DATA_SHARE * of_data_bytes))
    return Bounds.around(total_bytes, interval.causes | {"data": data})
