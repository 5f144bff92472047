"""Saving: in the background, beside others' files, where disks fail, and what the record of a checkpoint may hold."""

import errno
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bench.ranks import Ranks
from frugal import files
from frugal.checkpoint import loading, manifest, saving
from frugal.checkpoint.progress import TRAINING, BestSoFar, Progress, finite, read_progress
from frugal.checkpoint.saving import Saver
from frugal.deepspeed_adapter.checkpoint_files import CheckpointWriter
from frugal.errors import CheckpointError
from tests.engine.checkpoints import started, steps


def an_error_while_it_is_written(folder: Path) -> bool:
    """Return whether a checkpoint that was begun is there once an error has passed; runs on ranks."""
    finish = CheckpointWriter.finish

    def finish_slowly(writer: CheckpointWriter) -> list[Path]:
        time.sleep(0.5)
        return finish(writer)

    with started() as engine:
        steps(engine, 0, 1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(CheckpointWriter, "finish", finish_slowly)
            with Saver(engine, folder, in_background=True) as saver:
                saver.save(Progress(step=1))
                raise ZeroDivisionError
        return loading.load(engine, folder).progress.step == 1


def test_what_was_begun_before_an_error_is_there(tmp_path: Path, two_ranks: Ranks) -> None:
    assert two_ranks.run(an_error_while_it_is_written, tmp_path, timeout=60) == [True, True]


def full_disk_in_background(folder: Path) -> tuple[str, int, bool]:
    """The message, the steps that were done until it came, and whether step 1 can be loaded; runs on ranks."""
    torch_save = torch.save
    with started() as engine:
        saver, done = Saver(engine, folder, in_background=True), 1
        steps(engine, 0, 1)
        saver.save(Progress(step=1))
        saver.finish()

        def fail(state_dict: Any, file: Path) -> None:
            if engine.rank == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
            torch_save(state_dict, file)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "save", fail)
            saver.save(Progress(step=2))
            while not engine.is_to_stop:  # no rank is told from outside
                done += 1
                steps(engine, done, done + 1)
        with pytest.raises(CheckpointError) as caught:
            saver.finish()
        is_good = loading.load(engine, folder).progress.step == 1 and not (folder / "step-000002.tmp").exists()
    return str(caught.value), done, is_good


def test_a_disk_that_is_full_in_the_background_ends_the_run_on_all_ranks_at_the_same_step(
    tmp_path: Path, two_ranks: Ranks
) -> None:
    (message, done, is_good), other = two_ranks.run(full_disk_in_background, tmp_path, timeout=60)
    assert re.search(r"rank 1: /.*: No space left on device \(.* are free at", message)
    assert "the last good checkpoint is step-000001" in message
    assert (message, done, is_good) == other
    assert is_good


def saved_beside(folder: Path) -> tuple[list[str], list[str]]:
    """Names after saving beside a user's own copies, and after step numbers have grown a digit; runs on ranks."""
    with started() as engine:
        saving.save(engine, folder, Progress(step=1))
        for name in OWN:
            shutil.copytree(folder / "step-000001", folder / name)
        for step in (2, 3, 4):
            saving.save(engine, folder, Progress(step=step))
        names = sorted(path.name for path in folder.iterdir())
        for step in (999_998, 999_999, 1_000_000):
            saving.save(engine, folder, Progress(step=step))
    return names, [path.name for path in manifest.checkpoints_in(folder)]


OWN = ["step-000001-good", "step-000001.keep", "step-000003", "step-000004.tmp", "step-000004.old", "step-000009"]


def test_a_user_s_own_copies_stay_and_step_numbers_are_compared_as_numbers(tmp_path: Path, one_rank: Ranks) -> None:
    ((names, newest),) = one_rank.run(saved_beside, tmp_path)
    moved = {"step-000003": "step-000003.old.kept", "step-000004.tmp": "step-000004.tmp.kept"}
    moved["step-000004.old"] = "step-000004.old.kept"
    kept = [moved.get(name, name) for name in OWN]
    assert names == sorted(["latest", "written.json", "step-000003", "step-000004", *kept])
    assert newest == ["step-1000000", "step-999999", "step-000009"]


def not_readable_now(folder: Path) -> tuple[int, list[str], list[str], int]:
    """The step loaded while the newest cannot be read, what is there two saves later, and what may go; on ranks."""
    os_open = os.open

    def fail(path: Any, *rest: Any, **options: Any) -> int:
        if str(path) == str(folder / "step-000005" / "training.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return os_open(path, *rest, **options)

    with started() as engine:
        for step in (1, 5):
            saving.save(engine, folder, Progress(step=step))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", fail)
            found = loading.load(engine, folder).progress.step
        for step in (2, 3):
            saving.save(engine, folder, Progress(step=step))
        names = sorted(path.name for path in folder.iterdir())
        good = loading.load(engine, folder, only="step-000005").progress.step
    return found, names, sorted(files.written(folder)), good


def test_a_checkpoint_that_cannot_be_read_for_the_moment_is_kept(tmp_path: Path, one_rank: Ranks) -> None:
    ((found, names, ours, good),) = one_rank.run(not_readable_now, tmp_path)
    assert (found, good) == (1, 5)
    assert names == ["latest", "step-000002", "step-000003", "step-000005", "written.json"]
    assert ours == ["step-000002", "step-000003"]


def test_what_json_does_not_have_is_no_number_of_a_checkpoint(tmp_path: Path) -> None:
    best = BestSoFar(by="max", value=float("inf"), step=1, num_since=0)
    progress = finite(Progress(step=1, best=best, metrics={"f1": float("nan"), "loss": 2.0}))
    (tmp_path / TRAINING).write_bytes(msgspec.json.encode(progress))
    assert read_progress(tmp_path) == Progress(step=1, metrics={"loss": 2.0})


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"step": -3}, "step is -3"),
        ({"step": 1 << 60}, f"step is {1 << 60}"),
        ({"step": True}, "Expected `int`, got `bool` - at `$.step`"),
        ({"step": "7"}, "Expected `int`, got `str` - at `$.step`"),
        ({"step": 7, "position": {"epoch": 0, "offset": -1}}, "position.offset is -1"),
        ({"step": 7, "data": {"tokens": -1}}, "data.tokens is -1"),
        ({"step": 7, "best": {"by": "min", "value": 1.0, "step": 8, "num_since": 0}}, "best.step is 8, and step is 7"),
        ({"step": 7, "learning_rate": {"peak": -1.0, "schedule": "linear", "warmup_steps": 0, "total_steps": 9}},
         "learning_rate.peak is -1"),
    ],
)  # fmt: skip
def test_a_number_beyond_sense_is_refused_by_name(record: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / TRAINING).write_bytes(msgspec.json.encode(record))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / TRAINING} is no record of a run: {named}")):
        read_progress(tmp_path)
