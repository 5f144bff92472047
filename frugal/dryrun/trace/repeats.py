"""Slices of a tiled loss or MLP that repeat others: their recording is written instead of run.

A sample of a million tokens has hundreds of slices in each layer, and all but the last are alike. The first three and
the last are run. If the recordings of the second and the third are equal, relative to themselves and the slice before,
all others up to the last would be equal, too, since they begin with the same: the written recording is exactly the one
that running them would make.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from frugal.planning.memory.timeline import TimelineBuilder

NUM_RUN = 3
"""Slices that are run before others are written: the first is special, the third is compared with the second."""


@dataclass(frozen=True)
class BetweenSlices:
    """A position in a recording, between two slices.

    Attributes:
        event: number of the next event.
        birth: number of the next storage.
        counted: the counts so far, by name.
        elsewhere: numbers that must not change in a slice: of marks, and of bytes on the host.
    """

    event: int
    birth: int
    counted: Counter[str]
    elsewhere: tuple[int, ...]


def are_alike(timeline: TimelineBuilder, places: Sequence[BetweenSlices]) -> bool:
    """Return whether the slices between three places did the same, and each storage ends in its slice or in the
    next."""
    first, second, third = places
    num_births = second.birth - first.birth
    if third.birth - second.birth != num_births or third.event - second.event != second.event - first.event:
        return False
    if not first.elsewhere == second.elsewhere == third.elsewhere:
        return False
    if second.counted - first.counted != third.counted - second.counted:
        return False
    of_storages = (timeline.fixed, timeline.categories, timeline.operators, timeline.modules)
    if any(values[first.birth : second.birth] != values[second.birth : third.birth] for values in of_storages):
        return False
    one, other = (timeline.events[a.event : b.event] for a, b in pairwise(places))
    if [storage + num_births for storage in one] != other or min(other, default=first.birth) < first.birth:
        return False
    num_events = Counter(timeline.events[first.event : third.event])
    return all(num_events[storage] == 2 for storage in range(first.birth, second.birth))


def write(timeline: TimelineBuilder, places: Sequence[BetweenSlices], times: int) -> int:
    """Write the last slice's recording `times` times more, and return by how much the numbers of live storages have
    moved."""
    _, second, third = places
    num_births = third.birth - second.birth
    for values in (timeline.fixed, timeline.per_sample, timeline.categories, timeline.operators, timeline.modules):
        values += values[second.birth : third.birth] * times
    said = timeline.events[second.event : third.event]
    timeline.events += [storage + i * num_births for i in range(1, times + 1) for storage in said]
    return times * num_births
