"""Which ranks may be the fullest, so that not all of them need to be rehearsed. No torch here.

ZeRO-1 and 2 lay all gradients end to end and cut the row into equal parts (stage_1_and_2.py), through parameters.
Until the step a rank keeps the whole gradient of every parameter that its part touches, so the one whose part
touches most is the fullest; unless the last, whose gradients come first, while most activations still live, or one
in between. On three to five ranks the first and the last alone were up to 4 % low, where the cuts go through large
parameters. The other stages treat all ranks alike.

Left out: the padding at the end of the row, a few bytes.
"""

from collections.abc import Sequence


def touched_elements(parameters: Sequence[int], world_size: int) -> list[int]:
    """Gradient elements that each rank keeps, for trainable parameters of so many elements, in the model's order."""
    part = -(-sum(parameters) // world_size)
    touched = [0] * world_size
    start = 0
    for elements in parameters:
        if elements:
            for rank in range(start // part, (start + elements - 1) // part + 1):
                touched[rank] += elements
        start += elements
    return touched


def likely_fullest(parameters: Sequence[int], world_size: int, most: int) -> tuple[int, ...]:
    """At most `most` ranks under ZeRO-1 or 2, in order: the last, those that touch most and, if there is room, the
    first."""
    last = world_size - 1
    touched = touched_elements(parameters, world_size)
    by_size = sorted(range(last), key=lambda rank: (-touched[rank], rank))
    wanted = [last, *by_size] if most < 3 else [last, 0, *(rank for rank in by_size if rank)]
    return tuple(sorted(wanted[:most]))
