"""Learning rates rise to their peak and fall from it."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from transformers import SchedulerType

from frugal.config.learning_rate import Curve, Schedule, ScheduleName
from frugal.config.other_names import answer


def curve(total_steps: int, **changes: Any) -> Curve:
    return replace(Curve(peak=0.1, schedule="linear", warmup_steps=0, total_steps=total_steps), **changes)


def test_a_longer_run_says_what_becomes_of_the_rate() -> None:
    assert curve(80).change_from(curve(40), 20) == (
        "learning rate of step 21 0.05 -> 0.075 (linear over 40 steps -> linear over 80 steps)"
    )


def test_a_shorter_run_can_keep_the_curve_and_is_told_how() -> None:
    assert curve(40).change_from(curve(80, peak=0.2), 20) == (
        "learning rate of step 21 0.15 -> 0.05 (linear over 80 steps -> linear over 40 steps; --set schedule.steps=80 "
        "keeps it)"
    )


def test_another_schedule_or_warmup_is_said_and_a_constant_rate_has_no_length() -> None:
    warm = curve(40, schedule="constant", warmup_steps=4)
    assert warm.change_from(curve(40), 1) == (
        "learning rate of step 2 0.0975 -> 0.05 (linear over 40 steps -> constant with 4 of warmup)"
    )
    assert warm.change_from(curve(80, schedule="constant", warmup_steps=4), 20) is None


def rates(schedule: Any, warmup_steps: int, total_steps: int) -> list[float]:
    made = curve(total_steps, schedule=schedule, warmup_steps=warmup_steps)
    return [made.factor(step) for step in range(total_steps)]


def transformers_rates(schedule: str, steps: int, *, warmup: int, **options: Any) -> list[float]:
    """The rate of each step by transformers' own scheduler, whose peak is 1."""
    import torch
    import transformers

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = transformers.get_scheduler(schedule, optimizer, warmup, steps, scheduler_specific_kwargs=options)
    taken = []
    for _ in range(steps):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return taken


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("schedule", "asked", "theirs"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_min_lr", {"min_lr_ratio": 0.1}, {"min_lr_rate": 0.1}),
        ("constant_with_warmup", {}, {}),
        ("polynomial", {"power": 2.0, "min_lr_ratio": 0.1}, {"power": 2.0, "lr_end": 0.1}),
        ("inverse_sqrt", {}, {}),
        (
            "warmup_stable_decay",
            {"decay_ratio": 0.25, "min_lr_ratio": 0.1},
            {"num_decay_steps": 10, "min_lr_ratio": 0.1},
        ),
        ("warmup_stable_decay", {}, {"num_decay_steps": 4}),
    ],
)
def test_schedules_are_transformers_step_by_step_but_for_a_warmup_that_wastes_no_step(
    schedule: Any, asked: dict[str, Any], theirs: dict[str, Any], warmup: int
) -> None:
    steps = 40
    made = Schedule(name=schedule, **asked).curve(1.0, steps, str(warmup))
    expected = transformers_rates(schedule, steps, warmup=warmup, **theirs)
    for step in range(warmup, steps):
        assert made.factor(step) == pytest.approx(expected[step], rel=1e-12, abs=1e-12), step
    for step in range(warmup):
        assert made.factor(step) == pytest.approx(expected[step + 1], rel=1e-12), step


def test_constant_is_constant_with_warmup_where_there_is_one() -> None:
    assert rates("constant", 3, 9) == rates("constant_with_warmup", 3, 9)


def test_a_part_of_the_schedule_is_its_warmup() -> None:
    linear = Schedule(name="linear")
    assert [linear.curve(1.0, steps, "3%").warmup_steps for steps in (10, 100, 1000)] == [1, 3, 30]
    assert Schedule(steps=2000).curve(1.0, 100, "3%").warmup_steps == 60


def test_what_a_schedule_is_is_said_in_words() -> None:
    schedule = Schedule(name="warmup_stable_decay", min_lr_ratio=0.1)
    assert str(schedule.curve(1.0, 100, "5")) == (
        "warmup_stable_decay over 100 steps down to 0.1 of its peak with 5 of warmup and 10 of decay"
    )
    powered = Schedule(name="polynomial", power=2.0)
    assert str(powered.curve(1.0, 100, "0")) == "polynomial of power 2 over 100 steps"


def test_warmup_rises_evenly_to_the_peak_and_wastes_no_step() -> None:
    assert rates("constant", 4, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_from_the_peak_and_never_reach_zero_in_a_step() -> None:
    assert rates("linear", 0, 4) == [1.0, 0.75, 0.5, 0.25]
    assert rates("cosine", 1, 5) == pytest.approx([1.0, 1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert all(rate > 0 for rate in rates("cosine", 3, 200))


def test_steps_beyond_the_end_keep_the_last_value() -> None:
    assert curve(5, schedule="cosine").factor(9) == 0.0


def test_a_schedule_of_other_trainers_is_answered_with_one_of_ours() -> None:
    ours = get_args(ScheduleName)
    hints = {}
    for name in [*ours, *(each.value for each in SchedulerType), "wsd", "rex", "one_cycle"]:
        error = answer("lr_scheduler_type", name, name)
        assert error is not None and error.hint is not None
        hints[name] = error.hint.removeprefix("--schedule ")
    assert all(hints[name] == name for name in ours) and hints["wsd"] == "warmup_stable_decay"
    assert set(hints.values()) == set(ours)
