"""A forward that fails is told as what it is: the user's to mend, or a bug of ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frugal.dryrun.run import failure_in_forward
from frugal.dryrun.trace import recorder
from tests.dryrun.test_truth import dry_run_of, plan_for


class Model(nn.Module):
    """Whatever `body` does with the tokens."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.body = body

    def forward(self, input_ids: Tensor) -> Any:
        return self.body(self.embedding(input_ids))


class NeedsPictures(Model):
    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:  # type: ignore[override]  # that is the mistake
        return self.body(self.embedding(input_ids) + pixel_values)


def no_logits(x: Tensor) -> Tensor:
    return x


def repeats_by_value(x: Tensor) -> Any:
    return x.repeat_interleave(x.sum((1, 2)).long(), 0)


def wrong_shapes(x: Tensor) -> Any:
    return x @ x


def two_types(x: Tensor) -> Any:
    return x.half() @ x.transpose(1, 2)


def two_types_of_images(x: Tensor) -> Any:
    return IMAGES(x[:, None].half())


IMAGES = nn.Conv2d(1, 1, 1, device="meta")


def two_types_in_time(x: Tensor) -> Any:
    return RECURRENT(x.half())


RECURRENT = nn.LSTM(8, 8, device="meta")


def two_devices(x: Tensor) -> Any:
    return x + ON_THE_HOST


def refuses(x: Tensor) -> Any:
    raise ValueError("tokens must be padded to a multiple of 4096")


ON_THE_HOST = torch.ones(8)


def failure(build: Callable[[], nn.Module]) -> Exception:
    with pytest.raises(Exception) as caught:
        dry_run_of(plan_for(1, 4, 1, 0, "fp32", "off"), build)
    return caught.value


INPUTS = "hint: if it takes or returns something else, give a factory that returns (module, objective), for example"
TYPES = "hint: give numbers that are multiplied with weights as floating-point numbers, and cast them to the type"
DEVICES = (
    "hint: a model moves its parameters and buffers alone: keep other tensors with self.register_buffer(name, tensor)"
)
REFUSES = "hint: the model's own code refuses this: change what it names with --seq-len or in its config.json; if"
VALUES = "hint: a dry run knows shapes, not values: tensors that depend on values must come with the batch"


def where(body: Callable[..., Any], line: str) -> str:
    return f"test_forward_failure.py, line {body.__code__.co_firstlineno + 1}, runs `{line}`"


@pytest.mark.parametrize(
    ("build", "because", "hint"),
    [
        (lambda: NeedsPictures(no_logits), "forward() missing 1 required positional argument: 'pixel_values'", INPUTS),
        (lambda: Model(no_logits), "AttributeError: 'Tensor' object has no attribute 'logits'", INPUTS),
        (lambda: Model(wrong_shapes), where(wrong_shapes, "return x @ x"), INPUTS),
        (lambda: Model(repeats_by_value),
         where(repeats_by_value, "return x.repeat_interleave(x.sum((1, 2)).long(), 0)"), VALUES),
        (lambda: Model(two_types), where(two_types, "return x.half() @ x.transpose(1, 2)"), TYPES),
        (lambda: Model(two_types_of_images), where(two_types_of_images, "return IMAGES(x[:, None].half())"), TYPES),
        (lambda: Model(two_types_in_time), where(two_types_in_time, "return RECURRENT(x.half())"), TYPES),
        (lambda: Model(two_devices), where(two_devices, "return x + ON_THE_HOST"), DEVICES),
        (lambda: Model(refuses),
         where(refuses, 'raise ValueError("tokens must be padded to a multiple of 4096")'), REFUSES),
    ],
    ids=["other inputs", "other outputs", "wrong shapes", "values", "two types", "two types of images",
         "two types in time", "two devices", "a check of its own"],
)  # fmt: skip
def test_a_failing_forward_is_told_with_its_line(build: Callable[[], nn.Module], because: str, hint: str) -> None:
    told = str(failure_in_forward("mine.py:model", failure(build)))
    assert told.startswith("the forward of mine.py:model fails in a dry run\n  because ")
    assert f"{because}\n\n{hint}" in told


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder.operators, "STAND_INS", None)
    error = failure(lambda: Model(lambda x: x[x > 0]))
    assert str(error) == "argument of type 'NoneType' is not iterable"
    assert failure_in_forward("mine.py:model", error) is None
