"""A small run with dropout, a decaying learning rate and seeded generators: all that a checkpoint has to keep."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from frugal import files
from frugal.checkpoint import loading, manifest, saving
from frugal.checkpoint.progress import Progress
from frugal.data.batches import Position
from frugal.data.sources import Provenance
from frugal.engine.engine import Engine
from frugal.errors import FrugalError
from frugal.planning.plan import Plan
from tests.engine.engines import plan_here, running
from tests.engine.small_models import ragged_samples, tiny_gpt2

GLOBAL_BATCH = 6


def plan_for(zero_stage: int = 2, precision: str = "fp32", **strategy: Any) -> Plan:
    return plan_here(zero_stage, GLOBAL_BATCH, 2, {"precision": precision, "learning_rate": 1e-2}, **strategy)


@contextmanager
def started(plan: Plan | None = None, *, seed: int = 0, dropout: float = 0.0, **changes: Any) -> Iterator[Engine]:
    """Yield an engine with a decaying learning rate and generators seeded by rank."""
    model = tiny_gpt2(seed=seed, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **changes)
    random.seed(seed)
    torch.manual_seed(1000 * seed + dist.get_rank())
    with running(plan or plan_for(), model, learning_rate_schedule=lambda step: 1 / (1 + step)) as engine:
        yield engine


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
        return {str(key): _numbers(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [_numbers(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else None


def save_at(engine: Engine, folder: Path, step: int, **changes: Any) -> Path:
    progress = Progress(step=step, position=Position(1, step), data=Provenance(fingerprint="corpus"), **changes)
    return saving.save(engine, folder, progress)


def two_saves(folder: Path) -> None:
    """Checkpoints at steps 2 and 4; runs on ranks."""
    with started() as engine:
        for step in (2, 4):
            save_at(engine, folder, step)


def load_each(folders: list[Path]) -> list[str]:
    """For each folder the step loaded and what was refused, or the error; one engine; runs on ranks."""
    answers = []
    with started() as engine:
        for folder in folders:
            try:
                loaded = loading.load(engine, folder)
                answers.append(f"step {loaded.progress.step}: {'; '.join(loaded.refused)}")
            except FrugalError as error:
                answers.append(f"{type(error).__name__}: {error}")
    return answers


def relisted(path: Path) -> None:
    """Give the file the checksum that it has now, as whoever made it on purpose would."""
    made_by = manifest.read(path.parent)
    rank = made_by.files[path.name].rank
    changed = replace(made_by, files={**made_by.files, path.name: manifest.file_entry(path, rank)})
    files.write_file(path.parent / manifest.MANIFEST, msgspec.json.encode(changed))
