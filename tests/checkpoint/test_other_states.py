"""A checkpoint with its checksums, and other tensors or numbers than were saved: refused, or of no effect."""

import copy
import hashlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ranks import Ranks
from frugal.checkpoint import loading
from frugal.engine.engine import Engine
from frugal.errors import CheckpointError
from tests.engine.checkpoints import plan_for, relisted, save_at, started, steps

Place = tuple[Any, ...]
Outcome = tuple[list[tuple[float, float]], str] | str

TENSORS = {
    "shorter": lambda tensor: tensor.reshape(-1)[:-1].clone(),
    "empty": lambda tensor: torch.zeros(0, dtype=tensor.dtype),
    "one element": lambda tensor: tensor.reshape(-1)[:1].clone(),
    "longer": lambda tensor: torch.cat([tensor.reshape(-1)] * 2 + [torch.ones(1, dtype=tensor.dtype)]),
    "in fp64": lambda tensor: tensor.to(torch.float64),
    "in int32": lambda tensor: tensor.to(torch.int32),
    "with a dimension more": lambda tensor: tensor.unsqueeze(0).clone(),
    "sparse": lambda tensor: tensor.to_sparse(),
    "no tensor": lambda _: "tensor",
}
COUNTS = [-1, float("nan"), float("inf"), 1 << 70, "7", None, [], True]
NAMES = ("missing", "renamed", "extra")
WHOLE = "its files are whole, and do not hold the states of this run\n  because "


def leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Tensors, numbers and flags in nested dicts and lists, with the keys that lead to each."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*place, key))
    elif isinstance(value, list):
        for key, each in enumerate(value):
            yield from leaves(each, (*place, key))
    elif isinstance(value, torch.Tensor | int | float):
        yield place, value


def changed(states: Any, place: Place, change: str) -> None:
    """Change one leaf of nested states in place."""
    *path, last = place
    for key in path:
        states = states[key]
    if change in TENSORS:
        states[last] = TENSORS[change](states[last])
    elif change == "extra":
        copied = copy.deepcopy(states[last])
        states.append(copied) if isinstance(states, list) else states.update({f"{last} again": copied})
    elif change in NAMES:
        kept = states.pop(last)
        if change == "renamed":
            states.append(kept) if isinstance(states, list) else states.update({f"{last}x": kept})
    else:
        number = COUNTS[int(change)]
        states[last] = torch.tensor(number) if isinstance(states[last], torch.Tensor) else number


def changes_of(leaf: Any) -> list[str]:
    is_large = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
    counts = [str(i) for i, count in enumerate(COUNTS) if not isinstance(leaf, torch.Tensor) or type(count) is float]
    return [*(TENSORS if isinstance(leaf, torch.Tensor) else ()), *NAMES, *([] if is_large else counts)]


def outcomes(folder: Path, zero_stage: int, only: list[tuple[str, Place, str]] | None, number: int) -> list[str]:
    """Change a checkpoint in one place after another: which of them had another effect than to be refused; on ranks.

    `folder` has one of one rank at stage 2. `only`: these changes; None: `number` of all there are.
    """
    path = folder / "step-000002"
    wrong, refused = [], 0
    every = [
        (file.name, place, change)
        for file in sorted(path.glob("*.pt"))
        for place, leaf in leaves(torch.load(file, weights_only=False))
        if place
        for change in changes_of(leaf)
    ]
    listed = (path / "manifest.json").read_bytes()
    with started(plan_for(zero_stage)) as engine:
        untouched = load(engine, folder)
        assert not isinstance(untouched, str), untouched
        for name, place, change in only or random.Random(0).sample(every, min(number, len(every))):
            file = path / name
            kept = file.read_bytes()
            states = torch.load(file, weights_only=False)
            changed(states, place, change)
            torch.save(states, file)
            relisted(file)
            found = load(engine, folder)
            if isinstance(found, str):
                refused += 1
                assert only is None or (WHOLE in found and "hint: move step-000002 away to continue from the " in found)
            if not isinstance(found, str) and found != untouched:
                wrong.append(f"{name} {place} {change}: {found} instead of {untouched}")
            file.write_bytes(kept)
            (path / "manifest.json").write_bytes(listed)
        if load(engine, folder) != untouched:
            wrong.append("after all of them the checkpoint as it was saved loads as another")
    return [f"{refused} refused", *wrong]


def load(engine: Engine, path: Path) -> Outcome:
    """Return what comes of a checkpoint: the next step and all states, or why it is refused."""
    try:
        loading.load(engine, path)
    except CheckpointError as error:
        return str(error)
    losses, flat = steps(engine, 2, 3), engine.zero.flat_tensors()
    kept = [each for part in flat for each in (part, *engine.zero.inner.state[part].values())]
    content = repr([each.detach().tolist() for each in kept if isinstance(each, torch.Tensor)])
    return losses, hashlib.sha256(content.encode()).hexdigest()


def save(folder: Path, zero_stage: int) -> None:
    """Save a checkpoint after two steps; on ranks."""
    with started(plan_for(zero_stage)) as engine:
        steps(engine, 0, 2)
        save_at(engine, folder, 2)


MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
ADAM = ("optimizer_state_dict", "base_optimizer_state", "state", 0)
SOME: list[tuple[str, Place, str]] = [
    (OPTIMIZER, (*ADAM, "exp_avg"), "shorter"),  # in which fused AdamW wrote past the end
    (OPTIMIZER, (*ADAM, "exp_avg_sq"), "one element"),
    (OPTIMIZER, (*ADAM, "exp_avg_sq"), "in fp64"),
    (OPTIMIZER, (*ADAM, "exp_avg"), "renamed"),
    (OPTIMIZER, (*ADAM, "step"), "1"),
    (OPTIMIZER, ("optimizer_state_dict", "single_partition_of_fp32_groups", 0), "shorter"),
    (OPTIMIZER, ("optimizer_state_dict", "single_partition_of_fp32_groups", 0), "one element"),
    (OPTIMIZER, ("optimizer_state_dict", "single_partition_of_fp32_groups"), "missing"),
    (OPTIMIZER, ("optimizer_state_dict",), "missing"),
    (MODEL, ("module",), "missing"),
    (MODEL, ("global_steps",), "0"),
    (MODEL, ("module", "transformer.wte.weight"), "in fp64"),  # only read on the same layout
    (MODEL, ("lr_scheduler", "last_epoch"), "1"),
    ("rng_rank_0.pt", ("torch",), "shorter"),
]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_what_is_not_as_the_engine_has_it_is_refused_on_the_same_layout_and_on_another(
    zero_stage: int, tmp_path: Path, one_rank: Ranks
) -> None:
    one_rank.run(save, tmp_path, 2)
    assert one_rank.run(outcomes, tmp_path, zero_stage, SOME, 0) == [[f"{len(SOME) - (zero_stage == 3)} refused"]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("saved_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_any_change_is_refused_or_has_no_effect(
    saved_stage: int, zero_stage: int, tmp_path: Path, one_rank: Ranks
) -> None:
    one_rank.run(save, tmp_path, saved_stage)
    ((refused, *wrong),) = one_rank.run(outcomes, tmp_path, zero_stage, None, 300, timeout=1800)
    assert wrong == []
    is_little_read = zero_stage == 0 < saved_stage  # masters and moments of all that DeepSpeed saves
    assert int(refused.split()[0]) > (5 if is_little_read else 15)
    shutil.rmtree(tmp_path)
