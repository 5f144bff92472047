"""cuBLAS's workspaces begin with the first product of forward and of backward, and never end."""

import pytest

from frugal.planning.memory.timeline import BACKWARD, FORWARD, INITIALISATION, Timeline, TimelineBuilder
from frugal.planning.memory.workspaces import OPERATOR, with_workspaces, workspace_bytes
from frugal.units import MIB


def two_steps() -> Timeline:
    """Two steps of a product in forward and one in backward, after a cache that is emptied."""
    builder = TimelineBuilder()
    builder.phase(INITIALISATION)
    builder.born(100, 0, "to device")
    builder.empty_cache()
    for _ in range(2):
        builder.phase(FORWARD)
        builder.born(10, 3, "aten.embedding.default")
        product = builder.born(20, 3, "aten.addmm.default")
        builder.phase(BACKWARD)
        builder.born(10, 3, "aten.mul.Tensor")
        builder.born(30, 6, "aten.mm.default")
        builder.events.append(product)
    return builder.timeline()


def test_a_workspace_follows_the_first_product_of_each_thread_and_stays() -> None:
    plain, timeline = two_steps(), with_workspaces(two_steps(), 1000)
    names = [timeline.names[timeline.operators[each]] for each in timeline.events]
    assert names[:7] == [
        "to device", "aten.embedding.default", "aten.addmm.default", OPERATOR, "aten.mul.Tensor", "aten.mm.default",
        OPERATOR,
    ]  # fmt: skip
    assert names.count(OPERATOR) == 2
    assert timeline.empties == plain.empties == (1,)
    assert [(phase.phase, phase.live_bytes) for phase in timeline.intervals(1)] == [
        (phase.phase, phase.live_bytes + (0 if number == 0 else 1000 if number == 1 else 2000))
        for number, phase in enumerate(plain.intervals(1))
    ]


def test_a_step_without_products_has_none() -> None:
    builder = TimelineBuilder()
    builder.phase(FORWARD)
    builder.born(10, 3, "aten.mul.Tensor")
    assert with_workspaces(builder.timeline(), 1000) == builder.timeline()


@pytest.mark.parametrize(
    ("capability", "size_bytes"),
    [((7, 5), 8_519_680), ((8, 0), 8_519_680), ((8, 9), 8_519_680), ((9, 0), 32 * MIB), ((12, 0), 32 * MIB)],
)
def test_hopper_and_blackwell_have_32_mib(capability: tuple[int, int], size_bytes: int) -> None:
    assert workspace_bytes(capability) == size_bytes
