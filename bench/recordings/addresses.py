"""`python -m bench.recordings.addresses SNAPSHOT...`: does a card's driver put segments where frugal's model does?

The segments that were made and given back while a snapshot was recorded are placed anew by `segment_address`. Each new
one is compared with those of its pool that there were: does it lie above or below, as on the card? That is all of an
address that matters to torch's allocator. Beside it the same for a driver that goes from the highest address down, and
for one that goes from the lowest up. What else the process had mapped is not known: at the start what lies between
reservations, and beyond them, counts as taken. Expandable segments have no order: each pool is one range of addresses,
mapped from its lowest on.
"""

import sys
from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.caching_allocator import segment_address
from bench.recordings.snapshot import SMALL_SEGMENT, SnapshotError, opened, segments_before
from frugal.planning.memory.caching_allocator import ENDLESS, RESERVATION, SEGMENT_ROUNDING

RULES = {"as planned": RESERVATION, "down": SEGMENT_ROUNDING, "up": ENDLESS}
"""Bytes of a reservation. One of a segment's own rounding leaves no room to others, so segments go down."""

Pairs = tuple[int, int]
"""How many pairs of segments lie in the card's order, and how many there were."""


def compared(path: Path) -> dict[str, Pairs]:
    """Return the pairs of a new segment and an older one of its pool, by rule.

    Raises:
        SnapshotError: it is no snapshot, with the reason.
    """
    with opened(path) as (history, segments, is_expandable):
        start = segments_before(history, segments)
        changes = [] if is_expandable else [each for each in history if each["action"].startswith("segment_")]
        return {rule: _pairs(changes, start, reservation) for rule, reservation in RULES.items()}


def _pairs(changes: list[dict[str, Any]], start: dict[int, int], reservation: int) -> Pairs:
    """Place the new segments. `start`: bytes of the segments that there were, by address."""
    sizes = dict(start)
    places = {address: address for address in start}  # by the card's address
    taken = sorted([*_unknown(start, reservation), *((address, address + size) for address, size in start.items())])
    same = number = 0
    for change in changes:
        address, size = change["addr"], change["size"]
        if change["action"] == "segment_free":
            place = places.pop(address)
            taken.remove((place, place + sizes.pop(address)))
            continue
        place = segment_address(taken, size, reservation)
        for other, placed in places.items():
            if (sizes[other] == SMALL_SEGMENT) == (size == SMALL_SEGMENT):
                number += 1
                same += (place < placed) == (address < other)
        places[address], sizes[address] = place, size
        insort(taken, (place, place + size))
    return same, number


def _unknown(start: dict[int, int], reservation: int) -> Iterator[tuple[int, int]]:
    """Yield what may not be free at the start: between reservations, and beyond them where none is to go."""
    touched = [(_down(address), -_down(-address - size)) for address, size in sorted(start.items())]
    for (_, end), (following, _) in pairwise(touched):
        if end < following:
            yield end, following
    if touched:
        yield (0, touched[0][0]) if reservation == ENDLESS else (touched[-1][1], ENDLESS)


def _down(address: int) -> int:
    return address // RESERVATION * RESERVATION


def main(paths: Sequence[str]) -> int:
    """Print a line for each snapshot with such pairs, and one of all."""
    everything = dict.fromkeys(RULES, (0, 0))
    for path in paths:
        try:
            found = compared(Path(path))
        except (SnapshotError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(f"{_line(found)}  {path}", flush=True)
        for rule, (same, number) in found.items():
            everything[rule] = everything[rule][0] + same, everything[rule][1] + number
    print(f"{_line(everything)}  all")
    return 0


def _line(found: dict[str, Pairs]) -> str:
    """Return the number of pairs, and the share that each rule puts in the card's order."""
    shares = (f"{rule} {same / number:7.2%}" for rule, (same, number) in found.items() if number)
    return "  ".join((f"{found['up'][1]:>7} pairs", *shares))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
