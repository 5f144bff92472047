"""Where a checkpoint cannot be written, every rank says so and the last one stays."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ranks import Ranks
from frugal.checkpoint import loading
from frugal.errors import CheckpointError
from tests.disks import small_disk
from tests.engine.checkpoints import plan_for, save_at, started


def save_when_one_rank_cannot(folder: Path, zero_stage: int, failing_file: str) -> tuple[str, list[str], bool]:
    """A good checkpoint, then one where the disk is full for rank 1 (or rank 0) at one file; runs on ranks."""
    usual, opened, message = torch.save, Path.open, "saved"

    def fail_if_full(name: str) -> None:
        if re.search(failing_file, name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    def torch_save(value: Any, file: Path) -> None:
        fail_if_full(str(file))
        usual(value, file)

    def open_path(path: Path, mode: str = "r", **kwargs: Any) -> Any:
        if mode == "xb" and path.suffix != ".pt":
            fail_if_full(str(path))
        return opened(path, mode, **kwargs)

    with started(plan_for(zero_stage)) as engine:
        save_at(engine, folder, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "save", torch_save)
            patch.setattr(Path, "open", open_path)
            try:
                save_at(engine, folder, 2)
            except CheckpointError as error:
                message = str(error)
        loaded = loading.load(engine, folder).progress.step
        save_at(engine, folder, 3)  # the engine and the ranks still work together
    return message, sorted(path.name for path in folder.iterdir()), loaded == 1


@pytest.mark.parametrize(
    ("zero_stage", "rank", "failing_file", "left"),
    [
        pytest.param(2, 1, "step-000002.*rank_1_mp.*optim", "step-000001", marks=pytest.mark.exhaustive),
        (3, 1, "step-000002.*rank_1_mp.*model", "step-000001"),
        pytest.param(2, 0, "step-000002.*training.json", "step-000001", marks=pytest.mark.exhaustive),
        (2, 0, "step-000002.*manifest.json", "step-000001"),
        (0, 0, "latest.tmp", "step-000002"),  # whole, but the pointer never moved to it
    ],
)
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_last_checkpoint_stays(
    zero_stage: int, rank: int, failing_file: str, left: str, tmp_path: Path, two_ranks: Ranks
) -> None:
    for message, names, loaded in two_ranks.run(save_when_one_rank_cannot, tmp_path, zero_stage, failing_file):
        lines = message.splitlines()
        assert lines[0] == f"cannot write the checkpoint {tmp_path}/step-000002"
        numbers = r"\(.* of .* are free at /.*\)"
        assert re.fullmatch(rf"  because rank {rank}: /.*: No space left on device {numbers}", lines[1]), lines[1]
        assert lines[2] == "  because the last good checkpoint is step-000001"
        assert re.fullmatch(r"hint: make room at /.*, then continue with --resume", lines[4]), lines[4]
        assert names == ["latest", left, "step-000003", "written.json"]
        assert loaded


def fill(folder: Path) -> list[str]:
    """Save until the disk is full, then load; runs on ranks."""
    said = []
    with started() as engine:
        for step in (1, 2):
            try:
                save_at(engine, folder, step)
                said.append(f"saved {step}")
            except CheckpointError as error:
                said.append(str(error).splitlines()[1])
        return [*said, f"loaded {loading.load(engine, folder).progress.step}"]


def test_a_really_full_disk_leaves_the_last_checkpoint(tmp_path: Path, two_ranks: Ranks) -> None:
    with small_disk(tmp_path / "disk", "1536k") as disk:  # one checkpoint and a half
        answers = two_ranks.run(fill, disk / "checkpoints")
    for said in answers:
        assert (said[0], said[2]) == ("saved 1", "loaded 1")
        assert re.search(rf"rank \d: {disk}/.*: No space left on device \(0.* of 1.5 MiB are free at {disk}\)", said[1])
