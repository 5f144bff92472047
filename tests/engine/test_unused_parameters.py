"""Parameters that a step does not use: neither an earlier step's gradient nor another parameter's reaches them."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.engine.engine import Engine, initialize
from frugal.errors import RequestError
from frugal.models.objectives import SummedLoss
from tests.engine.gradients import Gradient
from tests.engine.routed_models import KINDS, OPTIMIZERS, Routed, plain, routed_points, squared_error, update_error

ALIKE = ["012012012012", "000000000000", "121212121212", "222222222222"]
"""The ways of the samples of each step; every rank takes the same in the same order, so long as it takes three."""

Case = tuple[int, str, str, int, tuple[tuple[str, Any], ...]]
"""ZeRO stage, kind of model, optimizer, micro-batch, and more of the strategy."""


@contextmanager
def starting(case: Case, global_batch: int) -> Iterator[Engine]:
    """An engine for the case. Runs on ranks."""
    zero_stage, kind, optimizer, micro_batch, strategy = case
    plan = plan_by_hand(
        world_size=dist.get_world_size(), global_batch=global_batch, micro_batch=micro_batch, zero_stage=zero_stage,
        request={"gradient_clipping": 0.0, **OPTIMIZERS[optimizer]}, strategy=dict(strategy),
    )  # fmt: skip
    engine = initialize(Routed(kind), plan, SummedLoss(squared_error, example=routed_points("0")[0]))
    yield engine
    engine.destroy()


def gathered_weights(engine: Engine) -> Gradient:
    """A copy of all weights. Runs on ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    after = {}
    for name, parameter in engine.module.named_parameters():
        whole = safe_get_full_fp32_param(parameter)
        after[name] = (parameter.detach() if whole is None else whole).double().clone()
    return after


def trained(case: Case, batches: Sequence[str]) -> Gradient:
    """All weights after a step on each batch. Runs on ranks."""
    with starting(case, len(batches[0])) as engine:
        for step, ways in enumerate(batches):
            engine.train_step(routed_points(ways, seed=step))
        return gathered_weights(engine)


def errors(cases: Sequence[Case], batches: Sequence[str]) -> list[float]:
    """How far each case is off plain PyTorch, relative to the update. Runs on ranks."""
    return [update_error(trained(case, batches), plain(case[1], list(batches), case[2]), case[1]) for case in cases]


IN_TURNS = "000011112222"
"""With three micro-steps of four samples, each of them uses another way."""
OFFLOADED = (("offload_optimizer", "cpu"),)


@pytest.mark.parametrize(
    ("zero_stage", "kinds"),
    [
        (2, ("heads",)),
        (3, ("heads", "skip")),
        *(pytest.param(stage, KINDS, marks=pytest.mark.exhaustive) for stage in range(4)),
    ],
)
def test_an_unused_parameter_gets_no_gradient_of_an_earlier_step(
    zero_stage: int, kinds: tuple[str, ...], one_rank: Ranks
) -> None:
    places = [()] if zero_stage == 0 else [(), OFFLOADED]
    cases = [
        (zero_stage, kind, "sgd", micro_batch, place) for kind in kinds for micro_batch in (12, 4) for place in places
    ]
    batches = [*ALIKE, IN_TURNS, IN_TURNS[::-1]]
    (found,) = one_rank.run(errors, cases, batches)
    assert [case for case, error in zip(cases, found, strict=True) if error > 4 * fp32_error(case[1], batches)] == []


def fp32_error(kind: str, batches: list[str], optimizer: str = "sgd") -> float:
    """How far plain PyTorch in fp32 is off itself in fp64, on this machine."""
    single, double = (plain(kind, batches, optimizer, dtype) for dtype in (torch.float32, torch.float64))
    return update_error(single, double, kind)


def said_and_error(case: Case, batches: Sequence[str]) -> tuple[list[str], float]:
    """The warnings of the steps, and how far the weights are off. Runs on ranks."""
    said: list[str] = []
    with patch.object(logging.getLogger("frugal"), "warning", lambda text, *args, **_: said.append(text % args)):
        (error,) = errors([case], batches)
    return said, error


OTHER_WAYS = ["000000111111", "010101222222", "001122000000"]
"""With two ranks or three, each has samples of other ways."""
SMALL_BUCKETS = (("reduce_bucket_elements", 1000),)
OVERLAPPING = (("overlap_comm", True),)


@pytest.mark.parametrize(
    ("zero_stage", "fixture", "kinds"),
    [
        (1, "two_ranks", ("heads",)),
        (2, "two_ranks", ("heads", "order")),
        *(
            pytest.param(stage, fixture, KINDS, marks=pytest.mark.exhaustive)
            for stage in range(3)
            for fixture in ("two_ranks", "three_ranks")
        ),
    ],
)
def test_ranks_may_use_other_parameters_and_in_another_order(
    zero_stage: int, fixture: str, kinds: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    places = [()] if zero_stage == 0 else [(), OFFLOADED]
    micro_batches = [2]
    if kinds == KINDS and zero_stage:
        places, micro_batches = [*places, SMALL_BUCKETS, OVERLAPPING], [6, 2]
    cases = [(zero_stage, kind, "sgd", size, place) for kind in kinds for size in micro_batches for place in places]
    for found in ranks.run(errors, cases, OTHER_WAYS):
        off = {
            case: error for case, error in zip(cases, found, strict=True) if error > 4 * fp32_error(case[1], OTHER_WAYS)
        }
        assert off == {}


def test_the_first_step_in_which_orders_differ_says_so_and_is_done_again_in_one_order(two_ranks: Ranks) -> None:
    ((said, error), (silent, _)) = two_ranks.run(said_and_error, (2, "heads", "sgd", 6, ()), OTHER_WAYS)
    assert said == [
        "in the same micro-step ranks use different parameters, or the same in another order (rank 0 reduces gradients "
        "of ways.0.bias, ways.0.weight; rank 1 reduces gradients of ways.1.bias, ways.1.weight): from here on "
        "gradients wait for the end of backward and are reduced in one order, for up to 0.0 MiB more than planned; "
        "the global batch is run again"
    ]
    assert silent == []
    assert error <= 4 * fp32_error("heads", OTHER_WAYS)


def refused(kind: str, strategy: tuple[tuple[str, Any], ...], batches: Sequence[str]) -> tuple[str, bool, float]:
    """What a step under ZeRO-3 is refused with, whether the weights are as before, and how far they are off after a
    step in which all ranks use the same. Runs on ranks."""
    with starting((3, kind, "sgd", 6, strategy), len(batches[0])) as engine:
        before = gathered_weights(engine)
        text = ""
        try:
            engine.train_step(routed_points(batches[0]))
        except RequestError as error:
            text = str(error)
        after = gathered_weights(engine)
        for step, ways in enumerate(batches[1:]):
            engine.train_step(routed_points(ways, seed=step))
        reference = plain(kind, list(batches[1:]), "sgd")
        same = all(torch.equal(before[name], after[name]) for name in before)
        return text, same, update_error(gathered_weights(engine), reference, kind)


SPLIT = (("persistence_threshold_elements", 0),)


@pytest.mark.parametrize(
    ("kind", "strategy", "because"),
    [
        ("heads", SPLIT, ("rank 0 gathers ways.0.weight, ways.0.bias", "rank 1 gathers ways.1.weight, ways.1.bias")),
        (
            "order",
            SPLIT,
            ("rank 0 gathers ways.1.0.weight, ways.1.0.bias", "rank 1 gathers ways.0.0.weight, ways.0.0.bias"),
        ),
        (
            "skip",
            SPLIT,
            ("rank 0 gathers last.weight, last.bias", "rank 1 gathers ways.1.0.weight, ways.1.0.bias"),
        ),
    ],
)  # fmt: skip
def test_under_zero_3_ranks_that_use_other_parameters_are_refused_by_name_on_all_ranks(
    kind: str, strategy: Any, because: tuple[str, str], two_ranks: Ranks
) -> None:
    batches = ["000000111111", "012012012012"]
    for text, is_as_before, error in two_ranks.run(refused, kind, strategy, batches):
        assert text == (
            "in the same micro-step ranks use different parameters, or the same in another order\n"
            + "".join(f"  because {each}\n" for each in because)
            + "\nhint: use --zero-stage 2, 1 or 0, where each micro-batch may use its own parameters; or have ZeRO-3 "
            "gather what is chosen from at once: deepspeed.utils.set_z3_leaf_modules(model, [ClassAroundIt])"
        )
        assert is_as_before
        assert error <= 4 * fp32_error(kind, batches[1:])


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(
    ("fixture", "kinds"),
    [
        ("two_ranks", ("heads",)),
        *(pytest.param(fixture, KINDS, marks=pytest.mark.exhaustive) for fixture in ("one_rank", "two_ranks")),
    ],
)
def test_at_zero_0_an_unused_parameter_stays_as_in_plain_pytorch(
    optimizer: str, fixture: str, kinds: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    cases: list[Case] = [(0, kind, optimizer, 2, ()) for kind in kinds]
    for found in ranks.run(errors, cases, [*ALIKE, *OTHER_WAYS]):
        for (_, kind, *_), error in zip(cases, found, strict=True):
            assert error <= 4 * fp32_error(kind, [*ALIKE, *OTHER_WAYS], optimizer)


def test_under_zero_an_unused_parameter_is_named_once_where_its_update_goes_on(one_rank: Ranks) -> None:
    cases: list[Case] = [(2, "heads", optimizer, 12, ()) for optimizer in ("sgd", "momentum", "adamw")]
    ((sgd, momentum, adamw),) = one_rank.run(warnings, cases, ALIKE[1:])
    unused = (
        "6 trained parameters got no gradient on any rank in this step (ways.1.weight, ways.1.bias, ways.2.weight, "
    )
    assert sgd == []
    assert momentum == [
        f"{unused}ways.2.bias, ...): PyTorch leaves them as they are, but under ZeRO-2 weight decay of 0.01 and "
        "momentum of earlier gradients go on. Freeze them if they are never used, or use --zero-stage 0"
    ]
    assert adamw == [momentum[0].replace("0.01", "0.1")]


def warnings(cases: Sequence[Case], batches: Sequence[str]) -> list[list[str]]:
    """What each case warns of. Runs on ranks."""
    return [said_and_error(case, batches)[0] for case in cases]


def error_of_freezing(zero_stage: int) -> str:
    """What a step says after a parameter was frozen. Runs on ranks."""
    with starting((zero_stage, "heads", "sgd", 12, ()), 12) as engine:
        engine.train_step(routed_points(ALIKE[0]))
        engine.module.ways[1].requires_grad_(False)
        with pytest.raises(RequestError) as error:
            engine.train_step(routed_points(ALIKE[0]))
        engine.module.ways[1].requires_grad_(True)
        engine.train_step(routed_points(ALIKE[0]))
        return str(error.value)


@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_freezing_after_the_engine_was_made_is_refused(zero_stage: int, one_rank: Ranks) -> None:
    assert one_rank.run(error_of_freezing, zero_stage) == [
        "requires_grad was changed after the engine was made, which has no effect on what it updates\n"
        "  because 2 parameters: ways.1.weight, ways.1.bias\n\n"
        "hint: change it before frugal.initialize; to change it later, keep the weights and make a new engine"
    ]


def recovered_error(zero_stage: int, place: tuple[tuple[str, Any], ...]) -> tuple[int, float]:
    """Recoveries, and how far the weights are off, where memory runs out once in the last of several steps, in whose
    smaller micro-batches other ones use each head. Runs on ranks."""
    case: Case = (zero_stage, "heads", "sgd", 6, place)
    batches = [ALIKE[0], IN_TURNS, IN_TURNS[::-1]]
    with starting(case, 12) as engine:
        for step, ways in enumerate(batches):
            if step == 2 and engine.rank == engine.world_size - 1:
                fail_once(engine.module.ways[1])
            engine.train_step(routed_points(ways, seed=step))
        error = update_error(gathered_weights(engine), plain("heads", batches, "sgd"), "heads")
        return engine.num_recoveries, error


def fail_once(module: torch.nn.Module) -> None:
    """Have the next forward of `module` find no memory."""
    left = [1]

    def hook(_module: torch.nn.Module, _inputs: Any) -> None:
        if left.pop() if left else 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    module.register_forward_pre_hook(hook)


@pytest.mark.parametrize("zero_stage", [pytest.param(1, marks=pytest.mark.exhaustive), 2, 3])
@pytest.mark.parametrize("place", [pytest.param((), marks=pytest.mark.exhaustive), OFFLOADED])
def test_a_recovery_from_out_of_memory_leaves_no_gradient_of_another_step(
    zero_stage: int, place: Any, one_rank: Ranks
) -> None:
    ((recoveries, error),) = one_rank.run(recovered_error, zero_stage, place)
    assert recoveries == 1
    assert error <= 4 * fp32_error("heads", [ALIKE[0], IN_TURNS, IN_TURNS[::-1]])
