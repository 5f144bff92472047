"""A run stopped anywhere goes on anywhere: on other ranks, under another ZeRO stage, with other things offloaded."""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from bench.ranks import Ranks
from frugal.checkpoint import loading, manifest, resume_checks, saving
from frugal.checkpoint.manifest import Manifest
from frugal.checkpoint.progress import Progress
from frugal.config.optimizers import Optimizer
from frugal.data.batches import GlobalBatches, Position
from frugal.engine.engine import Engine
from frugal.errors import PlanMismatchError
from tests.engine.engines import plan_here, running
from tests.engine.gradients import bounds_of_run
from tests.engine.small_models import ragged_samples, tiny_gpt2
from tests.kernels import needs_cpu_adam

DATA = ragged_samples(14, longest=24)
STOP, END = 3, 5
Layout = tuple[int, int]  # ranks, ZeRO stage


@contextmanager
def started(zero_stage: int, *, seed: int = 0, frozen: bool = False, **how: Any) -> Iterator[Engine]:
    """Yield an engine whose parameters lie unevenly: several sub-groups, some small parameters whole on every rank."""
    strategy = {"persistence_threshold_elements": 100, "sub_group_elements": 9000, **how.get("strategy", {})}
    plan = plan_here(zero_stage, 4, 2, {"learning_rate": 1e-2, **how.get("request", {})}, **strategy)
    get_accelerator().is_fp16_supported = lambda: True  # of DeepSpeed's CPU accelerator, which is too modest
    model = tiny_gpt2(seed=seed, n_layer=1, n_embd=40)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not (frozen and "mlp" in name)
    with running(plan, model, learning_rate_schedule=lambda step: 1 / (1 + step)) as engine:
        yield engine


@functools.cache
def bounds() -> tuple[float, float, float]:
    """Return how far losses, norms and weights of such runs may be apart, relative."""
    batches = [batch[:] for batch in itertools.islice(GlobalBatches(DATA, global_batch=4).iterate(), END)]
    return bounds_of_run(lambda: tiny_gpt2(n_layer=1, n_embd=40), batches, learning_rate=1e-2)


def steps(engine: Engine, position: Position, number: int) -> tuple[list[tuple[float, float]], Position]:
    """Loss and learning rate of each step, and where the order stands then."""
    batches, found = GlobalBatches(DATA, global_batch=4), []
    for _ in range(number):
        batch = batches.at(position)
        result = engine.train_step(batch)
        found.append((result.loss, result.learning_rate))
        position = batch.end
    return found, position


def stopped(folder: Path, zero_stages: list[int], how: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """For each stage an uninterrupted run, which leaves a checkpoint on its way; runs on ranks."""
    runs = []
    for zero_stage in zero_stages:
        path = folder / f"{dist.get_world_size()}-{zero_stage}"
        with started(zero_stage, **how) as engine:
            before, position = steps(engine, Position(), STOP)
            saving.save(engine, path, Progress(step=STOP, position=position))
            after, _ = steps(engine, position, END - STOP)
        runs.append(before + after)
    return runs


def continued(
    folders: list[Path], zero_stages: list[int], how: dict[str, Any], save: bool = False
) -> dict[tuple[str, int], Any]:
    """Loss and learning rate after continuing from each folder under each stage; runs on ranks."""
    found = {}
    for zero_stage in zero_stages:
        layout = f"{dist.get_world_size()}-{zero_stage}"
        with started(zero_stage, seed=1, **how) as engine:  # other weights: all must come from the checkpoint
            for folder in folders:
                progress = loading.load(engine, folder).progress
                assert str(folder) not in Path("/proc/self/maps").read_text(), "nothing stays mapped"
                if save:
                    saving.save(engine, folder.with_name(f"{folder.name}-to-{layout}"), progress)
                found[folder.name, zero_stage], _ = steps(engine, progress.position, END - progress.step)
    return found


def check(ranks: dict[int, Ranks], sources: list[Layout], targets: list[Layout], folder: Path) -> int:
    """Continue every source on every target; how many there were."""

    def by_world_size(layouts: list[Layout]) -> Iterator[tuple[int, list[int]]]:
        for world_size, group in itertools.groupby(sorted(layouts), key=lambda layout: layout[0]):
            yield world_size, [zero_stage for _, zero_stage in group]

    whole = None
    for world_size, zero_stages in by_world_size(sources):
        for run in ranks[world_size].run(stopped, folder, zero_stages, {})[0]:
            whole = whole or run
            assert [loss for loss, _ in run] == pytest.approx([loss for loss, _ in whole], rel=bounds()[0])
    assert whole is not None
    folders = [folder / f"{world_size}-{zero_stage}" for world_size, zero_stage in sources]
    number, of_losses = 0, bounds()[0]
    for world_size, zero_stages in by_world_size(targets):
        found = ranks[world_size].run(continued, folders, zero_stages, {}, timeout=900)[0]
        for (source, zero_stage), run in found.items():
            where = f"{source} -> {world_size}-{zero_stage}"
            assert [loss for loss, _ in run] == pytest.approx([loss for loss, _ in whole[STOP:]], rel=of_losses), where
            assert [rate for _, rate in run] == [rate for _, rate in whole[STOP:]], where
            number += 1
    return number


def test_any_number_of_ranks_and_any_stage_continue_any_other(
    tmp_path: Path, one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks
) -> None:
    ranks = {1: one_rank, 2: two_ranks, 3: three_ranks}
    sources = [(1, 1), (2, 0), (2, 2), (3, 3)]
    targets = [(1, 3), (2, 1), (3, 2)]
    assert check(ranks, sources, targets, tmp_path) == 12


@pytest.mark.exhaustive
def test_all_of_one_to_four_ranks_and_stages_continue_all_others(
    tmp_path: Path, one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks
) -> None:
    four_ranks = Ranks(4)
    ranks = {1: one_rank, 2: two_ranks, 3: three_ranks, 4: four_ranks}
    layouts = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))
    try:
        assert check(ranks, layouts, layouts, tmp_path) == 256
    finally:
        four_ranks.close()


# What else is kept, compared element by element: a checkpoint read and at once written on another layout.


def states(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every state of every parameter in a checkpoint, whole."""
    path = manifest.newest_checkpoint(folder)
    assert path is not None
    saved = loading.Saved(path, manifest.read(path))
    many, _ = saved.states(None, (0, 0))
    found = {}
    for frozen, kinds in ((False, [loading.MASTER, *many]), (True, [loading.FROZEN])):
        for name, num_elements in saved.parameters(frozen=frozen).items():
            for kind in kinds:
                found[name, kind] = torch.empty(num_elements)
                saved.copy(name, 0, found[name, kind], kind, casts=True)
    return found


ON_HOST: dict[str, Any] = {"strategy": {"offload_optimizer": "cpu"}}
BF16: dict[str, Any] = {"request": {"precision": "bf16"}}
BF16_STATES: dict[str, Any] = {"request": {"precision": "bf16", "optimizer": Optimizer(states="bf16")}}
VARIATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # as it was, as it goes on, states a parameter
    "bf16": (BF16, BF16, 2),
    "states in bf16": (BF16_STATES, BF16_STATES, 2),
    "states in bf16, to the host": (BF16_STATES, BF16_STATES | ON_HOST, 2),
    "fp16": ({"request": {"precision": "fp16"}}, {"request": {"precision": "fp16"}}, 2),
    "frozen": ({"frozen": True}, {"frozen": True}, 2),
    "momentum": (*[{"request": {"optimizer": Optimizer(name="sgd", momentum=0.9)}}] * 2, 1),
    "no momentum": (*[{"request": {"optimizer": Optimizer(name="sgd")}}] * 2, 0),
    "other kernels": ({}, {"request": {"optimizer": Optimizer(implementation="for-loop")}}, 2),
    "to the host": (BF16, BF16 | ON_HOST, 2),
    "from the host": (BF16 | ON_HOST, BF16, 2),
}


@pytest.mark.parametrize(
    "variation",
    [
        "fp16",
        "frozen",
        "momentum",
        "from the host",
        pytest.param("states in bf16, to the host", marks=needs_cpu_adam),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("bf16", "states in bf16", "no momentum", "other kernels", "to the host")
        ),
    ],
)
def test_no_element_changes(variation: str, tmp_path: Path, one_rank: Ranks, two_ranks: Ranks) -> None:
    before, after, num_states = VARIATIONS[variation]
    ((whole,), _) = two_ranks.run(stopped, tmp_path, [2], before)
    (found,) = one_rank.run(continued, [tmp_path / "2-2"], [3], after, save=True)
    (again, _) = two_ranks.run(continued, [tmp_path / "2-2-to-1-3"], [2], before)
    assert again["2-2-to-1-3", 2] == whole[STOP:]
    tolerance = bounds()[0] if before.get("request", {}).get("precision") is None else 4 * 2**-8  # of bf16's rounding
    assert [loss for loss, _ in found["2-2", 3]] == pytest.approx([loss for loss, _ in whole[STOP:]], rel=tolerance)
    was, now = states(tmp_path / "2-2"), states(tmp_path / "2-2-to-1-3")
    assert len({kind for _, kind in was} - {loading.MASTER, loading.FROZEN}) == num_states
    assert was.keys() == now.keys()
    for key, tensor in was.items():
        assert torch.equal(tensor, now[key]), key
    assert all(tensor.abs().max() > 0 for (_, kind), tensor in was.items() if kind == loading.MASTER)


def made_by(world_size: int, strategy: str, offload: tuple[str, str] = ("none", "none"), **values: Any) -> Manifest:
    recipe = {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01, "momentum": None, **values}
    return Manifest(
        step=7, world_size=world_size, zero_stage=2, offload=offload, strategy=strategy, optimizer="adamw",
        model="gpt2", shapes="", recipe={"gradient_clipping": 1.0, **recipe}, plan_digest="", versions={}, files={},
    )  # fmt: skip


def test_it_is_said_what_changes_and_what_does_not() -> None:
    before = made_by(4, "ZeRO-2, activation checkpointing off")
    for after, said in (
        (
            made_by(1, "ZeRO-3, activation checkpointing full, optimizer in host memory"),
            "4 ranks -> 1 rank, ZeRO-2 -> ZeRO-3, activation checkpointing off -> activation checkpointing full, "
            "optimizer in host memory; global batch, order and learning rate are unchanged",
        ),
        (
            made_by(4, "ZeRO-2, activation checkpointing off", learning_rate=1e-4, momentum=0.9),
            "learning rate 0.001 -> 0.0001, no momentum -> 0.9; global batch and order are unchanged",
        ),
    ):
        changes = resume_checks.resume_changes(before, after)
        assert resume_checks.describe_changes(changes, 40, Path("run")) == f"resumed at step 40 of run: {said}"
    assert resume_checks.resume_changes(before, before) == ()


def test_states_that_cannot_be_cut_anew_are_refused() -> None:
    before, after = (made_by(number, "ZeRO-2, activation checkpointing off") for number in (2, 4))
    resume_checks.check_other_layout(Path("run"), before, after)
    eight_bit = made_by(4, "ZeRO-2, activation checkpointing off", optimizer="adamw-8bit")
    with pytest.raises(PlanMismatchError, match="adamw-8bit keeps states of many elements together") as raised:
        resume_checks.check_other_layout(Path("run"), before, eight_bit)
    assert "it would change: 2 ranks -> 4 ranks" in str(raised.value)
    on_disk = made_by(2, "ZeRO-2, activation checkpointing off, optimizer on NVMe", ("nvme", "none"))
    with pytest.raises(PlanMismatchError, match="states on NVMe are in files that only the layout"):
        resume_checks.check_other_layout(Path("run"), before, on_disk)
