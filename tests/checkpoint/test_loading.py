"""Checkpoints are atomic, and a run that continues from one is the run that never stopped."""

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal import files as atomic_files
from frugal.checkpoint import loading, manifest
from frugal.checkpoint.progress import Progress
from frugal.data.batches import Position
from frugal.data.sources import Provenance
from frugal.deepspeed_adapter import checkpoint_files
from frugal.errors import FrugalError
from tests.engine.checkpoints import GLOBAL_BATCH, WORLD_SIZE, plan_for, save_at, start, steps, stop, weights


def interrupted_and_not(folder: Path, zero_stage: int, precision: str, strategy: dict[str, Any]) -> tuple[Any, Any]:
    """Six steps at once, and three, a checkpoint, another engine and three more; runs on ranks."""
    plan = plan_for(zero_stage, precision, **strategy)
    engine = start(plan)
    first = steps(engine, 0, 3)
    save_at(engine, folder, 3)
    whole = (first + steps(engine, 3, 6), weights(engine))
    stop(engine)
    engine = start(plan, seed=1)  # other weights, other generators: all must come from the checkpoint
    progress = loading.load(engine, folder).progress
    assert progress == Progress(step=3, position=Position(1, 3), data=Provenance(fingerprint="corpus"))
    resumed = (first + steps(engine, 3, 6), weights(engine))
    stop(engine)
    return whole, resumed


@pytest.mark.parametrize(
    ("zero_stage", "precision", "strategy"),
    [
        pytest.param(0, "fp32", {}, marks=pytest.mark.exhaustive),
        pytest.param(1, "fp32", {"activation_checkpointing": "full"}, marks=pytest.mark.exhaustive),
        pytest.param(2, "bf16", {}, marks=pytest.mark.exhaustive),
        (3, "bf16", {"activation_checkpointing": "full"}),
        (2, "bf16", {"offload_optimizer": "cpu"}),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    zero_stage: int, precision: str, strategy: dict[str, Any], tmp_path: Path, two_ranks: Ranks
) -> None:
    for whole, resumed in two_ranks.run(interrupted_and_not, tmp_path, zero_stage, precision, strategy):
        assert resumed == whole


def numbers_after_loading(folder: Path) -> list[tuple[Any, ...]]:
    """What the optimizer goes on with on the layout that saved, and on another one; runs on ranks."""
    numbers = []
    for zero_stage in (2, 3):
        plan = plan_by_hand(
            world_size=WORLD_SIZE, global_batch=GLOBAL_BATCH, micro_batch=2, zero_stage=zero_stage,
            request={"weight_decay": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.999, "adam_epsilon": 1e-6},
        )  # fmt: skip
        engine = start(plan, dropout=0.0)
        changes = loading.load(engine, folder).changes
        group = engine.deepspeed.optimizer.param_groups[0]
        numbers.append((tuple(group["betas"]), group["eps"], group["weight_decay"], changes[-4:]))
        stop(engine)
    return numbers


def test_a_resumed_run_goes_on_with_the_numbers_that_are_asked_for_and_says_so(saved: Path, two_ranks: Ranks) -> None:
    said = ("weight decay 0.01 -> 0.5", "beta1 0.9 -> 0.8", "beta2 0.95 -> 0.999", "epsilon 1e-08 -> 1e-06")
    asked = ((0.8, 0.999), 1e-6, 0.5, said)
    assert two_ranks.run(numbers_after_loading, saved)[0] == [asked, asked]


def keeping(folder: Path) -> list[list[str]]:
    """The folder's content after each of five saves, the second being the best; runs on ranks."""
    engine = start(plan_for(2), dropout=0.0)
    contents = []
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 4.0)):
        save_at(engine, folder, step, validation_loss=loss)
        contents.append(sorted(path.name for path in folder.iterdir() if path.name != "written.json"))
    stop(engine)
    return contents


def test_the_newest_two_and_the_best_are_kept(tmp_path: Path, two_ranks: Ranks) -> None:
    contents = two_ranks.run(keeping, tmp_path)[0]
    assert contents == [
        ["latest", "step-000001"],
        ["latest", "step-000001", "step-000002"],
        ["latest", "step-000002", "step-000003"],
        ["latest", "step-000002", "step-000003", "step-000004"],
        ["latest", "step-000002", "step-000004", "step-000005"],
    ]
    assert (tmp_path / "latest").read_text() == "step-000005\n"


def two_saves(folder: Path) -> None:
    """Checkpoints at steps 2 and 4; runs on ranks."""
    engine = start(plan_for(2), dropout=0.0)
    for step in (2, 4):
        save_at(engine, folder, step)
    stop(engine)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, two_ranks: Ranks) -> Path:
    """A folder with checkpoints at steps 2 and 4 of a ZeRO-2 run on two ranks."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    two_ranks.run(two_saves, folder)
    return folder


def load_each(folders: list[Path]) -> list[str]:
    """For each folder the step loaded and what was refused, or the error; one engine; runs on ranks."""
    engine = start(plan_for(2), dropout=0.0)
    answers = []
    for folder in folders:
        try:
            loaded = loading.load(engine, folder)
        except FrugalError as error:
            answers.append(f"{type(error).__name__}: {error}")
        else:
            answers.append(f"step {loaded.progress.step}: {'; '.join(loaded.refused)}")
    stop(engine)
    return answers


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


DAMAGES: dict[str, Callable[[Path], Any]] = {"truncated": _truncate, "flipped": _flip, "missing": Path.unlink}


def test_a_damaged_file_is_named_and_the_previous_checkpoint_used(
    saved: Path, tmp_path: Path, two_ranks: Ranks
) -> None:
    cases = []
    for name in sorted(path.name for path in (saved / "step-000004").iterdir()):
        for damage, apply in DAMAGES.items():
            if (name, damage) == ("manifest.json", "flipped"):
                continue  # a flipped bit may leave a manifest that differs in nothing that matters
            folder = tmp_path / f"{name}-{damage}"
            shutil.copytree(saved, folder)
            apply(folder / "step-000004" / name)
            cases.append((name, folder))
    assert len(cases) == 9 * 3 - 1
    for (name, folder), *answers in zip(cases, *two_ranks.run(load_each, [f for _, f in cases]), strict=True):
        for answer in answers:
            assert answer.startswith(f"step 2: {folder}/step-000004/{name}"), answer


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_file_that_would_run_code_is_refused_and_nothing_runs(saved: Path, tmp_path: Path, two_ranks: Ranks) -> None:
    folder, mark = tmp_path / "checkpoints", tmp_path / "mark"
    shutil.copytree(saved, folder)
    hostile = sorted((folder / "step-000004").glob("*_optim_states.pt"))[1]
    torch.save({**torch.load(hostile, weights_only=False), "more": Hostile(mark)}, hostile)
    made_by = manifest.read(hostile.parent)
    files = {**made_by.files, hostile.name: manifest.file_entry(hostile, rank=1)}
    atomic_files.write_file(hostile.parent / manifest.MANIFEST, msgspec.json.encode(replace(made_by, files=files)))
    answers = two_ranks.run(load_each, [folder])
    refused = f"{hostile} holds posix.mkdir, which frugal does not save and could run any code"
    assert answers == [[f"step 2: {refused}"]] * 2
    with pytest.raises(pickle.UnpicklingError):
        checkpoint_files.read(hostile)
    assert not mark.exists()


def test_the_pointer_decides_and_a_lost_pointer_is_no_loss(saved: Path, tmp_path: Path, two_ranks: Ranks) -> None:
    changes: dict[str, Callable[[Path], Any]] = {
        "crash before the pointer moved": lambda folder: (folder / "latest").write_text("step-000002\n"),
        "crash while saving": lambda folder: shutil.copytree(folder / "step-000004", folder / "step-000006.tmp"),
        "no pointer": lambda folder: (folder / "latest").unlink(),
        "empty pointer": lambda folder: (folder / "latest").write_text(""),
        "pointer to nothing": lambda folder: (folder / "latest").write_text("step-000099"),
    }
    folders = []
    for name, change in changes.items():
        folders.append(tmp_path / name)
        shutil.copytree(saved, folders[-1])
        change(folders[-1])
    answers = two_ranks.run(load_each, folders)
    assert answers[0] == answers[1] == ["step 2: ", *["step 4: "] * 4]


def test_nothing_whole_is_an_error_that_names_everything(saved: Path, tmp_path: Path, two_ranks: Ranks) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(saved, broken)
    (broken / "step-000004" / "rng_rank_1.pt").unlink()
    (broken / "step-000002" / "manifest.json").write_text("{")
    of_broken, of_empty = two_ranks.run(load_each, [broken, tmp_path / "empty"])[0]
    assert of_broken.startswith(f"CheckpointError: no checkpoint in {broken} is whole\n")
    assert f"{broken}/step-000004/rng_rank_1.pt is not there; rank 1 of 2 wrote it" in of_broken
    assert f"{broken}/step-000002/manifest.json is not a manifest" in of_broken
    assert of_empty.startswith(f"CheckpointError: there is no checkpoint in {tmp_path}/empty\n")


def load_elsewhere(folder: Path, changes: list[dict[str, Any]]) -> list[str]:
    """What loading into other runs says; runs on ranks."""
    answers = []
    for change in changes:
        width, batch = change.pop("n_embd", 64), change.pop("global_batch", GLOBAL_BATCH)
        plan = plan_by_hand(
            world_size=WORLD_SIZE, global_batch=batch, micro_batch=2, zero_stage=2,
            request={"precision": "fp32", "learning_rate": 1e-2, **change},
        )  # fmt: skip
        engine = start(plan, dropout=0.0, n_embd=width)
        try:
            loading.load(engine, folder)
        except FrugalError as error:
            answers.append(f"{error.exit_code}: {error}")
        stop(engine)
    return answers


def test_another_model_batch_length_or_optimizer_is_refused(saved: Path, two_ranks: Ranks) -> None:
    path = saved / "step-000004"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"n_embd": 32}, "is of another model"),
        ({"global_batch": 8}, "was made with global batch 6, this run has global batch 8"),
        ({"seq_len": 32}, "was made with sequence length 64, this run has sequence length 32"),
        ({"optimizer": "sgd"}, "was made with optimizer adamw, this run has optimizer sgd"),
        ({"precision": "bf16"}, "was made with precision fp32, this run has precision bf16"),
    ]
    answers = two_ranks.run(load_elsewhere, saved, [change for change, _ in cases])[0]
    for answer, (_, reason) in zip(answers, cases, strict=True):
        assert answer.startswith(f"4: {path} {reason}\n")
