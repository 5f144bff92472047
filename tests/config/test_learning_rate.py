"""The learning rate follows the global batch where a reference is named, and nothing else."""

from typing import Any

import pytest

from frugal.config.request import Request
from frugal.deepspeed_adapter.json_config import deepspeed_config
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.planning.report import summary
from tests.planning.synthetic import planned


def plan(**settings: Any) -> Plan:
    asked: dict[str, Any] = {"gpus": 4, "mem": "24G"}
    return planned(**(asked | settings))


def test_without_a_reference_the_rate_is_the_one_given() -> None:
    assert Request(global_batch=8192).scaled_learning_rate == Request().learning_rate


def test_the_number_of_gpus_changes_no_rate() -> None:
    settings: dict[str, Any] = {"global_batch": 512, "optimizer": "adamw,reference-batch=256,lr-rule=sqrt"}
    rates = {
        deepspeed_config(plan(gpus=gpus, **more, **settings))["optimizer"]["params"]["lr"]
        for gpus in (1, 2, 3, 8)
        for more in ({}, {"micro_batch": 1})
    }
    assert rates == {3e-4 * 2**0.5}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"optimizer": "adamw,reference-batch=256,lr-rule=sqrt"},
         "adamw, learning rate 0.000424264 = 0.0003 x sqrt(512/256) (sqrt rule, from 256 samples)"),
        ({"optimizer": {"name": "sgd", "reference_batch": 256, "lr_rule": "linear"}},
         "sgd, learning rate 0.0006 = 0.0003 x 512/256 (linear rule, from 256 samples)"),
        ({"optimizer": {"lr-rule": "sqrt", "reference-batch": 2**18}, "global_tokens": 2**20},
         "adamw, learning rate 0.0006 = 0.0003 x sqrt(1048576/262144) (sqrt rule, from 262144 tokens)"),
    ],
)  # fmt: skip
def test_the_plan_states_the_arithmetic(settings: dict[str, Any], line: str) -> None:
    made = plan(**settings)
    assert line in summary(made)
    assert made.warnings == (), "the rule is the one for this optimizer"
    config = deepspeed_config(made)
    assert config["optimizer"]["params"]["lr"] == made.request.scaled_learning_rate


def test_a_rule_that_does_not_fit_the_optimizer_is_noted() -> None:
    for rule, optimizer, said in (
        ("linear", "adamw", "optimizer.lr-rule sqrt (Malladi et al. 2022) the learning rate would be 0.0006"),
        ("sqrt", "sgd", "optimizer.lr-rule linear (Goyal et al. 2017) the learning rate would be 0.0012"),
    ):
        (note,) = plan(optimizer=f"{optimizer},reference-batch=128,lr-rule={rule}").warnings
        assert note == f"the {rule} rule is not made for {optimizer}: with {said}"
    assert plan(optimizer="adamw,reference-batch=512,lr-rule=linear").warnings == (), "nothing is scaled"


@pytest.mark.parametrize(
    ("settings", "what", "hint"),
    [
        ({"optimizer": "adamw,reference-batch=256"}, "`reference-batch` 256 was given without `lr-rule`", "=sqrt,"),
        ({"optimizer": "sgd,reference-batch=256"}, "`reference-batch` 256 was given without", "=linear,"),
        ({"optimizer": "adamw,lr-rule=linear"}, "`lr-rule` linear was given without", "optimizer.reference-batch=N"),
        ({"optimizer": "adamw,reference-batch=256,lr-rule=sqrt", "global_tokens": 2**20},
         "`reference-batch` 256 is less than one sample", "262144"),
        ({"optimizer": "adamw,reference-batch=0,lr-rule=sqrt"}, "`reference-batch` of --optimizer is 0", "None"),
    ],
)  # fmt: skip
def test_half_of_a_rule_is_refused(settings: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan(**settings)
    assert caught.value.what.startswith(what) and hint in str(caught.value.hint)
