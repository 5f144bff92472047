"""A run's folder that others touch: deleted or moved under the run, and with things in it that are no files."""

import gzip
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.ranks import Ranks
from frugal import files, temporary
from frugal.checkpoint import manifest, progress, run_folder
from frugal.checkpoint.progress import Progress
from frugal.checkpoint.saving import Saver
from frugal.config.run_settings import RunSettings
from frugal.engine.reports.metrics import Log, PlannedMemory
from frugal.errors import CheckpointError, RequestError
from tests.engine.checkpoints import load_each, relisted, started

STRANGER = 65534  # nobody


def folder_gone(out: Path) -> tuple[str, bool, bool]:
    """Save, lose the folder, save again: the message, whether the log knows, and whether the folder was made again."""
    settings = RunSettings(out=out)
    with started() as engine, Log(out, rank=engine.rank, planned=PlannedMemory(1), total_steps=2) as log:
        saver = Saver(engine, settings.checkpoints, before=log.sync)
        saver.save(Progress(step=1))
        if engine.rank == 0:
            out.rename(out.with_name("moved"))
        log.event(event="note", step=1)
        is_known = log.is_folder_gone
        with pytest.raises(CheckpointError) as raised:
            saver.save(Progress(step=2))
    return str(raised.value), is_known, out.exists()


def test_a_run_whose_folder_is_gone_ends_with_a_message_and_makes_no_other(tmp_path: Path, two_ranks: Ranks) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (first, is_known, is_there), (second, *_) = two_ranks.run(folder_gone, out)
    assert first == second
    assert f"rank 0: {out}: the run's folder was deleted or moved (moved back, it can be resumed)" in first
    assert is_known and not is_there
    assert (tmp_path / "moved" / "checkpoints" / "latest").read_text() == "step-000001\n"


def in_place_of(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


NO_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "it is a named pipe, and not a file"),
    "zero": (lambda path: path.symlink_to("/dev/zero"), "it is a device, and not a file"),
    "full": (lambda path: path.symlink_to("/dev/full"), "it is a device, and not a file"),
    "folder": (Path.mkdir, "it is a folder, and not a file"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
}
NO_ZIPS: dict[str, bytes] = {
    "empty": b"",
    "text": b"weights, perhaps",
    "pickle": pickle.dumps({"module": {}}),
    "gzip": gzip.compress(bytes(1000)),
}


def test_what_is_no_file_of_a_checkpoint_is_named_and_nobody_waits_for_it(
    saved: Path, tmp_path: Path, two_ranks: Ranks
) -> None:
    cases: list[tuple[Path, str]] = []

    def case(name: str, file: str, reason: str) -> Path:
        folder = tmp_path / f"{file}-{name}"
        shutil.copytree(saved, folder)
        path = folder / "step-000004" / file
        cases.append((folder, f"step 2: {path}: {reason}" if reason else "step 4: "))
        return path

    for file in ("manifest.json", "training.json", "rng_rank_1.pt"):
        for name, (make, reason) in NO_FILES.items():
            in_place_of(case(name, file, reason), make)
    for name, content in NO_ZIPS.items():
        path = case(name, "rng_rank_1.pt", "")
        path.write_bytes(content)
        relisted(path)
        cases[-1] = (cases[-1][0], f"step 2: {path} cannot be read: ValueError: it is no zip archive")
    linked = case("linked", "rng_rank_1.pt", "")  # the same content from elsewhere is the same checkpoint
    linked.rename(tmp_path / "rng.pt")
    linked.symlink_to(tmp_path / "rng.pt")
    os.mkfifo(case("pointer", "training.json", "").parents[1] / "pipe")
    in_place_of(cases[-1][0] / "latest", os.mkfifo)
    for name in ("..", "/etc/passwd", "a/b", "a\0b", "", "x" * 300):
        path = case(f"name{len(cases)}", "manifest.json", "")
        made_by = manifest.read(path.parent)
        path.write_bytes(
            msgspec.json.encode(replace(made_by, files=made_by.files | {name: made_by.files[progress.TRAINING]}))
        )
        cases[-1] = (cases[-1][0], f"step 2: {path} names files outside its folder")
    answers = two_ranks.run(load_each, [folder for folder, _ in cases], timeout=200)
    for (_, expected), *said in zip(cases, *answers, strict=True):
        for each in said:
            assert each.startswith(expected), (expected, each)


def test_what_killed_starts_have_left_is_removed_by_the_next_and_a_live_one_keeps_its_own(tmp_path: Path) -> None:
    settings = RunSettings(out=tmp_path)
    settings.checkpoints.mkdir()
    left = [tmp_path / ".plan.json.tmp-0a1b2c3d", settings.checkpoints / ".latest.tmp-0a1b2c3d"]
    for path in left:
        path.touch()
    (tmp_path / ".start-0a1b2c3d0a1b2c3d").mkdir()
    (tmp_path / ".start-0a1b2c3d0a1b2c3d" / "plan.json").touch()
    (tmp_path / "model.tmp-0a1b2c3d").mkdir()
    own = {".mine", ".start-mine", ".notes.tmp-old", ".notes.tmp-0a1b2c3d", "model.tmp"}
    for name in own:
        (tmp_path / name).mkdir()
    with temporary.folder(tmp_path, run_folder.START) as live, run_folder.locked(settings):
        assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", ".running", live.name} | own
        assert not list(settings.checkpoints.iterdir())


def test_links_that_lead_elsewhere_are_refused_and_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("metrics.jsonl", "logs/rank_0.log"):
        settings = RunSettings(out=tmp_path / name.replace("/", "-"))
        planted = settings.out / name
        planted.parent.mkdir(parents=True)
        planted.symlink_to(victim)
        with pytest.raises(RequestError, match=f"{planted}: it is a symbolic link to {victim}"):
            run_folder.create(settings)
        with pytest.raises(OSError, match="symbolic link"):
            files.append(planted)
    files.write_file(planted, b"new")  # in place of the link
    assert (victim.read_text(), planted.is_symlink()) == ("precious", False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of others")
def test_a_folder_by_a_strangers_link_is_refused_and_by_ones_own_is_not(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "checkpoints").mkdir(parents=True)
    out = tmp_path / "run"
    out.symlink_to(tmp_path / "scratch")  # the run's folder itself may be reached through any link
    os.lchown(out, STRANGER, STRANGER)
    run_folder.create(RunSettings(out=out))
    (tmp_path / "mine").mkdir()
    (out / "checkpoints").rmdir()
    (out / "checkpoints").symlink_to(tmp_path / "mine")
    run_folder.create(RunSettings(out=out))
    os.lchown(out / "checkpoints", STRANGER, STRANGER)
    with pytest.raises(RequestError, match="another user's symbolic link"):
        run_folder.create(RunSettings(out=out))
