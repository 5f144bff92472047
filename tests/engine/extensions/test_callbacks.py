"""Callbacks hear of steps, evaluations and complete checkpoints, and what they raise is the user's."""

from pathlib import Path
from typing import Any

import pytest

from bench.ranks import Ranks
from frugal.checkpoint import manifest
from frugal.checkpoint.progress import Progress
from frugal.checkpoint.saving import Saver
from frugal.engine.extensions.callbacks import Callbacks
from frugal.errors import RequestError
from tests.engine.engines import plan_here, running
from tests.engine.small_models import ragged_samples


class Diary:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def on_step(self, engine: Any, step: int, result: Any) -> None:
        self.lines.append(("step", step, result.targets, engine.deepspeed.global_steps))

    def on_evaluation(self, engine: Any, step: int, evaluation: Any) -> None:
        self.lines.append(("evaluation", step, evaluation.samples))

    def on_save(self, engine: Any, step: int, folder: Path) -> None:
        is_newest = manifest.newest_checkpoint(folder.parent) == folder
        self.lines.append(("save", step, manifest.read(folder).step, is_newest))


class Failing:
    def on_save(self, engine: Any, step: int, folder: Path) -> None:
        raise ValueError("no room on the shelf\nsecond line")


def told(folder: Path) -> tuple[list[tuple[Any, ...]], str]:
    """Return what a callback hears of an engine in Python, and what is said of one that fails. Runs on ranks."""
    diary, samples = Diary(), ragged_samples(6)
    with running(plan_here(2, 6), callbacks=[diary]) as engine:
        targets = engine.train_step(samples).targets
        engine.train_step(samples)
        engine.evaluate(samples[:5])
        engine.save(folder / "checkpoints")
        with Saver(engine, folder / "later", in_background=True) as saver:
            saver.save(Progress(step=3))
        engine.callbacks = Callbacks([Failing()])
        with pytest.raises(RequestError) as raised:
            engine.save(folder / "again")
    assert {line[2] for line in diary.lines[:2]} == {targets}
    return [(line[0], line[1], *line[3:]) for line in diary.lines], str(raised.value)


def test_callbacks_hear_of_each_step_evaluation_and_complete_checkpoint_on_all_ranks(
    tmp_path: Path, two_ranks: Ranks
) -> None:
    for lines, failure in two_ranks.run(told, tmp_path):
        assert lines == [
            ("step", 1, 1), ("step", 2, 2), ("evaluation", 2), ("save", 2, True), ("save", 3, True),
        ]  # fmt: skip
        assert failure == "the callback Failing.on_save failed\n  because ValueError: no room on the shelf"
    assert (tmp_path / "again" / "latest").read_text() == "step-000002\n", "what was saved stays"


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as raised:
        Callbacks([object()])
    assert str(raised.value) == ("object is no callback\n  because it has no method on_step, on_evaluation or on_save")
    path = tmp_path / "mine.py"
    path.write_text(
        "class Told:\n    def __init__(self):\n        raise OSError('no')\n    def on_step(self, *_): ...\n"
    )
    with pytest.raises(RequestError) as raised:
        Callbacks.load([f"{path}:Told"])
    assert str(raised.value) == (
        f"the callback {path}:Told failed\n  because OSError: no\n  because mine.py, line 3, runs `raise OSError('no')`"
    )
