"""Functions of DeepSpeed that ours repeat are as they were; where they are not, nothing is simulated."""

import importlib
import inspect
import logging
import pkgutil
import shutil
from pathlib import Path
from typing import Any

import pytest

from frugal import required
from frugal.config.request import Request
from frugal.deepspeed_adapter.simulate import mirrored
from frugal.deepspeed_adapter.simulate.engine import covers
from frugal.deepspeed_adapter.simulate.mirrored import MIRRORED, Mirrored
from frugal.planning.strategy import Strategy

FOLDER = mirrored.package_folder()


def test_nothing_has_changed() -> None:
    changes = "\n".join(mirrored.changes(FOLDER))
    hint = "compare with the tested version: python -m frugal.deepspeed_adapter.contract FOLDER/OF/ITS/deepspeed"
    assert not changes, f"{changes}\n{hint}, look at ours, then record the new digest"


@pytest.mark.parametrize("each", MIRRORED, ids=lambda each: f"{each.place}.{each.name}")
def test_a_source_is_found_as_python_finds_it_and_what_repeats_it_is_there(each: Mirrored) -> None:
    value: Any = importlib.import_module(f"deepspeed.runtime.{each.place.partition(':')[0]}")
    for part in each.qualified.split("."):
        value = getattr(value, required._mangled(value, part))
    assert each.source(FOLDER) == inspect.getsource(required._unwrapped(value))
    pkgutil.resolve_name(f"frugal.deepspeed_adapter.{each.ours}")


@pytest.fixture
def other_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy whose ZeRO-3 steps differently."""
    folder = tmp_path / "deepspeed"
    shutil.copytree(FOLDER / "runtime", folder / "runtime", ignore=shutil.ignore_patterns("*.pyc"))
    path = folder / "runtime" / "zero" / "stage3.py"
    text = path.read_text()
    step = "    def step(self, closure=None):\n"
    path.write_text(text.replace(step, f"{step}        pass\n"))
    monkeypatch.setattr(mirrored, "package_folder", lambda: folder)
    return folder


def test_a_changed_source_is_told_with_its_difference(other_deepspeed: Path) -> None:
    (change,) = mirrored.changes(other_deepspeed, FOLDER)
    first, *difference = change.splitlines()
    assert first.startswith("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.step changed, its digest is ")
    assert first.endswith("; see simulate.zero3.SimulatedZero3")
    changed = [line for line in difference if line.startswith(("+", "-"))]
    assert changed == ["--- tested", "+++ installed", "+        pass"]


def test_another_deepspeed_is_not_simulated_and_that_is_said_once(
    other_deepspeed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="frugal"):
        assert not covers(Request(), Strategy(zero_stage=2))
        assert not covers(Request(), Strategy(zero_stage=3))
    (record,) = caplog.records
    assert record.message.startswith("DeepSpeed 0.19.8 is not what is simulated, so all strategies are dry-run")
    assert record.message.endswith(": DeepSpeedZeroOptimizer_Stage3.step changed")


def test_a_function_that_is_gone_is_told(tmp_path: Path) -> None:
    assert len(list(mirrored.changes(tmp_path))) == len(MIRRORED)
    assert next(mirrored.changes(tmp_path)).endswith(" is gone; see simulate.engine.SimulatedZero0")
