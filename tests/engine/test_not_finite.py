"""A loss or a gradient that is not finite: nothing is updated, and the run stops or leaves the batch out."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import stage3
from torch.utils._python_dispatch import TorchDispatchMode

from bench.ranks import Ranks
from bench.runs import records
from frugal.config.run_settings import RunSettings
from frugal.data.batches import GlobalBatches
from frugal.engine.engine import Engine
from frugal.engine.loop import MOST_IN_A_ROW
from frugal.errors import NumbersError
from frugal.models.objectives import Batch, CausalLM
from tests.engine.engines import plan_here, run_loop, running
from tests.engine.gradients import whole
from tests.engine.small_models import ragged_samples

SPOILT_LENGTH = 71  # tokens of a sample that spoils its batch; all others are shorter


class Spoiling(CausalLM):
    """Gives `spoilt` for a loss, or its gradient, where a micro-batch has a sample of that length."""

    def __init__(self, spoilt: float = float("nan"), *, gradient_only: bool = False) -> None:
        super().__init__()
        self.spoilt, self.gradient_only = spoilt, gradient_only

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        """The sum, or what is in its place."""
        loss = super().loss_sum(model, batch)
        if batch["input_ids"].shape[1] != SPOILT_LENGTH:
            return loss
        if not self.gradient_only:
            return loss + self.spoilt  # the gradient stays finite
        loss.register_hook(lambda gradient: gradient * self.spoilt)
        return loss


def spoilt_samples(number: int, places: tuple[int, ...], seed: int = 0) -> list[dict[str, list[int]]]:
    samples = ragged_samples(number, seed=seed)
    for place in places:
        samples[place] = {"input_ids": [7] * SPOILT_LENGTH}
    return samples


def states(engine: Engine) -> list[list[float]]:
    """Everything that an optimizer step writes to, on this rank."""
    kept = [each for state in engine.zero.inner.state.values() for each in state.values()]
    return [tensor.double().flatten().tolist() for tensor in (*whole(engine).values(), *kept)]


@contextmanager
def engine_of(zero_stage: int, options: dict[str, Any], objective: CausalLM) -> Iterator[Engine]:
    request, strategy = {"seq_len": 128, **options.get("request", {})}, options.get("strategy", {})
    plan = plan_here(zero_stage, 8, 2, request, **strategy)
    with running(plan, None, objective, learning_rate_schedule=lambda step: 1 / (1 + step)) as engine:
        yield engine


def spoilt_in_the_midst(
    zero_stage: int, options: dict[str, Any], spoilt: float, gradient_only: bool
) -> tuple[bool, list[Any]]:
    """Three steps, the second one spoilt on one rank: whether it left everything as it was, and what the steps gave."""
    with engine_of(zero_stage, options, Spoiling(spoilt, gradient_only=gradient_only)) as engine:
        results = [engine.train_step(ragged_samples(8))]
        before = states(engine)
        results.append(engine.train_step(spoilt_samples(8, (5,))))
        is_untouched = states(engine) == before
        results.append(engine.train_step(ragged_samples(8, seed=2)))
    return is_untouched, [(r.is_finite, r.learning_rate, r.loss if r.is_finite else None, r.grad_norm) for r in results]


def never_spoilt(zero_stage: int, options: dict[str, Any]) -> list[Any]:
    """The same without the second step, which is only counted."""
    with engine_of(zero_stage, options, CausalLM()) as engine:
        first = engine.train_step(ragged_samples(8))
        engine.update.leave_out()
        last = engine.train_step(ragged_samples(8, seed=2))
    return [(True, r.learning_rate, r.loss, r.grad_norm) for r in (first, last)]


NAN, INF = float("nan"), float("inf")
IN_BF16, ON_HOST = {"request": {"precision": "bf16"}}, {"strategy": {"offload_optimizer": "cpu"}}

UNCLIPPED = {"request": {"gradient_clipping": 0.0}}


@pytest.mark.parametrize(
    ("zero_stage", "options", "spoilt", "gradient_only"),
    [
        (0, UNCLIPPED, INF, True),
        pytest.param(0, {}, NAN, True, marks=pytest.mark.exhaustive),
        pytest.param(1, {}, INF, False, marks=pytest.mark.exhaustive),
        (2, IN_BF16, NAN, True),
        (3, ON_HOST, NAN, True),
        pytest.param(1, UNCLIPPED, INF, True, marks=pytest.mark.exhaustive),
        pytest.param(2, ON_HOST, INF, False, marks=pytest.mark.exhaustive),
        pytest.param(3, IN_BF16, NAN, False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_batch_whose_numbers_are_not_finite_changes_nothing_on_any_rank(
    zero_stage: int, options: dict[str, Any], spoilt: float, gradient_only: bool, two_ranks: Ranks
) -> None:
    first, last = two_ranks.run(never_spoilt, zero_stage, options)[0]
    for is_untouched, results in two_ranks.run(spoilt_in_the_midst, zero_stage, options, spoilt, gradient_only):
        assert is_untouched
        assert results == [first, (False, results[1][1], None, None), last]
        assert results[1][1] == first[1] / 2  # the learning rate is that of the step, spoilt or not


class Counting(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run."""
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def searches(zero_stage: int, options: dict[str, Any]) -> tuple[int, int]:
    """Searches of one gradient for what is not finite in an optimizer step, and norms of one."""
    with engine_of(zero_stage, options, CausalLM()) as engine:
        update = engine.update.update

        def counted(loss: Callable[[], float]) -> bool:
            with counting:
                return update(loss)

        counting = Counting()
        engine.update.update = counted  # type: ignore[method-assign]
        engine.train_step(ragged_samples(8))
    return counting.counts["aten.amax.default"], counting.counts["aten.linalg_vector_norm.default"]


@pytest.mark.skipif(not hasattr(stage3, "is_invalid_grad_norm"), reason="before DeepSpeed 0.19.8 no norm is checked")
@pytest.mark.parametrize(("zero_stage", "options"), [(2, IN_BF16), pytest.param(1, {}, marks=pytest.mark.exhaustive)])
def test_the_norm_of_gradients_is_the_only_search_for_what_is_not_finite(
    zero_stage: int, options: dict[str, Any], two_ranks: Ranks
) -> None:
    for searched, norms in two_ranks.run(searches, zero_stage, options):
        assert searched == 0
        assert norms > 1


# In a run.

SAMPLES = spoilt_samples(20, (13,))


def train(folder: Path, on_nan: str, *, resume: bool = False, all_spoilt: bool = False) -> str:
    """Seven steps on 20 samples, one of which spoils two batches; what is said at the end. Runs on ranks."""
    settings = RunSettings(
        steps=30 if all_spoilt else 7, eval_every=0, save_every=1, out=folder, on_nan=on_nan, resume=resume
    )
    samples = spoilt_samples(20, tuple(range(20))) if all_spoilt else SAMPLES
    message = ""
    with running(plan_here(2, 6, 2, {"seq_len": 128}), None, Spoiling()) as engine:
        try:
            run_loop(engine, GlobalBatches(samples, global_batch=6), settings)
        except NumbersError as error:
            message = f"{error.exit_code} {error}"
    return message


def trajectory(folder: Path) -> list[tuple[Any, ...]]:
    """Events, steps and losses."""
    return [(each["event"], each["step"], each.get("loss"), each.get("samples")) for each in records(folder)]


def test_a_run_stops_before_it_harms_itself_or_leaves_such_batches_out(tmp_path: Path, two_ranks: Ranks) -> None:
    batches = GlobalBatches(SAMPLES, global_batch=6).iterate()
    spoilt = {step: batch.indices.tolist() for step in range(1, 8) if 13 in (batch := next(batches)).indices}
    first = min(spoilt)
    assert len(spoilt) >= 2 and first > 1
    skipped, stopped = tmp_path / "skip", tmp_path / "stop"
    assert two_ranks.run(train, skipped, "skip") == ["", ""]
    left_out = [(step, samples) for event, step, _, samples in trajectory(skipped) if event == "left_out"]
    assert left_out == list(spoilt.items())
    (message, other) = two_ranks.run(train, stopped, "stop")
    assert message == other
    assert message.startswith(f"7 the loss is NaN in step {first}\n")
    assert f"its global batch is samples {', '.join(map(str, spoilt[first]))} of the training data" in message
    assert f"the last good checkpoint is step-{first - 1:06d}" in message and "--on-nan skip" in message
    assert (stopped / "checkpoints" / "latest").read_text() == f"step-{first - 1:06d}\n"
    assert two_ranks.run(train, stopped, "skip", resume=True) == ["", ""]
    assert trajectory(stopped) == trajectory(skipped)


@pytest.mark.exhaustive
def test_batches_are_not_left_out_for_ever(tmp_path: Path, two_ranks: Ranks) -> None:
    message = two_ranks.run(train, tmp_path, "skip", all_spoilt=True)[0]
    lines = message.splitlines()
    assert lines[0] == f"7 the loss is NaN in step {MOST_IN_A_ROW + 1}"
    assert lines[1] == f"  because {MOST_IN_A_ROW} batches before it were left out, one after the other"
