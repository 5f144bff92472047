"""A ZeRO stage that lacks what is reset after out of memory says so: nothing is passed over in silence."""

from typing import Any

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.engine.engine import initialize
from frugal.models.objectives import CausalLM
from frugal.required import put
from tests.engine.small_models import ragged_samples, tiny_gpt2

RENAMED = {
    0: ("_running_engine_backward_count", "_running_engine_step"),
    2: ("_backward_hook_state", "ipg_buckets", "params_already_reduced", "micro_step_id", "averaged_gradients"),
    3: ("_backward_hook_state", "ipg_buckets", "params_already_reduced", "_offload_boundary_param_ids"),
}
"""Attributes of the engine at stage 0, of its optimizer at the others."""


def test_an_attribute_that_is_not_there_is_not_made() -> None:
    class Owner:
        value = 1

    owner = Owner()
    put(owner, "value", 2)
    with pytest.raises(AttributeError, match="valeu"):
        put(owner, "valeu", 3)
    assert (owner.value, vars(owner)) == (2, {"value": 2})


def lacking(zero_stage: int) -> list[str]:
    """What a reset says without one of the attributes, one after the other; on ranks."""
    plan = plan_by_hand(world_size=2, global_batch=4, micro_batch=2, zero_stage=zero_stage)
    engine = initialize(tiny_gpt2(), plan, CausalLM())
    engine.train_step(ragged_samples(4))
    owner, said = engine.zero.optimizer if zero_stage else engine.deepspeed, []
    for name in RENAMED[zero_stage]:
        value: Any = vars(owner).pop(name)
        try:
            engine.zero.reset()
        except AttributeError as error:
            said.append(error.name or "")
        setattr(owner, name, value)
    engine.zero.reset()
    engine.destroy()
    return said


@pytest.mark.parametrize("zero_stage", RENAMED)
def test_a_renamed_attribute_is_an_error_of_the_reset(two_ranks: Ranks, zero_stage: int) -> None:
    assert two_ranks.run(lacking, zero_stage) == [list(RENAMED[zero_stage])] * 2
