"""A checkpoint is whole or not there, and a run that continues from one is the run that never stopped."""

import errno
import gc
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from frugal.errors import CheckpointError, FrugalError
from frugal.planning.plan import Plan
from frugal.training import checkpoint, manifest, reader, saving
from frugal.training.batches import Position
from frugal.training.checkpoint import Progress
from frugal.training.engine import Engine, initialize
from frugal.training.evaluate import evaluate
from frugal.training.final_model import save_model
from frugal.training.objectives import CausalLM
from frugal.training.provenance import Provenance
from tests.plans import plan_by_hand
from tests.ranks import Ranks
from tests.training.models import ragged_samples, tiny_gpt2

GLOBAL_BATCH, WORLD_SIZE = 6, 2


def plan_for(zero_stage: int, precision: str = "fp32", world_size: int = WORLD_SIZE, **strategy: Any) -> Plan:
    return plan_by_hand(
        world_size=world_size, global_batch=GLOBAL_BATCH, micro_batch=2, zero_stage=zero_stage,
        request={"precision": precision, "learning_rate": 1e-2}, strategy=strategy,
    )  # fmt: skip


def start(plan: Plan, *, seed: int = 0, dropout: float = 0.1, **changes: Any) -> Engine:
    """An engine with dropout, a decaying learning rate and generators seeded by rank."""
    model = tiny_gpt2(seed=seed, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **changes)
    random.seed(seed)
    torch.manual_seed(1000 * seed + torch.distributed.get_rank())
    return initialize(model, plan, CausalLM(), learning_rate_schedule=lambda step: 1 / (1 + step))


def stop(engine: Engine) -> None:
    engine.destroy()
    gc.collect()


def steps(engine: Engine, first: int, last: int) -> list[tuple[float, float]]:
    """Loss and learning rate of the steps from `first` to before `last`."""
    results = [engine.train_step(ragged_samples(GLOBAL_BATCH, seed=step)) for step in range(first, last)]
    return [(result.loss, result.learning_rate) for result in results]


def weights(engine: Engine) -> str:
    """A fingerprint of all weights and optimizer states of this rank."""
    optimizer = engine.deepspeed.optimizer
    return str(hashlib.sha256(repr(_numbers(optimizer.state_dict())).encode()).hexdigest())


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten().tolist()
    if isinstance(value, dict):
        return {str(key): _numbers(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else None


def save_at(engine: Engine, folder: Path, step: int, **changes: Any) -> Path:
    progress = Progress(step=step, position=Position(1, step), data=Provenance(fingerprint="corpus"), **changes)
    return saving.save(engine, folder, progress)


def interrupted_and_not(folder: Path, zero_stage: int, precision: str, strategy: dict[str, Any]) -> tuple[Any, Any]:
    """Six steps at once, and three, a checkpoint, another engine and three more; runs on ranks."""
    plan = plan_for(zero_stage, precision, **strategy)
    engine = start(plan)
    first = steps(engine, 0, 3)
    save_at(engine, folder, 3)
    whole = (first + steps(engine, 3, 6), weights(engine))
    stop(engine)
    engine = start(plan, seed=1)  # other weights, other generators: all must come from the checkpoint
    progress = checkpoint.load(engine, folder).progress
    assert progress == Progress(step=3, position=Position(1, 3), data=Provenance(fingerprint="corpus"))
    resumed = (first + steps(engine, 3, 6), weights(engine))
    stop(engine)
    return whole, resumed


@pytest.mark.parametrize(
    ("zero_stage", "precision", "strategy"),
    [
        (0, "fp32", {}),
        pytest.param(1, "fp32", {}, marks=pytest.mark.exhaustive),
        pytest.param(2, "fp32", {"activation_checkpointing": "full"}, marks=pytest.mark.exhaustive),
        pytest.param(3, "fp32", {}, marks=pytest.mark.exhaustive),
        (2, "bf16", {}),
        (3, "bf16", {"activation_checkpointing": "full"}),
        (2, "bf16", {"offload_optimizer": "cpu"}),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    zero_stage: int, precision: str, strategy: dict[str, Any], tmp_path: Path, two_ranks: Ranks
) -> None:
    for whole, resumed in two_ranks.run(interrupted_and_not, tmp_path, zero_stage, precision, strategy):
        assert resumed == whole


def with_and_without_recomputing(zero_stage: int) -> list[list[tuple[float, float]]]:
    """Trajectories with activation checkpointing off and on, with dropout; runs on ranks."""
    trajectories = []
    for mode in ("off", "full"):
        engine = start(plan_for(zero_stage, activation_checkpointing=mode))
        trajectories.append(steps(engine, 0, 4))
        stop(engine)
    return trajectories


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_activation_checkpointing_does_not_change_the_trajectory(zero_stage: int, two_ranks: Ranks) -> None:
    off, on = two_ranks.run(with_and_without_recomputing, zero_stage)[0]
    assert off == on


def keeping(folder: Path) -> list[list[str]]:
    """The folder's content after each of five saves, the second being the best; runs on ranks."""
    engine = start(plan_for(2), dropout=0.0)
    contents = []
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 4.0)):
        save_at(engine, folder, step, validation_loss=loss)
        contents.append(sorted(path.name for path in folder.iterdir()))
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
            loaded = checkpoint.load(engine, folder)
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
    files = {**made_by.files, hostile.name: manifest.describe(hostile, rank=1)}
    manifest.write(hostile.parent / manifest.MANIFEST, msgspec.json.encode(replace(made_by, files=files)))
    answers = two_ranks.run(load_each, [folder])
    refused = f"{hostile} holds posix.mkdir, which frugal does not save and could run any code"
    assert answers == [[f"step 2: {refused}"]] * 2
    with pytest.raises(pickle.UnpicklingError):
        reader.read(hostile)
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
    (broken / "step-000004" / "training.json").unlink()
    (broken / "step-000002" / "manifest.json").write_text("{")
    empty = tmp_path / "empty"
    assert two_ranks.run(load_each, [broken, empty])[0] == [
        f"CheckpointError: no checkpoint in {broken} is whole\n"
        f"  because {broken}/step-000004/training.json: No such file or directory\n"
        f"  because {broken}/step-000002/manifest.json is not a manifest: Input data was truncated\n\n"
        "hint: start again with another --out",
        f"CheckpointError: there is no checkpoint in {empty}\n\nhint: start without --resume",
    ]


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
            checkpoint.load(engine, folder)
        except FrugalError as error:
            answers.append(f"{error.exit_code}: {error}")
        stop(engine)
    return answers


def test_another_model_batch_length_or_optimizer_is_refused(saved: Path, two_ranks: Ranks) -> None:
    path = saved / "step-000004"
    anew = "or start anew with another --out"
    changes: list[dict[str, Any]] = [
        {"n_embd": 32}, {"global_batch": 8}, {"seq_len": 32}, {"optimizer": "sgd"}, {"precision": "bf16"}
    ]  # fmt: skip
    assert two_ranks.run(load_elsewhere, saved, changes)[0] == [
        f"4: {path} is of another model\n"
        "  because it was made with gpt2, this run trains gpt2; its parameters differ\n\n"
        f"hint: resume with the plan the run was started with, {anew}",
        f"4: {path} was made with global batch 6, this run has global batch 8\n\n"
        f"hint: resume with global batch 6, {anew}",
        f"4: {path} was made with sequence length 64, this run has sequence length 32\n\n"
        f"hint: resume with sequence length 64, {anew}",
        f"4: {path} was made with optimizer adamw, this run has optimizer sgd\n\n"
        f"hint: resume with optimizer adamw, {anew}",
        f"4: {path} was made with precision fp32, this run has precision bf16\n\n"
        f"hint: resume with precision fp32, {anew}",
    ]


def save_when_one_rank_cannot(folder: Path, zero_stage: int, failing_file: str) -> tuple[str, list[str], bool]:
    """A good checkpoint, then one where the disk is full for rank 1 (or rank 0) at one file; runs on ranks."""
    engine = start(plan_for(zero_stage), dropout=0.0)
    save_at(engine, folder, 1)
    usual, written = torch.save, Path.write_bytes

    def torch_save(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if re.search(failing_file, str(path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        usual(value, path, *args, **kwargs)

    def write_bytes(path: Path, data: bytes) -> int:
        if re.search(failing_file, str(path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return written(path, data)

    torch.save, Path.write_bytes = torch_save, write_bytes  # type: ignore[method-assign]  # the disk is full
    try:
        save_at(engine, folder, 2)
        message = "saved"
    except CheckpointError as error:
        message = str(error)
    finally:
        torch.save, Path.write_bytes = usual, written  # type: ignore[method-assign]  # as before
    loaded = checkpoint.load(engine, folder).progress.step
    save_at(engine, folder, 3)  # the engine and the ranks still work together
    names = sorted(path.name for path in folder.iterdir())
    stop(engine)
    return message, names, loaded == 1


@pytest.mark.parametrize(
    ("zero_stage", "rank", "failing_file", "left"),
    [
        (2, 1, "step-000002.*rank_1_mp.*optim", "step-000001"),
        (3, 1, "step-000002.*rank_1_mp.*model", "step-000001"),
        (1, 0, "step-000002.*mp_rank_00_model", "step-000001"),
        (2, 1, "step-000002.*rng_rank_1", "step-000001"),
        (2, 0, "step-000002.*training.json", "step-000001"),
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
        assert re.fullmatch(rf"  because rank {rank}: No space left on device: .*", lines[1]), lines[1]
        assert lines[2:] == [
            "  because the last good checkpoint is step-000001",
            "",
            "hint: make room, then continue with --resume",
        ]
        assert names == ["latest", left, "step-000003"]
        assert loaded


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("only root may mount a small tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(folder: Path) -> list[str]:
    """Save until the disk is full, then load; runs on ranks."""
    engine = start(plan_for(2), dropout=0.0)
    said = []
    for step in (1, 2):
        try:
            save_at(engine, folder, step)
            said.append(f"saved {step}")
        except CheckpointError as error:
            said.append(str(error).splitlines()[1])
    said.append(f"loaded {checkpoint.load(engine, folder).progress.step}")
    stop(engine)
    return said


def test_a_really_full_disk_leaves_the_last_checkpoint(small_disk: Path, two_ranks: Ranks) -> None:
    for said in two_ranks.run(fill, small_disk / "checkpoints"):
        assert (said[0], said[2]) == ("saved 1", "loaded 1")
        assert re.search(r"rank \d: (No space left|.* cannot be written, .* MiB are free there)", said[1]), said


class Reversed:
    """A stand-in for a tokenizer."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def trained_and_saved(folder: Path, zero_stage: int, precision: str) -> tuple[float, bool]:
    """Loss of the trained model before saving it; runs on ranks."""
    engine = start(plan_for(zero_stage, precision), dropout=0.0)
    steps(engine, 0, 3)
    save_model(engine, folder, Reversed())
    loss = evaluate(engine, ragged_samples(5)).loss
    save_model(engine, folder, Reversed())  # in place of the first
    tied = engine.module.get_input_embeddings().weight is engine.module.get_output_embeddings().weight
    stop(engine)
    return loss, tied


def loss_of_pretrained(folder: Path, precision: torch.dtype) -> float:
    """The loss of the saved model in one process, plain PyTorch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.dtype == precision
    loss, targets = 0.0, 0
    for sample in ragged_samples(5):
        labels = torch.tensor(sample["labels"])[1:]
        with torch.no_grad():
            logits = model.double()(input_ids=torch.tensor([sample["input_ids"]])).logits[0, :-1]
        loss += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        targets += int((labels != -100).sum())
    return loss / targets


@pytest.mark.parametrize(
    ("zero_stage", "precision"), [(0, "fp32"), pytest.param(2, "bf16", marks=pytest.mark.exhaustive), (3, "bf16")]
)
def test_the_final_model_loads_with_from_pretrained_and_has_the_same_loss(
    zero_stage: int, precision: str, tmp_path: Path, two_ranks: Ranks
) -> None:
    folder = tmp_path / "model"
    (loss, tied), _ = two_ranks.run(trained_and_saved, folder, zero_stage, precision)
    expected, tolerance = {"fp32": (torch.float32, 1e-6), "bf16": (torch.bfloat16, 2e-3)}[precision]
    assert tied
    assert loss_of_pretrained(folder, expected) == pytest.approx(loss, rel=tolerance)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
