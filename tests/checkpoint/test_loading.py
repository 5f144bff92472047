"""Checkpoints are atomic, and a run that continues from one is the run that never stopped."""

import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ranks import Ranks
from frugal.checkpoint import loading
from frugal.checkpoint.progress import Progress
from frugal.checkpoint.saving import Saver
from frugal.config.optimizers import Optimizer
from frugal.data.batches import Position
from frugal.deepspeed_adapter import checkpoint_files
from frugal.deepspeed_adapter.checkpoint_files import CheckpointWriter
from frugal.errors import FrugalError
from tests.engine.checkpoints import GLOBAL_BATCH, load_each, plan_for, relisted, save_at, started, steps, weights
from tests.engine.engines import plan_here


def interrupted_and_not(
    folder: Path, zero_stage: int, precision: str, strategy: dict[str, Any], in_background: bool
) -> tuple[Any, Any]:
    """Six steps at once, with a checkpoint after three, and three from there with another engine; runs on ranks.

    In the background the checkpoint is written when the six steps are done.
    """
    plan = plan_for(zero_stage, precision, **strategy)
    trained, finish, whole = threading.Event(), CheckpointWriter.finish, Progress(step=3, position=Position(1, 3))

    def finish_late(writer: CheckpointWriter) -> list[Path]:
        trained.wait()
        return finish(writer)

    with started(plan, dropout=0.1) as engine, pytest.MonkeyPatch.context() as patch:
        if in_background:
            patch.setattr(CheckpointWriter, "finish", finish_late)
        steps(engine, 0, 3)
        saver = Saver(engine, folder, in_background=in_background)
        path = saver.save(whole)
        uninterrupted = (steps(engine, 3, 6), weights(engine))
        assert path.exists() == (not in_background)
        trained.set()
        saver.finish()
    with started(plan, dropout=0.1, seed=1) as engine:  # other weights and generators: all must be in the checkpoint
        assert loading.load(engine, folder).progress == whole
        return uninterrupted, (steps(engine, 3, 6), weights(engine))


RECOMPUTED, ON_HOST = {"activation_checkpointing": "full"}, {"offload_optimizer": "cpu"}


@pytest.mark.parametrize(
    ("zero_stage", "precision", "strategy", "in_background"),
    [
        (3, "bf16", RECOMPUTED, False),
        (2, "bf16", ON_HOST, True),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (
                (0, "fp32", {}, True), (1, "fp32", {}, True), (1, "fp32", RECOMPUTED, False), (2, "bf16", {}, False),
                (2, "bf16", ON_HOST, False), (3, "fp32", {}, True),
            )
        ),
    ],
)  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    zero_stage: int, precision: str, strategy: dict[str, Any], in_background: bool, tmp_path: Path, two_ranks: Ranks
) -> None:
    answers = two_ranks.run(interrupted_and_not, tmp_path, zero_stage, precision, strategy, in_background)
    for whole, resumed in answers:
        assert resumed == whole


def numbers_after_loading(folder: Path) -> list[tuple[Any, ...]]:
    """Return what the optimizer goes on with on the layout that saved, and on another one; runs on ranks."""
    numbers, request = [], {"weight_decay": 0.5, "optimizer": Optimizer(beta1=0.8, beta2=0.999, epsilon=1e-6)}
    for zero_stage in (2, 3):
        with started(plan_here(zero_stage, GLOBAL_BATCH, 2, request)) as engine:
            changes = loading.load(engine, folder).changes
            group = engine.deepspeed.optimizer.param_groups[0]
            numbers.append((tuple(group["betas"]), group["eps"], group["weight_decay"], changes[-4:]))
    return numbers


def test_a_resumed_run_goes_on_with_the_numbers_that_are_asked_for_and_says_so(saved: Path, two_ranks: Ranks) -> None:
    said = ("weight decay 0.01 -> 0.5", "beta1 0.9 -> 0.8", "beta2 0.95 -> 0.999", "epsilon 1e-08 -> 1e-06")
    asked = ((0.8, 0.999), 1e-6, 0.5, said)
    assert two_ranks.run(numbers_after_loading, saved)[0] == [asked, asked]


def keeping(folder: Path) -> list[list[str]]:
    """The folder's content after each of five saves, the second being the best; runs on ranks."""
    contents = []
    with started() as engine:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 4.0)):
            save_at(engine, folder, step, validation_loss=loss)
            contents.append(sorted(path.name for path in folder.iterdir() if path.name != "written.json"))
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
    relisted(hostile)
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
    """Return what loading into other runs says; runs on ranks."""
    answers = []
    for change in changes:
        width, batch = change.pop("n_embd", 64), change.pop("global_batch", GLOBAL_BATCH)
        with started(plan_here(2, batch, 2, {"learning_rate": 1e-2, **change}), n_embd=width) as engine:
            with pytest.raises(FrugalError) as error:
                loading.load(engine, folder)
            answers.append(f"{error.value.exit_code}: {error.value}")
    return answers


def test_another_model_batch_length_or_optimizer_is_refused(saved: Path, two_ranks: Ranks) -> None:
    path = saved / "step-000004"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"n_embd": 32}, "is of another model"),
        ({"global_batch": 8}, "was made with global batch 6, this run has global batch 8"),
        ({"seq_len": 32}, "was made with sequence length 64, this run has sequence length 32"),
        ({"optimizer": Optimizer(name="sgd")}, "was made with optimizer adamw, this run has optimizer sgd"),
        ({"precision": "bf16"}, "was made with precision fp32, this run has precision bf16"),
    ]
    answers = two_ranks.run(load_elsewhere, saved, [change for change, _ in cases])[0]
    for answer, (_, reason) in zip(answers, cases, strict=True):
        assert answer.startswith(f"4: {path} {reason}\n")
