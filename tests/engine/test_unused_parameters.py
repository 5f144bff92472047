"""Parameters that a step does not use: neither an earlier step's gradient nor another parameter's reaches them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from bench.ranks import Ranks
from frugal.engine.engine import Engine
from frugal.errors import RequestError
from tests.engine.engines import running
from tests.engine.generated_modules import INPUTS, OPTIMIZERS, OUTPUTS, Case, Net, linear, squared_error
from tests.engine.generated_runs import Trained, compare, plan_of, train
from tests.engine.gradients import whole

EXHAUSTIVE = pytest.mark.exhaustive
PATHS = {
    "heads": [[], [], []],
    "adapters": [[0], [1], [2]],
    "order": [[1, 0], [0, 1], [1, 0]],
    "skip": [[0], [0, 1], [0, 1, 2]],
}
"""The blocks that samples of each route meet; the heads are the routes' own under that name, and one otherwise."""
KINDS = tuple(PATHS)

ALIKE = ("012012012012", "000000000000", "121212121212", "222222222222")
"""The routes of the samples of each step; every rank takes the same in the same order, so long as it takes three."""
IN_TURNS = "000011112222"
"""With three micro-steps of four samples, each of them uses another route."""
OTHER_WAYS = ("000000111111", "010101222222", "001122000000")
"""With two ranks or three, each has samples of other routes."""
OFFLOADED, SMALL_BUCKETS = {"offload_optimizer": "cpu"}, {"reduce_bucket_elements": 1000}
SPLIT, OVERLAPPING = {"persistence_threshold_elements": 0}, {"overlap_comm": True}
DECAYING = {**OPTIMIZERS, "momentum": {**OPTIMIZERS["momentum"], "weight_decay": 0.01}}


def routed(
    kind: str, steps: Sequence[str], optimizer: str, world_size: int, zero_stage: int, micro_batch: int,
    strategy: dict[str, Any],
) -> Case:  # fmt: skip
    """Return a case in which samples choose the parameters that they use."""

    def make() -> Net:
        torch.manual_seed(0)
        how = {"own_heads": kind == "heads", "by_appearance": False, "unused_output": False, "unused": False}
        return Net(24, [linear(24) for _ in {*chain(*PATHS[kind])}], PATHS[kind], **how)

    def samples(routes: str, seed: int) -> list[dict[str, torch.Tensor]]:
        draw = torch.Generator().manual_seed(seed)
        return [
            {"x": torch.randn(INPUTS, generator=draw), "y": torch.randn(OUTPUTS, generator=draw), "route": route}
            for route in map(torch.tensor, map(int, routes))
        ]

    request = {"gradient_clipping": 0.0, "precision": "fp32", **DECAYING[optimizer]}
    return Case(
        seed=0, parts=(kind,), world_size=world_size, zero_stage=zero_stage, global_batch=len(steps[0]),
        micro_batch=micro_batch, request=request, strategy=strategy, loss=squared_error, make=make, freezes_after=None,
        steps=[samples(routes, seed) for seed, routes in enumerate(steps)],
    )  # fmt: skip


def error_of(case: Case, run: Trained) -> str | None:
    """Return how far a run is off plain PyTorch in fp64, if farther than in fp32, by a factor."""
    return compare(case, run, [[1] * case.global_batch])


def assert_exact(ranks: Ranks, *cases: tuple[Any, ...]) -> None:
    """Each case, without its number of ranks, is as in plain PyTorch on every rank."""
    for kind, steps, optimizer, *rest in cases:
        of = (kind, steps, optimizer, ranks.world_size, *rest)
        errors = [run.refusal or error_of(routed(*of), run) for run in ranks.run(train, routed, *of)]
        assert errors == [None] * ranks.world_size, of


@pytest.mark.parametrize(
    ("zero_stage", "kinds"),
    [(2, ("heads",)), (3, ("skip",)), *(pytest.param(stage, KINDS, marks=EXHAUSTIVE) for stage in range(4))],
)
def test_an_unused_parameter_gets_no_gradient_of_an_earlier_step(
    zero_stage: int, kinds: tuple[str, ...], one_rank: Ranks
) -> None:
    places = [{}] if zero_stage == 0 else [{}, OFFLOADED]
    steps = (*ALIKE, IN_TURNS, IN_TURNS[::-1])
    cases = [(kind, steps, "sgd", zero_stage, size, place) for kind in kinds for size in (12, 4) for place in places]
    assert_exact(one_rank, *cases)


def by_a_method(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of what the module's own function computes, past its hooks and the engine's."""
    module = getattr(model, "module", model)
    return squared_error(lambda *inputs: type(module).forward(module, *inputs), batch)  # type: ignore[arg-type]


def routed_by_a_method(*of: Any) -> Case:
    return replace(routed(*of), loss=by_a_method)


@pytest.mark.parametrize(("zero_stage", "place"), [(1, OFFLOADED), (2, {}), (2, OFFLOADED), (3, {})])
def test_a_loss_that_calls_a_method_is_exact_or_refused(
    zero_stage: int, place: dict[str, Any], one_rank: Ranks
) -> None:
    of = ("heads", (*ALIKE, IN_TURNS, IN_TURNS[::-1]), "sgd", 1, zero_stage, 4, place)
    (run,) = one_rank.run(train, routed_by_a_method, *of)
    if zero_stage == 3:
        assert run.refusal is not None and "ZeRO-3 trains only what the model's forward computes" in run.refusal
    else:
        assert error_of(routed_by_a_method(*of), run) is None


@pytest.mark.parametrize(
    ("zero_stage", "fixture", "kinds"),
    [
        (1, "two_ranks", ("heads",)),
        (2, "two_ranks", ("heads", "order")),
        *(
            pytest.param(stage, fixture, KINDS, marks=EXHAUSTIVE)
            for stage in range(3)
            for fixture in ("two_ranks", "three_ranks")
        ),
    ],
)
def test_ranks_may_use_other_parameters_and_in_another_order(
    zero_stage: int, fixture: str, kinds: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    places, sizes = [{}] if zero_stage == 0 else [{}, OFFLOADED], [2]
    if kinds == KINDS and zero_stage:
        places, sizes = [*places, SMALL_BUCKETS, OVERLAPPING], [6, 2]
    cases = [(kind, OTHER_WAYS, "sgd", zero_stage, size, place) for kind in kinds for size in sizes for place in places]
    assert_exact(request.getfixturevalue(fixture), *cases)


@pytest.mark.parametrize(
    ("fixture", "kinds"),
    [
        ("two_ranks", ("heads",)),
        *(pytest.param(fixture, KINDS, marks=EXHAUSTIVE) for fixture in ("one_rank", "two_ranks")),
    ],
)
def test_at_zero_0_an_unused_parameter_stays_as_in_plain_pytorch(
    fixture: str, kinds: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    cases = [(kind, (*ALIKE, *OTHER_WAYS), by, 0, 2, {}) for kind in kinds for by in ("momentum", "adamw")]
    assert_exact(request.getfixturevalue(fixture), *cases)


def test_the_first_step_in_which_orders_differ_says_so_and_is_done_again_in_one_order(two_ranks: Ranks) -> None:
    of = ("heads", OTHER_WAYS, "sgd", 2, 2, 6, {})
    run, silent = two_ranks.run(train, routed, *of)
    (said,) = run.warnings
    assert said.startswith(
        "in the same micro-step ranks use different parameters, or the same in another order (rank 0 reduces gradients "
        "of heads.0.weight; rank 1 reduces gradients of heads.1.bias, heads.1.weight): from here on gradients wait for "
    )
    assert said.endswith("for up to 0.0 MiB more than planned; the global batch is run again")
    assert silent.warnings == ()
    assert error_of(routed(*of), run) is None


def test_under_zero_an_unused_parameter_is_named_once_where_its_update_goes_on(one_rank: Ranks) -> None:
    said = {by: one_rank.run(train, routed, "heads", ALIKE[1:], by, 1, 2, 12, {})[0].warnings for by in OPTIMIZERS}
    assert said["sgd"] == ()
    for by, decay in (("momentum", "0.01"), ("adamw", "0.1")):
        (warning,) = said[by]
        assert warning.startswith("4 trained parameters got no gradient on any rank in this step (heads.1.weight, ")
        assert f"under ZeRO-2 weight decay of {decay} and momentum of earlier gradients go on" in warning
        assert warning.endswith("Freeze them if they are never used, or use --zero-stage 0")


@contextmanager
def starting(*of: Any) -> Iterator[tuple[Case, Engine]]:
    """Yield a case and its engine. Runs on ranks."""
    case = routed(*of)
    with running(plan_of(case), case.make(), case.objective()) as engine:
        yield case, engine


def refused(*of: Any) -> tuple[str, bool, Trained]:
    """Return what the first step under ZeRO-3 is refused with, whether the weights are as before, and what comes of the
    steps after it. Runs on ranks."""
    with starting(*of) as (case, engine):
        before = whole(engine)
        with pytest.raises(RequestError) as error:
            engine.train_step(case.steps[0])
        is_as_before = all(torch.equal(before[name], after) for name, after in whole(engine).items())
        losses = [engine.train_step(samples).loss for samples in case.steps[1:]]
        return str(error.value), is_as_before, Trained(whole(engine), losses, ())


@pytest.mark.parametrize(
    ("kind", "gathered"),
    [
        ("heads", ("heads.0.weight", "heads.1.weight, heads.1.bias")),
        ("order", ("blocks.1.inner.weight, blocks.1.inner.bias", "blocks.0.inner.weight, blocks.0.inner.bias")),
        ("skip", ("heads.0.weight", "blocks.1.inner.weight, blocks.1.inner.bias")),
    ],
)
def test_under_zero_3_ranks_that_use_other_parameters_are_refused_by_name_on_all_ranks(
    kind: str, gathered: tuple[str, str], two_ranks: Ranks
) -> None:
    of = (kind, ("000000111111", "012012012012"), "sgd", 2, 3, 6, SPLIT)
    case = routed(*of)
    for text, is_as_before, run in two_ranks.run(refused, *of):
        assert text.startswith(
            "in the same micro-step ranks use different parameters, or the same in another order\n"
            + "".join(f"  because rank {rank} gathers {each}\n" for rank, each in enumerate(gathered))
        )
        assert "hint: use --zero-stage 2, 1 or 0" in text and "set_z3_leaf_modules(model, [ClassAroundIt])" in text
        assert is_as_before
        assert error_of(replace(case, steps=case.steps[1:]), run) is None


def error_of_freezing(zero_stage: int) -> str:
    """Return what a step says after a parameter was frozen. Runs on ranks."""
    with starting("heads", ALIKE, "sgd", 1, zero_stage, 12, {}) as (case, engine):
        engine.train_step(case.steps[0])
        engine.module.heads[1].requires_grad_(False)
        with pytest.raises(RequestError) as error:
            engine.train_step(case.steps[0])
        engine.module.heads[1].requires_grad_(True)
        engine.train_step(case.steps[0])
        return str(error.value)


@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=EXHAUSTIVE), 3])
def test_freezing_after_the_engine_was_made_is_refused(zero_stage: int, one_rank: Ranks) -> None:
    (said,) = one_rank.run(error_of_freezing, zero_stage)
    assert said.startswith(
        "requires_grad was changed after the engine was made, which has no effect on what it updates\n"
    )
    assert "because 2 parameters: heads.1.weight, heads.1.bias\n" in said
    assert "hint: change it before frugal.initialize" in said


def recovered(*of: Any) -> tuple[int, Trained]:
    """Recoveries, and the run, where memory runs out once in the last of several steps, in whose smaller micro-batches
    other ones use each head. Runs on ranks."""
    with starting(*of) as (case, engine):
        losses = [engine.train_step(samples).loss for samples in case.steps[:-1]]
        if engine.rank == engine.world_size - 1:
            engine.module.heads[1].register_forward_pre_hook(fails_once())
        losses.append(engine.train_step(case.steps[-1]).loss)
        return engine.num_recoveries, Trained(whole(engine), losses, ())


def fails_once() -> Callable[..., None]:
    """Return a hook that finds no memory the first time."""
    left = [1]

    def hook(*_: Any) -> None:
        if left.pop() if left else 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return hook


@pytest.mark.parametrize("zero_stage", [pytest.param(1, marks=EXHAUSTIVE), 2, 3])
@pytest.mark.parametrize("place", [pytest.param({}, marks=EXHAUSTIVE), OFFLOADED])
def test_a_recovery_from_out_of_memory_leaves_no_gradient_of_another_step(
    zero_stage: int, place: Any, one_rank: Ranks
) -> None:
    of = ("heads", (ALIKE[0], IN_TURNS, IN_TURNS[::-1]), "sgd", 1, zero_stage, 6, place)
    ((recoveries, run),) = one_rank.run(recovered, *of)
    assert recoveries == 1
    assert error_of(routed(*of), run) is None
