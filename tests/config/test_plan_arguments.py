"""The keyword arguments of `frugal.plan`."""

import inspect

import pytest

import frugal
from frugal.config import plan_arguments
from frugal.config.schema import PLAN_SETTINGS
from frugal.errors import RequestError


def test_a_notebook_completes_every_setting() -> None:
    parameters = inspect.signature(frugal.plan).parameters
    assert set(parameters) == {"objective", *PLAN_SETTINGS}
    assert parameters["seq_len"].default == PLAN_SETTINGS["seq_len"].default


def test_lr_is_the_learning_rate() -> None:
    assert plan_arguments.in_full({"lr": 0.1, "gpus": 1}) == {"learning_rate": 0.1, "gpus": 1}


def test_a_number_without_a_unit_is_no_memory() -> None:
    with pytest.raises(RequestError) as raised:
        frugal.plan(model="gpt2", gpus=4, mem=12)
    assert str(raised.value) == (
        '12 is an amount of memory in bytes, and hardly meant so\n\nhint: write it with its unit: "12G"'
    )
