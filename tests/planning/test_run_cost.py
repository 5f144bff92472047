"""Tokens a second, the share of the peak, and the time of a run follow from the seconds of a step."""

from math import ceil, inf, nan
from typing import Any

import pytest

from frugal.config.hardware.cluster import CARDS
from frugal.errors import RequestError
from frugal.planning.plan import Plan, RunCost
from frugal.planning.what_if import grid, parse_axes, predicted, what_if_table
from tests.planning.synthetic import SMALL, dry_running, planned

MODEL = SMALL | {"flops_per_token": 8e8, "drafts": True}


def plan(**asked: Any) -> Plan:
    return planned(**{"gpus": 4, "global_batch": 512, "model": MODEL, **asked})


def rate(made: Plan) -> str:
    return dict(made.verdict)["rate"]


def test_the_share_of_the_peak_is_of_all_cards_in_the_plans_precision() -> None:
    made = plan(gpu="a100-40g,a100-40g,rtx3090-24g,rtx3090-24g")
    tokens_per_second = 512 * 1024 / made.time.total_seconds
    share = 8e8 * tokens_per_second / (2 * 312e12 + 2 * 71e12)
    assert rate(made) == (
        f"{tokens_per_second:,.0f} tokens/s, {tokens_per_second / 4:,.0f} a GPU, MFU {100 * share:.1f} % "
        "(predicted: 0.8 GFLOP a token, peak 2 x 312 + 2 x 71 TFLOP/s)"
    )
    assert f"peak 4 x {CARDS['a100-40g'].fp32_flops / 1e12:g} TFLOP/s" in rate(plan(gpu="a100-40g", precision="fp32"))


@pytest.mark.parametrize("asked", [{"mem": "12G"}, {"device": "cpu", "mem": "12G"}])
def test_where_no_peak_is_known_there_is_no_share_of_it(asked: dict[str, Any]) -> None:
    assert rate(plan(**asked)).endswith("(predicted)") and "MFU" not in rate(plan(**asked))


def test_tokens_of_short_samples_are_those_of_the_data() -> None:
    made = plan(gpu="a100-40g", lengths=[100] * 50 + [300] * 50)
    assert made.step_tokens == 512 * 200
    assert rate(made).startswith(f"{512 * 200 / made.time.total_seconds:,.0f} tokens/s")


def test_a_batch_asked_in_tokens_is_answered_in_tokens() -> None:
    made = plan(gpu="a100-40g", global_batch=None, global_tokens=4_000_000, micro_batch=31)
    assert made.arithmetic == (
        "3,999,744 of 4,000,000 tokens: 3906 samples of 1024 = 4 GPUs x 32 micro-steps of 30 or 31 samples "
        "(at most 31,744 tokens)"
    )
    made = plan(gpu="a100-40g", global_batch=None, global_tokens=2**22, micro_batch=32)
    assert made.arithmetic == (
        "4,194,304 tokens: 4096 samples of 1024 = 4 GPUs x micro-batch 32 (32,768 tokens) x 32 accumulation steps"
    )


def test_a_run_is_its_steps() -> None:
    run = RunCost(length_steps=1000, gpu_hour_price=2.5, step_seconds=3.6, step_tokens=524_288, num_devices=4)
    assert str(run) == "1000 steps of 524,288 tokens, 524.29M in all: 1 h 00 min, 4 GPU hours, cost 10.00 (predicted)"
    assert str(RunCost(length_tokens=2 * 10**9, step_seconds=3.6, step_tokens=2**20, num_devices=4)) == (
        "1908 steps of 1,048,576 tokens, 2.00B in all: 1 h 54 min, 7.63 GPU hours (predicted)"
    )


def test_a_plan_answers_what_a_run_costs() -> None:
    made = plan(mem="12G", lengths=[100] * 5000 + [300] * 5000)
    run = made.cost(epochs=1.5, gpu_hour_price=3)
    assert run.steps == ceil(15_000 / 512)
    assert run.seconds == run.steps * made.time.total_seconds
    assert run.device_hours == pytest.approx(run.seconds / 900)
    assert run.cost == pytest.approx(3 * run.device_hours)
    assert made.cost(train_tokens=run.tokens).steps == made.cost(steps=run.steps).steps == run.steps


@pytest.mark.parametrize(
    ("length", "problem"),
    [
        ({}, "the length of a run is not known"),
        ({"gpu_hour_price": 2.0}, "the length of a run is not known"),
        ({"steps": 10, "train_tokens": 10}, "--steps and --train-tokens were both given"),
        ({"train_tokens": 0}, "--train-tokens is 0"),
        *(({"steps": 1, "gpu_hour_price": price}, f"--gpu-hour-price is {price}") for price in (-2.5, inf, nan)),
        ({"epochs": 1}, "--epochs was given without --data"),
    ],
)
def test_a_run_of_no_length_or_price_is_refused(length: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan(mem="12G").cost(**length)
    assert refused.value.what == problem


def test_the_table_of_what_if_has_the_time_and_the_cost_of_the_run() -> None:
    made = plan(mem="12G")
    axes = parse_axes(["gpus=4,8", "mem=12G", "seq-len=1k"])
    cases = grid(made, axes)
    found = predicted(list(cases.values()), dry_running(**MODEL))
    run = made.cost(train_tokens=10**9, gpu_hour_price=2.0)
    text = "\n".join(what_if_table(made, axes, dict(zip(cases, found, strict=True)), run))
    for candidate, num_gpus in zip(found, (4, 8), strict=True):
        assert candidate is not None
        hours = 1908 * candidate.seconds / 3600
        assert f"cost {hours * num_gpus * 2:,.2f}" in text
    assert "after a comma the time of the run" in text
