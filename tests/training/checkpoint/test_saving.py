"""Checkpoints that are written while training goes on are those that would have been written at once."""

import errno
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ranks import Ranks
from frugal.deepspeed_adapter.checkpoint_files import CheckpointWriter
from frugal.errors import CheckpointError
from frugal.training.checkpoint import loading
from frugal.training.checkpoint.progress import Progress
from frugal.training.checkpoint.saving import Saver
from tests.training.checkpoints import plan_for, start, steps, stop, weights


def saved_behind(folder: Path, zero_stage: int, precision: str, strategy: dict[str, Any]) -> list[Any]:
    """Two steps, a checkpoint that is written two steps later, and the same two steps from it; runs on ranks."""
    plan = plan_for(zero_stage, precision, **strategy)
    engine = start(plan)
    steps(engine, 0, 2)
    trained, finish = threading.Event(), CheckpointWriter.finish

    def finish_late(writer: CheckpointWriter) -> list[Path]:
        trained.wait()
        return finish(writer)

    CheckpointWriter.finish = finish_late  # type: ignore[method-assign]
    saver = Saver(engine, folder, in_background=True)
    path = saver.save(Progress(step=2))
    whole = (steps(engine, 2, 4), weights(engine))
    was_there = path.exists()
    trained.set()
    saver.finish()
    CheckpointWriter.finish = finish  # type: ignore[method-assign]
    stop(engine)
    engine = start(plan, seed=1)  # other weights, other generators
    loading.load(engine, folder)
    resumed = (steps(engine, 2, 4), weights(engine))
    stop(engine)
    return [whole, was_there, resumed]


@pytest.mark.parametrize(
    ("zero_stage", "precision", "strategy"),
    [
        pytest.param(0, "fp32", {}, marks=pytest.mark.exhaustive),
        (2, "bf16", {"offload_optimizer": "cpu"}),
        pytest.param(1, "fp32", {}, marks=pytest.mark.exhaustive),
        (3, "fp32", {}),
    ],
)
def test_what_is_written_in_the_background_is_what_was_there_when_it_began(
    zero_stage: int, precision: str, strategy: dict[str, Any], tmp_path: Path, two_ranks: Ranks
) -> None:
    for whole, was_there, resumed in two_ranks.run(saved_behind, tmp_path, zero_stage, precision, strategy):
        assert not was_there
        assert resumed == whole


def an_error_while_it_is_written(folder: Path) -> bool:
    """Whether a checkpoint that was begun is there once an error has passed; runs on ranks."""
    engine = start(plan_for(2))
    steps(engine, 0, 1)
    finish = CheckpointWriter.finish

    def finish_slowly(writer: CheckpointWriter) -> list[Path]:
        time.sleep(0.5)
        return finish(writer)

    CheckpointWriter.finish = finish_slowly  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), Saver(engine, folder, in_background=True) as saver:
        saver.save(Progress(step=1))
        raise ZeroDivisionError
    CheckpointWriter.finish = finish  # type: ignore[method-assign]
    is_there = loading.load(engine, folder).progress.step == 1
    stop(engine)
    return is_there


def test_what_was_begun_before_an_error_is_there(tmp_path: Path, two_ranks: Ranks) -> None:
    assert two_ranks.run(an_error_while_it_is_written, tmp_path, timeout=60) == [True, True]


def full_disk_in_background(folder: Path) -> tuple[str, int, bool]:
    """The message, the steps that were done until it came, and whether step 1 can be loaded; runs on ranks."""
    engine = start(plan_for(2))
    saver = Saver(engine, folder, in_background=True)
    steps(engine, 0, 1)
    saver.save(Progress(step=1))
    saver.finish()
    torch_save, rank = torch.save, engine.rank

    def fail(state_dict: Any, file: Any) -> None:
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        torch_save(state_dict, file)

    torch.save = fail  # type: ignore[assignment]
    saver.save(Progress(step=2))
    done = 1
    while not engine.is_to_stop:  # no rank is told from outside
        done += 1
        steps(engine, done, done + 1)
    torch.save = torch_save
    with pytest.raises(CheckpointError) as caught:
        saver.finish()
    is_good = loading.load(engine, folder).progress.step == 1 and not (folder / "step-000002.tmp").exists()
    stop(engine)
    return str(caught.value), done, is_good


def test_a_disk_that_is_full_in_the_background_ends_the_run_on_all_ranks_at_the_same_step(
    tmp_path: Path, two_ranks: Ranks
) -> None:
    (message, done, is_good), other = two_ranks.run(full_disk_in_background, tmp_path, timeout=60)
    assert re.search(r"rank 1: /.*: No space left on device \(.* are free at", message)
    assert "the last good checkpoint is step-000001" in message
    assert (message, done, is_good) == other
    assert is_good
