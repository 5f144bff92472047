"""A plan in a few lines."""

from dataclasses import replace
from typing import Any

import pytest

from frugal.config.schema import understand
from frugal.dryrun.planner import make_plan
from frugal.planning.plan import Plan
from frugal.planning.verdict import bar
from frugal.units import format_bytes
from tests.planning.synthetic import dry_running, planned


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(*understand({"gpus": 4, "mem": "12G", "global_batch": 64}), dry_run=dry_running())


def test_a_printed_plan_ends_with_the_verdict_in_a_few_lines(plan: Plan) -> None:
    lines = str(plan).splitlines()
    assert len(lines) == 6
    assert lines[0] == plan.arithmetic
    assert format_bytes(plan.memory.total_bytes) in str(plan) and str(plan.strategy) in str(plan)


def test_notes_come_before_the_verdict(plan: Plan) -> None:
    lines = str(replace(plan, warnings=("a", "b"))).splitlines()
    assert lines[:4] == ["note   a", "note   b", "", plan.arithmetic]
    assert lines[4].startswith("runs   ")


@pytest.mark.parametrize("width", [20, 73, 113])
def test_the_bar_is_as_wide_as_asked_and_true_to_a_column(plan: Plan, width: int) -> None:
    device = plan.cluster.devices[0].memory_bytes
    drawn = bar(plan.memory, device, width)
    assert sum(share for _, share in drawn) == width
    assert sum(part.size_bytes for part, _ in drawn) == device
    assert all(abs(share - part.size_bytes / device * width) < 1 for part, share in drawn)


def test_no_part_of_the_bar_is_told_by_its_colour_alone(plan: Plan) -> None:
    parts = [part for part, _ in bar(plan.memory, plan.device_bytes, 80)]
    assert len({part.letter for part in parts}) == len(parts)
    assert {part.name for part in parts} == {*plan.memory.CATEGORIES, "headroom", "margin"}


PARTS = {"drafts": True, "num_matrices": 200}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpus": 4, "mem": "24G", "sequence_parallel": 2, "model": {"can_be_split": True}}, "over 2 ranks"),
        (
            {"gpus": 4, "mem": "8G", "zero_stage": 3, "offload": "optimizer:0.5", "model": PARTS},
            "50 % of the optimizer",
        ),
        ({"gpus": 4, "mem": "24G", "mlp": "tiled", "model": {"mlp_bytes_per_token": 1000}}, "tiled MLP"),
    ],
)
def test_a_printed_plan_names_what_the_strategy_is(settings: dict[str, Any], words: str) -> None:
    made = planned(**settings)
    assert words in str(made) and made.arithmetic in str(made)


def test_a_notebook_shows_what_a_model_is_called_and_runs_none_of_it(plan: Plan) -> None:
    hostile = replace(plan, warnings=('<script>alert("x")</script>',))
    assert "<script" not in hostile._repr_html_() and "&lt;script&gt;" in hostile._repr_html_()
