"""Out of memory: what is tried, what is kept, and what is said where nothing is left. The matrix is in tests/faults."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from bench.runs import records
from frugal.config.optimizers import Optimizer
from frugal.config.run_settings import RunSettings
from frugal.data.batches import GlobalBatches
from frugal.engine import oom_limits, train_step
from frugal.engine.engine import Engine
from frugal.engine.oom_limits import AdaptiveLimits, LearntLimits, OutOfMemory, OutOfMemoryReport, report_of
from frugal.engine.oom_retry import CachedBlocks
from frugal.engine.train_step import evaluate
from frugal.errors import FrugalError, OutOfMemoryError
from frugal.models.objectives import CausalLM
from frugal.planning.plan import Plan
from tests.engine.engines import losses_of, plan_here, run_loop, running
from tests.engine.gradients import bound_of_losses
from tests.engine.small_models import SkipNet, points, ragged_samples, skip_net, tiny_gpt2

MIB = 1 << 20


def a_report(rank: int = 1, request: int | None = 2 << 30, allocated: int = 0, reserved: int = 0) -> OutOfMemoryReport:
    return OutOfMemoryReport(rank, request, allocated, reserved, "backward", "models/gpt2.py:7 (forward)")


def a_plan(total_bytes: int = 0, **strategy: Any) -> Plan:
    plan = plan_by_hand(world_size=2, global_batch=16, micro_batch=8, zero_stage=2, strategy=strategy)
    return replace(plan, memory=replace(plan.memory, total_bytes=total_bytes, activations=total_bytes))


# What an error tells.


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...", 2560 * MIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None),
    ],
)  # fmt: skip
def test_the_request_is_read_from_the_error(text: str, number: int | None) -> None:
    report = report_of(raised(RuntimeError(text)), rank=3)
    assert (report.rank, report.request_bytes, report.phase) == (3, number, "forward")
    assert report.where.startswith("engine/test_oom_retry.py:")


def test_memory_that_runs_out_in_an_evaluation_is_said_to() -> None:
    class Full:
        @property
        def device(self) -> torch.device:
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError) as caught:
        train_step._evaluated(Full(), [], [], None)  # type: ignore[arg-type]
    assert report_of(caught.value, rank=0).phase == "evaluation"


def test_the_allocators_own_error_on_a_cpu_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert report_of(caught.value, rank=0).request_bytes == 1 << 52


def test_fragmentation_is_where_enough_is_held_and_not_in_use() -> None:
    assert a_report(request=MIB, allocated=5 * MIB, reserved=6 * MIB).is_fragmentation
    assert not a_report(request=2 * MIB, allocated=5 * MIB, reserved=6 * MIB).is_fragmentation
    assert not OutOfMemory((a_report(request=MIB, reserved=MIB), a_report())).is_fragmentation  # one really needs more


# What is tried.


def test_cells_are_halved_and_grow_again_one_at_a_time() -> None:
    limits = AdaptiveLimits(a_plan(), SkipNet())
    shortage, sizes = OutOfMemory((a_report(),)), []
    assert limits.lower(shortage, 8).endswith("at most 4 samples a micro-batch")
    assert limits.lower(shortage, 4).endswith("at most 2 samples a micro-batch")
    for _ in range(3 * oom_limits.PATIENCE):
        sizes.append(limits.limits.max_samples[0])
        limits.after_step()
    assert sizes == [2] * 100 + [4] * 100 + [8] * 100


def test_growing_too_early_makes_it_wait_twice_as_long() -> None:
    limits = AdaptiveLimits(a_plan(), SkipNet())
    waited = []
    for _ in range(3):
        limits.lower(OutOfMemory((a_report(),)), 8)
        steps = 1
        while limits.after_step() is None:
            steps += 1
        waited.append(steps)
    assert waited == [100, 200, 400]


def test_what_was_learnt_holds_under_the_same_plan_only() -> None:
    limits = AdaptiveLimits(a_plan(), SkipNet())
    assert limits.learnt() is None
    limits.lower(OutOfMemory((a_report(),)), 8)
    for _ in range(7):
        limits.after_step()
    learnt = limits.learnt()
    assert isinstance(learnt, LearntLimits)
    again = AdaptiveLimits(a_plan(), SkipNet())
    again.recall(learnt)
    assert (again.learnt(), again.limits.max_samples) == (learnt, (4, 4))
    other = AdaptiveLimits(plan_by_hand(world_size=1, global_batch=16, micro_batch=8, zero_stage=2), SkipNet())
    other.recall(learnt)
    assert (other.learnt(), other.limits.max_samples) == (None, (8,))


def test_a_request_beyond_the_whole_plan_is_not_tried_again() -> None:
    limits = AdaptiveLimits(a_plan(total_bytes=100 * MIB), SkipNet())
    with pytest.raises(OutOfMemoryError) as error:
        limits.lower(OutOfMemory((a_report(request=101 * MIB),)), 8)
    assert error.value.what == "a single request for more memory than the whole plan"
    assert "rank 1 asked for 101.0 MiB in backward, models/gpt2.py:7 (forward)" in error.value.because
    assert limits.limits.max_samples == (8, 8)


def test_nothing_left_to_lower_ends_with_the_arithmetic() -> None:
    limits = AdaptiveLimits(a_plan(total_bytes=3 << 30, activation_checkpointing="full"), SkipNet())
    with pytest.raises(OutOfMemoryError) as error:
        limits.lower(OutOfMemory((a_report(allocated=MIB, reserved=MIB),)), 1)
    text = str(error.value)
    assert text.startswith("out of memory with a micro-batch of one sample\n")
    assert "asked for 2.00 GiB with 1.0 MiB of 1.0 MiB in use in backward" in text
    assert "the plan promised 3.00 GiB with 8 samples, of 8.00 GiB that may be used" in text


# On ranks.


def failing(engine: Engine, times: int, rank: int = 1) -> None:
    """The next `times` forwards of layer 1 on one rank find no memory."""
    left = [times if engine.rank == rank else 0]

    def hook(_module: torch.nn.Module, _inputs: Any) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    layers = engine.module.transformer.h if hasattr(engine.module, "transformer") else engine.module.blocks
    layers[1].register_forward_pre_hook(hook)


def three_steps(zero_stage: int, kind: str, mode: str, *, times: int = 0) -> tuple[list[str], list[float], bool]:
    """Three steps, in the first of which `times` forwards find no memory; what is said, the losses, and whether layers
    are recomputed that were not to be. Runs on ranks."""
    said: list[str] = []
    is_gpt2 = kind == "transformers"
    model, objective = (tiny_gpt2(), CausalLM()) if is_gpt2 else skip_net()
    samples: Callable[..., Any] = ragged_samples if is_gpt2 else points
    with running(plan_here(zero_stage, activation_checkpointing=mode), model, objective) as engine:
        engine._say = lambda message, _=None: said.append(message) if message else None  # type: ignore[method-assign]
        failing(engine, times)
        losses = [engine.train_step(samples(8, seed=step)).loss for step in range(3)]
        return said, losses, engine.adaptive_limits.learnt() is not None


@pytest.mark.parametrize(
    ("zero_stage", "kind", "mode"),
    [
        pytest.param(2, "transformers", "off", marks=pytest.mark.exhaustive),
        (3, "plain", "off"),
        pytest.param(3, "transformers", "selective", marks=pytest.mark.exhaustive),
        pytest.param(2, "plain", "selective", marks=pytest.mark.exhaustive),
    ],
)
def test_where_one_sample_does_not_fit_activation_checkpointing_is_switched_on(
    zero_stage: int, kind: str, mode: str, two_ranks: Ranks
) -> None:
    said, losses, recomputes = two_ranks.run(three_steps, zero_stage, kind, mode, times=2)[0]
    assert said == [
        "out of memory: the global batch is run again with at most 1 sample a micro-batch",
        "out of memory with a micro-batch of one sample: from here on activation checkpointing is full, "
        "with at most 2 samples a micro-batch",
    ]
    assert recomputes
    # the plan's micro-batches again, recomputed
    assert losses == two_ranks.run(three_steps, zero_stage, kind, "full")[0][1]


def no_memory(*_args: Any, **_kwargs: Any) -> Any:
    """In place of whatever needs some."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def third_step(where: str = "", zero_stage: int = 2) -> tuple[str, bool, float | None]:
    """Two steps, then no memory on rank 1: what is said, whether weights were written to, and, if not, the third
    loss once there is memory; runs on ranks."""
    for_loop = {"optimizer": Optimizer(implementation="for-loop")}
    plan = plan_here(zero_stage, 4, 1, for_loop, activation_checkpointing="full")
    with running(plan) as engine:
        losses_of(engine, 0, 2)
        zero = engine.deepspeed.optimizer
        owner, name = {
            "update": (zero, "unscale_and_clip_grads"),
            "writing": (torch.Tensor, "sqrt"),  # what Adam takes when it has written the first moment
            "gathering": (getattr(zero, "persistent_parameters", [None])[0], "all_gather"),  # ZeRO-3's last of a step
        }.get(where, (engine.module.transformer.h[1], "forward"))
        message = ""
        with pytest.MonkeyPatch.context() as patch:
            if where and engine.rank == 1:
                patch.setattr(owner, name, no_memory)
            try:
                if where:
                    act = partial(evaluate, engine) if where == "evaluation" else engine.train_step
                    act(ragged_samples(4))
            except FrugalError as error:
                message = f"{error.exit_code} {error.what}"
        is_begun = engine.update.is_begun
        return message, is_begun, None if is_begun else losses_of(engine, 2, 3)[0]


def test_what_cannot_be_recovered_ends_on_every_rank_and_says_whether_the_weights_are_whole(two_ranks: Ranks) -> None:
    ((_, _, loss), _) = two_ranks.run(third_step)
    for where, message, is_begun in (
        ("one sample", "5 out of memory with a micro-batch of one sample", False),
        ("evaluation", "5 out of memory in evaluation with one sample at a time", False),
        ("update", "5 out of memory in the optimizer step", False),
        ("writing", "5 out of memory in the midst of writing weights", True),
    ):
        expected = (message, is_begun, None if is_begun else loss)
        assert two_ranks.run(third_step, where, timeout=60) == [expected] * 2, where


def test_no_memory_to_gather_what_zero_3_keeps_whole_ends_on_every_rank(two_ranks: Ranks) -> None:
    expected = ("5 out of memory in the midst of writing weights", True, None)
    assert two_ranks.run(third_step, "gathering", 3, timeout=60) == [expected] * 2


def train(folder: Path, failures: int, *, resume: bool = False) -> tuple[str, tuple[int, ...], list[float]]:
    """Four steps, a checkpoint only at the end; `failures` forwards of the third step find no memory. Runs on ranks.

    What is said at the end, the limits then, and the losses in the log.
    """
    settings, message = RunSettings(steps=4, eval_every=0, out=folder, resume=resume), ""
    with running(plan_here(2, 8, 4, activation_checkpointing="full")) as engine:
        usual = engine.train_step

        def third_fails(batch: Any) -> Any:
            if engine.deepspeed.global_steps == 2:
                failing(engine, failures)
            return usual(batch)

        engine.train_step = third_fails  # type: ignore[method-assign]  # memory runs out when it is called
        try:
            run_loop(engine, GlobalBatches(ragged_samples(20), global_batch=8), settings)
        except OutOfMemoryError as error:
            message = "\n".join(line for line in str(error).splitlines() if "asked for" not in line)
        limits = engine.limits.max_samples
    return message, limits, [record["loss"] for record in records(folder) if record["event"] == "step"]


def test_a_run_without_memory_saves_its_last_step_and_goes_on_from_there(tmp_path: Path, two_ranks: Ranks) -> None:
    _, limits, whole = two_ranks.run(train, tmp_path / "once", 1)[0]
    assert (limits, len(whole)) == ((2, 2), 4)  # halved in the third step
    ended = tmp_path / "ended"
    message, limits, losses = two_ranks.run(train, ended, 9)[0]
    assert message.startswith("out of memory with a micro-batch of one sample\n")
    assert f"step 2 is saved in {ended}/checkpoints/step-000002" in message
    assert losses == whole[:2]
    message, limits, losses = two_ranks.run(train, ended, 0, resume=True)[0]
    assert (message, limits) == ("", (1, 1))  # what it had learnt
    batches = [batch[:] for batch in itertools.islice(GlobalBatches(ragged_samples(20), global_batch=8).iterate(), 4)]
    rate = plan_by_hand(world_size=2, global_batch=8, micro_batch=4, zero_stage=2).request.learning_rate
    assert losses == pytest.approx(whole, rel=bound_of_losses(tiny_gpt2, batches, learning_rate=rate))


@pytest.mark.parametrize(
    ("lengths", "refusals", "emptied"),
    [
        ((8, 8), (0, 1), 0),  # a step as planned: what it is given again, it needs again
        ((8, 5), (0, 0), 0),
        ((8, 5), (0, 1), 1),
        ((), (0, 1), 1),  # an evaluation
        ((8, 5), (0, 1, 1, 2), 2),  # again where memory was short again, and only there
    ],
)
def test_after_a_shortage_in_micro_batches_of_several_shapes_the_next_step_finds_memory_as_the_first_did(
    lengths: tuple[int, ...], refusals: tuple[int, ...], emptied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, told = [0], iter(refusals)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": next(told)})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: times.append(times.pop() + 1))

    cache = CachedBlocks(torch.device("cuda"))
    for _ in refusals:
        cache.after([{"input_ids": torch.zeros(2, length)} for length in lengths])

    assert times == [emptied]
