"""A ZeRO stage goes back to the state between two steps, whatever a global batch has changed until then."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload

from bench.ranks import Ranks
from frugal.deepspeed_adapter.python_state import PythonState, within
from frugal.engine.engine import Engine
from frugal.engine.oom_limits import OutOfMemory
from frugal.required import put
from tests.engine.engines import losses_of, plan_here, running
from tests.engine.small_models import ragged_samples


def test_an_attribute_that_is_not_there_is_not_made() -> None:
    class Owner:
        value = 1

    owner = Owner()
    put(owner, "value", 2)
    with pytest.raises(AttributeError, match="valeu"):
        put(owner, "valeu", 3)
    assert (owner.value, vars(owner)) == (2, {"value": 2})


def differences(before: PythonState, after: PythonState) -> Iterator[str]:
    """Name what is held at one moment and not at the other; stage 3's parameters apart, which are let go."""
    now = {id(held): copy for held, copy in after._copies}
    for held, copy in before._copies:
        other: Any = now.get(id(held))
        if other is None:
            yield f"{type(held).__name__} of {len(held)} items is held no more"
        elif isinstance(copy, dict):
            same = {
                name for name in copy.keys() & other.keys() if copy[name] is other[name] or copy[name] == other[name]
            }
            yield from (f"{name}: {copy.get(name)}, {other.get(name)}" for name in (copy.keys() | other.keys()) - same)
        elif [*map(id, copy)] != [*map(id, other)]:
            yield f"{copy}, {other}"


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
    return [*whole, *map(str, works), *waiting, *reads, *map(str, parameter_offload.FWD_MODULE_STACK)]


def left_behind(zero_stage: int, options: dict[str, Any]) -> tuple[bool, bool, list[str], list[str]]:
    """Whether memory ran out in a backward, whether that changed anything, what a reset leaves of it, and what a whole
    step changes; on ranks."""
    with running(plan_here(zero_stage, **options)) as engine:
        losses_of(engine, 0, 1)

        def fails(_gradient: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        def on_output(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            (output if isinstance(output, torch.Tensor) else output[0]).register_hook(fails)

        def state() -> PythonState:
            zero = engine.zero
            return PythonState(zero.engine, *map(vars, engine.module.parameters()), apart=zero._coordinator())

        at_rest = state()
        hook = engine.module.transformer.h[0].register_forward_hook(on_output)
        engine.zero.remember()
        prepared = engine.prepare(ragged_samples(8))
        outcome = engine.guard.attempt(lambda: engine.accumulate(prepared.batches, prepared.targets))
        is_changed = any(differences(at_rest, state())) and (zero_stage < 3 or len(whole_or_under_way(engine)) > 2)
        engine.zero.reset()
        hook.remove()
        left = [each for each in differences(at_rest, state()) if not each.startswith("ds_status")]
        left += whole_or_under_way(engine) if zero_stage == 3 else []
        losses_of(engine, 1, 2)
        return isinstance(outcome, OutOfMemory), is_changed, left, list(differences(at_rest, state()))


@pytest.mark.parametrize(
    ("zero_stage", "options"),
    [
        (2, {}), (3, {}),
        *(pytest.param(stage, options, marks=pytest.mark.exhaustive) for stage, options in (
            (0, {}), (1, {}), (1, {"offload_optimizer": "cpu"}), (2, {"offload_optimizer": "cpu"}),
            (2, {"overlap_comm": True}), (3, {"offload_optimizer": "cpu"}), (3, {"persistence_threshold_elements": 0}),
        )),
    ],
)  # fmt: skip
def test_a_reset_leaves_nothing_of_a_backward_that_ran_out_of_memory(
    zero_stage: int, options: dict[str, Any], two_ranks: Ranks
) -> None:
    for has_failed, is_changed, left, in_a_step in two_ranks.run(left_behind, zero_stage, options):
        assert has_failed and is_changed
        assert left == []
        assert any(each.startswith("global_steps: 1, 2") for each in in_a_step)
