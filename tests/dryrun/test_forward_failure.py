"""A forward that fails is told as what it is: the user's to mend, or a bug of ours."""

from collections.abc import Callable
from typing import Any

import pytest
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


def failure(build: Callable[[], nn.Module]) -> Exception:
    with pytest.raises(Exception) as caught:
        dry_run_of(plan_for(1, 4, 1, 0, "fp32", "off"), build)
    return caught.value


def line_of(body: Callable[..., Any]) -> int:
    return body.__code__.co_firstlineno + 1


INPUTS = (
    "\n\nhint: if it takes or returns something else, give a factory that returns (module, objective), for example "
    "frugal.models.objectives.SummedLoss(loss, example=...)"
)
VALUES = "\n\nhint: a dry run knows shapes, not values: tensors that depend on values must come with the batch"


@pytest.mark.parametrize(
    ("build", "because", "hint"),
    [
        (
            lambda: NeedsPictures(no_logits),
            ["TypeError: NeedsPictures.forward() missing 1 required positional argument: 'pixel_values'"],
            INPUTS,
        ),
        (lambda: Model(no_logits), ["AttributeError: 'Tensor' object has no attribute 'logits'"], INPUTS),
        (
            lambda: Model(wrong_shapes),
            [
                "RuntimeError: Expected size for first two dimensions of batch2 tensor to be: [4, 8] but got: [4, 64].",
                f"test_forward_failure.py, line {line_of(wrong_shapes)}, runs `return x @ x`",
            ],
            INPUTS,
        ),
        (
            lambda: Model(repeats_by_value),
            [
                "RuntimeError: cannot repeat_interleave a meta tensor without output_size",
                f"test_forward_failure.py, line {line_of(repeats_by_value)}, runs "
                "`return x.repeat_interleave(x.sum((1, 2)).long(), 0)`",
            ],
            VALUES,
        ),
    ],
    ids=["other inputs", "other outputs", "wrong shapes", "values"],
)
def test_a_failing_forward_is_told_with_its_line(build: Callable[[], nn.Module], because: list[str], hint: str) -> None:
    told = failure_in_forward("mine.py:model", failure(build))
    lines = "".join(f"\n  because {line}" for line in because)
    assert str(told) == f"the forward of mine.py:model fails in a dry run{lines}{hint}"


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder.operators, "stand_in", None)
    error = failure(lambda: Model(lambda x: x[x > 0]))
    assert str(error) == "'NoneType' object is not callable"
    assert failure_in_forward("mine.py:model", error) is None
