"""Parameters of any shape, stride and dtype are trained exactly, dry-run as they are, and kept in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.dryrun.messages import AskDryRun
from frugal.dryrun.run import dry_run
from frugal.engine.measure.two_steps import trial
from frugal.planning.plan import Plan
from tests.engine import unusual_modules
from tests.engine.engines import gradient_of_step, running
from tests.engine.gradients import SGD, Gradient, applied, bound_by, relative_error, weights, with_bound
from tests.engine.small_models import points
from tests.engine.unusual_modules import OBJECTIVE, Unusual, reference

CASES = [
    (0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32"),
    *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((1, "fp32"), (2, "fp32"), (3, "bf16"))),
]  # fmt: skip
ODD = 9_999
"""Elements of a bucket, as a plan by hand or a user's JSON may have them."""


def plan_for(zero_stage: int, precision: str, world_size: int = 2) -> Plan:
    summed_in = {"gradient_accumulation_dtype": "bf16"} if (zero_stage, precision) == (1, "bf16") else {}
    return plan_by_hand(
        world_size=world_size, global_batch=8, micro_batch=2, zero_stage=zero_stage,
        request={**SGD, "precision": precision}, strategy={"reduce_bucket_elements": ODD, **summed_in},
    )  # fmt: skip


def trained(kinds: tuple[str, ...], zero_stage: int, precision: str, world_size: int = 2) -> list[Gradient]:
    """The gradients that are applied to some modules. Runs on ranks."""
    plan = plan_for(zero_stage, precision, world_size)
    return [gradient_of_step(plan, getattr(unusual_modules, kind)(), points(8), OBJECTIVE) for kind in kinds]


@pytest.mark.parametrize(("zero_stage", "precision"), CASES)
def test_they_are_trained_exactly(zero_stage: int, precision: str, two_ranks: Ranks) -> None:
    expected, short = reference(Unusual, 8), reference(Unusual, 8, DTYPES[precision])
    bound = max(bound_by({name: short[name]}, {name: value}) for name, value in expected.items())
    assert sum(value.numel() for value in expected.values()) % 2 == 1
    for (gradient,) in two_ranks.run(trained, ("Unusual",), zero_stage, precision):
        assert relative_error(gradient, expected) < bound_by(short, expected)
        for name, value in expected.items():
            assert relative_error({name: gradient[name]}, {name: value}) < bound, name


EVERYWHERE, COMPILED = (
    ("FrozenComplex", "SameFunctional", "InObjects", "Hidden", "OutsideItself"),
    ("CompiledInPlace", "CompiledFunction"),
)
BELOW_ZERO3 = (
    "ByName",
    "KeptProducts",
    "InferenceMode",
    "WrittenElsewhere",
    "Empty",
    "InSlots",
    "OtherFunctional",
    "Vmapped",
    "TwiceDifferentiated",
)


@pytest.mark.parametrize(
    ("zero_stage", "kinds"),
    [
        (2, EVERYWHERE + BELOW_ZERO3 + ("Compiled",)),
        (3, (*EVERYWHERE, "CompiledFunction")),
        pytest.param(0, EVERYWHERE + COMPILED + BELOW_ZERO3 + ("Compiled",), marks=pytest.mark.exhaustive),
        *(pytest.param(stage, COMPILED, marks=pytest.mark.exhaustive) for stage in (2, 3)),
    ],
)
def test_modules_that_are_used_in_unusual_ways_are_trained_exactly(
    zero_stage: int, kinds: tuple[str, ...], two_ranks: Ranks
) -> None:
    for gradients in two_ranks.run(trained, kinds, zero_stage, "fp32"):
        for kind, gradient in zip(kinds, gradients, strict=True):
            expected, bound = with_bound(reference, getattr(unusual_modules, kind), 8)
            held = {name: each for name, each in expected.items() if each.numel()}
            assert relative_error(gradient, held) < bound, kind


def measured(plan: Plan) -> list[tuple[str, int, int]]:
    """Phase, peak and live bytes of two real steps. Runs on ranks."""
    build = lambda: Unusual().to(DTYPES[plan.request.precision])  # noqa: E731  # said in one line
    return [(each.phase, each.peak_bytes, each.live_bytes) for each in trial(build, OBJECTIVE, plan)]


@pytest.mark.parametrize(
    ("zero_stage", "precision"), [(3, "fp32"), pytest.param(2, "bf16", marks=pytest.mark.exhaustive)]
)
def test_their_dry_run_takes_what_training_takes(zero_stage: int, precision: str, two_ranks: Ranks) -> None:
    plan = plan_for(zero_stage, precision)

    def build() -> Any:
        from frugal.models.factories import on_device

        with on_device(torch.device("meta")):
            return Unusual().to(DTYPES[precision])

    for rank, truth in enumerate(two_ranks.run(measured, plan)):
        ask = AskDryRun(
            request=plan.request, strategy=plan.strategy, micro_batch=2, accumulation_steps=2, world_size=2, rank=rank,
            kind="cpu",
        )  # fmt: skip
        timeline = dry_run(build, OBJECTIVE, ask).timeline
        ours = [(each.phase, each.peak_bytes, each.live_bytes) for each in timeline.intervals(2)]
        assert [phase for phase, *_ in ours] == [phase for phase, *_ in truth]
        for (phase, *bytes_), (_, *true_bytes) in zip(ours, truth, strict=True):
            for our_bytes, their_bytes in zip(bytes_, true_bytes, strict=True):  # copies of so few parameters may stay
                assert -256 <= our_bytes - their_bytes - 0.005 * their_bytes <= 2300, phase


def saved_or_resumed(folder: Path, zero_stage: int, *, is_saving: bool) -> tuple[Gradient, dict[str, tuple[int, ...]]]:
    """The weights after a step that is saved then, or of another engine that goes on from there; and the shapes. Runs
    on ranks."""
    model = Unusual()
    before = weights(model)
    with running(plan_for(zero_stage, "fp32"), model, OBJECTIVE) as engine:
        if is_saving:
            engine.train_step(points(8))
            engine.save(folder)
        else:
            engine.load(folder)
        gradient = applied(engine, before)
        shapes = {name: engine.zero.shape(parameter) for name, parameter in engine.module.named_parameters()}
        engine.train_step(points(8))
    return gradient, shapes


@pytest.mark.parametrize(
    ("stage", "later"), [(2, 3), *(pytest.param(3, later, marks=pytest.mark.exhaustive) for later in (0, 1))]
)
def test_a_checkpoint_has_their_shapes(stage: int, later: int, two_ranks: Ranks, tmp_path: Path) -> None:
    ((before, shapes), _) = two_ranks.run(saved_or_resumed, tmp_path, stage, is_saving=True)
    assert shapes == {name: tuple(each.shape) for name, each in Unusual().named_parameters()}
    ((after, later_shapes), _) = two_ranks.run(saved_or_resumed, tmp_path, later, is_saving=False)
    assert later_shapes == shapes
    assert all(torch.equal(before[name], after[name]) for name in before)
