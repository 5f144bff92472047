"""A crash at any point of a save: what is on the disk at that moment is a checkpoint to continue from."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ranks import Ranks
from frugal.checkpoint import loading, saving
from frugal.checkpoint.progress import Progress
from frugal.checkpoint.saving import Saver
from frugal.errors import FrugalError
from tests.engine.engines import losses_of, plan_here, running

WRITING = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
_watch: Callable[[str], None] | None = None


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch is not None and event in WRITING and not (event == "open" and arguments[1] in ("r", "rb")):
        _watch(event)


class Snapshots:
    """Copies of `folder` before each call of this process that may change a file, and around each `torch.save`."""

    def __init__(self, folder: Path, into: Path) -> None:
        self.folder, self.into, self.taken, self._is_busy = folder, into, 0, False
        if not getattr(sys, "_watched", False):  # an audit hook stays for ever
            sys.addaudithook(_on_event)
            sys._watched = True  # type: ignore[attr-defined]  # of this process

    def __enter__(self) -> "Snapshots":
        global _watch
        _watch, self._save = self.take, torch.save
        torch.save = self._saving  # type: ignore[assignment]  # its files are opened in C++, which no hook hears
        return self

    def __exit__(self, *_: object) -> None:
        global _watch
        _watch = None
        torch.save = self._save

    def _saving(self, *args: Any, **kwargs: Any) -> None:
        self._save(*args, **kwargs)
        self.take("torch.save")

    def take(self, event: str) -> None:
        """Return what a crash here would leave."""
        if self._is_busy:
            return
        self._is_busy = True
        name = f"{self.taken:03d}-{event}-{os.environ['RANK']}"
        try:
            shutil.copytree(self.folder, self.into / name, dirs_exist_ok=True)
        except shutil.Error:  # the other rank was just renaming a file aside; no crash of it is at the same moment
            shutil.rmtree(self.into / name)
        self.taken += 1
        self._is_busy = False


def saves(folder: Path, into: Path, zero_stage: int, in_background: bool) -> int:
    """Step 1, and then, watched, step 2, and step 2 once more over itself; keeping one. Runs on ranks."""
    into.mkdir(exist_ok=True)
    with running(plan_here(zero_stage, 4)) as engine:
        losses_of(engine, 0, 1)
        saving.save(engine, folder, Progress(step=1), keep=1)
        losses_of(engine, 1, 2)
        with Snapshots(folder, into) as snapshots:
            saver = Saver(engine, folder, keep=1, in_background=in_background)
            for _ in range(2):
                saver.save(Progress(step=2))
                saver.finish()
    return snapshots.taken


def load_all(folders: list[Path], zero_stage: int) -> list[str]:
    """The step that each gives, or what is wrong with it. Runs on ranks."""
    answers = []
    with running(plan_here(zero_stage, 4)) as engine:
        for folder in folders:
            try:
                answers.append(str(loading.load(engine, folder).progress.step))
            except FrugalError as error:
                answers.append(str(error))
    return answers


@pytest.mark.parametrize(
    ("zero_stage", "in_background"),
    [
        (2, False),
        pytest.param(3, False, marks=pytest.mark.exhaustive),
        pytest.param(2, True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_crash_at_any_point_of_a_save_leaves_a_whole_checkpoint(
    zero_stage: int, in_background: bool, tmp_path: Path, two_ranks: Ranks
) -> None:
    into = tmp_path / "snapshots"
    taken = two_ranks.run(saves, tmp_path / "checkpoints", into, zero_stage, in_background)
    assert min(taken) >= 5, taken
    for rank in (0, 1):
        folders = sorted(path for path in into.iterdir() if path.name.endswith(f"-{rank}"))
        answers = two_ranks.run(load_all, folders, zero_stage)[0]
        moments = dict(zip([folder.name for folder in folders], answers, strict=True))
        assert set(answers) <= {"1", "2"}, moments
        assert answers == sorted(answers), moments  # once the new one can be had, it can be had
        if rank == 0:
            assert set(answers) == {"1", "2"}
