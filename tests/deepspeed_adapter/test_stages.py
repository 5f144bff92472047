"""A ZeRO stage goes back to the state between two steps, whatever a global batch has changed until then."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload

from bench.ranks import Ranks
from frugal.deepspeed_adapter.stages import PythonState, within
from frugal.engine.engine import Engine
from frugal.engine.oom_limits import OutOfMemory
from frugal.required import put
from tests.engine.engines import losses_of, plan_here, running
from tests.engine.small_models import ragged_samples
from tests.faults.anywhere import RunsOut


def test_an_attribute_that_is_not_there_is_not_made() -> None:
    class Owner:
        value = 1

    owner = Owner()
    put(owner, "value", 2)
    with pytest.raises(AttributeError, match="valeu"):
        put(owner, "valeu", 3)
    assert (owner.value, vars(owner)) == (2, {"value": 2})


def differences(before: PythonState, after: PythonState) -> Iterator[str]:
    """Name what is held at one moment and not at the other. Only names: a module's text reads its parameters."""
    now = {id(held): copy for held, copy in after._copies}
    for held, copy in before._copies:
        other: Any = now.get(id(held))
        if other is None:
            yield f"a {type(held).__name__} that is held no more"
        elif isinstance(copy, dict):
            yield from (str(name) for name in copy.keys() ^ other.keys())
            yield from (str(name) for name in copy.keys() & other.keys() if not is_same(copy[name], other[name]))
        elif not (len(copy) == len(other) and all(map(is_same, copy, other))):
            yield f"a {type(held).__name__} of {len(copy)} and {len(other)}"


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are the same object, or equal numbers."""
    return one is other or (isinstance(one, (int, float, str)) and type(one) is type(other) and one == other)


def whole_or_under_way(engine: Engine) -> list[str]:
    """Name ZeRO-3's parameters that take memory besides their parts, and count gathers and modules under way."""
    whole = [
        name
        for name, each in engine.module.named_parameters()
        if each.numel() or each.ds_status.name != "NOT_AVAILABLE"
    ]
    works = [*within(dist.Work, engine.zero._coordinator()), *within(dist.Work, engine.zero.optimizer)]
    waiting = [type(each).__name__ for each in within(torch.nn.Module, vars(engine.zero._coordinator()))]
    reads = [name for name, each in engine.module.named_modules() if vars(each._parameters)["_in_forward"]]
    return [*whole, *waiting, *reads, *(type(each).__name__ for each in (*works, *parameter_offload.FWD_MODULE_STACK))]


TIMES = 8
"""Times that memory runs out in forward or backward, each before another operator."""


def left_behind(zero_stage: int, options: dict[str, Any]) -> tuple[int, int, list[str], list[str]]:
    """Return how often memory ran out, how often it had changed anything, the changes that a reset left, and those of a
    whole step; runs on ranks."""
    strategy, draw = dict(options), random.Random(0)
    request = {name: strategy.pop(name) for name in ("precision",) if name in strategy}
    with running(plan_here(zero_stage, request=request, **strategy)) as engine:
        losses_of(engine, 0, 1)
        prepared = engine.prepare(ragged_samples(8))

        def state() -> PythonState:
            zero = engine.zero
            return PythonState(zero.engine, *map(vars, engine.module.parameters()), apart=zero._coordinator())

        def differing() -> list[str]:
            others = whole_or_under_way(engine) if zero_stage == 3 else []
            return [*others, *(each for each in differences(at_rest, state()) if each != "ds_status")]

        def attempt() -> Any:
            return engine.guard.attempt(lambda: engine.accumulate(prepared.batches, prepared.targets))

        engine.zero.remember()
        at_rest, left = state(), []
        with (out := RunsOut(engine)).begin(None):
            attempt()
        engine.zero.reset()
        num_operators, shortages, changed = out.seen, 0, 0
        for time in range(TIMES):
            place = draw.randrange(num_operators) if time % dist.get_world_size() == engine.rank else None
            with out.begin(place):
                shortages += isinstance(attempt(), OutOfMemory)
            changed += any(differing())
            engine.zero.reset()
            left += differing()
        losses_of(engine, 1, 2)
        return shortages, changed, left, list(differences(at_rest, state()))


@pytest.mark.parametrize(
    ("zero_stage", "options"),
    [
        (2, {"precision": "bf16"}), (3, {"persistence_threshold_elements": 100, "prefetch_bucket_elements": 20_000}),
        *(pytest.param(stage, options, marks=pytest.mark.exhaustive) for stage, options in (
            (0, {}), (1, {}), (1, {"offload_optimizer": "cpu"}), (2, {"offload_optimizer": "cpu"}),
            (2, {"overlap_comm": True}), (3, {"offload_optimizer": "cpu"}), (3, {"precision": "bf16"}),
        )),
    ],
)  # fmt: skip
def test_a_reset_leaves_nothing_of_micro_steps_that_ran_out_of_memory(
    zero_stage: int, options: dict[str, Any], two_ranks: Ranks
) -> None:
    for shortages, changed, left, in_a_step in two_ranks.run(left_behind, zero_stage, options):
        assert (shortages, left) == (TIMES, [])
        assert changed >= 2
        assert "global_steps" in in_a_step
