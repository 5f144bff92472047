"""The bounds of a plan's memory, and that measurements lie within them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frugal.config.hardware.cluster import CARDS, Device
from frugal.config.schema import understand
from frugal.dryrun.compare import interval
from frugal.planning.memory.breakdown import Bounds, Cause, of_device, of_tensors, widened
from frugal.planning.plan import Plan
from frugal.planning.report import beyond_the_device
from frugal.units import GIB, MIB
from tests.dryrun.test_measured import read
from tests.planning.test_plan import made

RECORDS = sorted((Path(__file__).parents[1] / "measured").glob("*.json"))


def device(**settings: Any) -> Device:
    return understand({"gpus": 1, "gpu": "rtx3060-12g", **settings})[1].devices[0]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_measurement_is_within_the_bounds(path: Path) -> None:
    record = read(path)
    (card, *_) = record.cluster.devices
    bounds = interval(record.predicted, card, [])
    assert bounds.lower_bytes <= record.measured.peak_allocated_bytes + card.context_bytes <= bounds.upper_bytes


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("gpus", [1, 8])
def test_what_fills_a_device_has_an_upper_bound_that_fits_it(card: str, gpus: int) -> None:
    full = device(gpus=gpus, gpu=card, precision="fp32")
    bounds = of_device(full.usable_bytes - MIB, full.usable_bytes, full)
    assert 0.97 * full.memory_bytes < bounds.upper_bytes <= full.memory_bytes


def test_what_fills_a_card_of_which_only_the_memory_is_known_leaves_room_for_what_its_driver_reports_less() -> None:
    full = understand({"gpus": 4, "mem": "12G"})[1].devices[0]
    bounds = of_device(full.usable_bytes, full.usable_bytes, full)
    assert bounds.upper_bytes <= CARDS["rtx3060-12g"].memory_bytes


def test_live_tensors_bound_what_the_allocator_may_need_less() -> None:
    tight = of_tensors(GIB, GIB + MIB, on_cpu=False, is_known_card=True)["allocator"]
    loose = of_tensors(GIB, 2 * GIB, on_cpu=False, is_known_card=True)["allocator"]
    assert tight.below_bytes == MIB < tight.above_bytes
    assert loose.below_bytes == loose.above_bytes < GIB


def test_a_card_that_is_not_named_has_wider_bounds() -> None:
    known, unknown = (
        Bounds.around(10 * GIB, of_tensors(9 * GIB, 10 * GIB, on_cpu=False, is_known_card=known))
        for known in (True, False)
    )
    assert unknown.lower_bytes < known.lower_bytes < 10 * GIB < known.upper_bytes < unknown.upper_bytes


def test_a_measured_context_narrows_the_bounds() -> None:
    assumed = device()
    measured = replace(assumed, context_below_bytes=0, context_above_bytes=64 * MIB)
    wide, narrow = (of_device(GIB, GIB, each) for each in (assumed, measured))
    assert wide.lower_bytes < narrow.lower_bytes < narrow.upper_bytes < wide.upper_bytes


def test_what_depends_on_data_widens_them() -> None:
    bounds = of_device(4 * GIB, 4 * GIB, device())
    total = 4 * GIB + device().context_bytes
    wider = widened(bounds, total, GIB, ["a mask selects"])
    assert wider.lower_bytes == bounds.lower_bytes - GIB
    assert wider.upper_bytes == bounds.upper_bytes + GIB // 20
    assert wider.causes["data"] == Cause(below_bytes=GIB, above_bytes=int(0.05 * GIB))
    assert widened(bounds, total, GIB, []) == bounds


def test_a_plan_keeps_its_bounds_and_its_total_lies_between() -> None:
    plan = made()
    total = plan.memory.total_bytes
    bounds = Bounds.around(total, {"context": Cause(below_bytes=MIB, above_bytes=2 * MIB)})
    again = Plan.from_json(replace(plan, memory=replace(plan.memory, interval=bounds)).sealed().to_json())
    assert again.memory.interval == bounds
    assert json.loads(again.to_json())["memory"]["interval"]["upper_bytes"] == total + 2 * MIB
    with pytest.raises(AssertionError, match="outside of its interval"):
        replace(plan.memory, interval=replace(bounds, upper_bytes=total - 1))


def test_a_plan_says_where_other_data_may_take_more_than_there_is() -> None:
    plan = made()
    card = plan.cluster.devices[0]
    room = plan.memory.usable_bytes + card.context_bytes + card.margin_bytes
    above = room - plan.memory.total_bytes
    enough, too_much = (
        replace(
            plan.memory,
            interval=Bounds.around(plan.memory.total_bytes, {"data": Cause(below_bytes=0, above_bytes=above + more)}),
        )
        for more in (0, 1)
    )
    assert beyond_the_device(enough, card) == []
    assert len(beyond_the_device(too_much, card)) == 1
