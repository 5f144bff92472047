"""What DeepSpeed trains wrongly or dies of is refused by name, in a dry run and in training, with a way out.

Before, on two ranks: a gradient penalty was 68 % off under ZeRO-1, and most others died in a traceback in the first
step.
"""

import pytest
import torch
import torch.nn.functional as F

from bench.ranks import Ranks
from frugal.deepspeed_adapter import refusals
from frugal.dryrun.messages import AskDryRun
from frugal.dryrun.run import dry_run
from frugal.errors import RequestError
from tests.engine import unusual_modules
from tests.engine.test_unusual_parameters import plan_for, trained
from tests.engine.unusual_modules import OBJECTIVE

CASES = [
    ("GradientPenalty", 1, "takes a gradient of the model's output before the step's backward pass"),
    ("GradientPenalty", 3, "takes a gradient of the model's output before the step's backward pass"),
    ("Sparse", 2, "the gradient of `table` cannot be added up over ranks"),
    ("Complex", 1, "the parameter `phase` cannot be trained"),
    ("SharedMemory", 2, "the parameters `one.weight` and `other.weight` are two, but lie in the same memory"),
    ("Empty", 3, "ZeRO-3 cannot gather the parameter `nothing`"),
    ("OtherFunctional", 3, "ZeRO-3 has the parameter `inner.0.weight` split where it is read"),  # to make the others
    ("Vmapped", 3, "ZeRO-3 cannot run `inner` \\(Sequential\\) inside a transform of torch.func"),
    ("TwiceDifferentiated", 3, "ZeRO-3 cannot differentiate `inner` \\(Sequential\\) twice"),
    ("Compiled", 3, "ZeRO-3 cannot gather the parameters of `inner`"),
    ("Scripted", 0, "the memory of `inner` cannot be dry-run"),
    ("InSlots", 3, "ZeRO-3 cannot run `part` \\(Returning\\), which returns a Slots"),
    ("ByName", 3, "ZeRO-3 has the parameter `inner.0.weight` split where it is read"),
    ("InferenceMode", 3, "ZeRO-3 cannot run `inner` \\(Sequential\\) in torch.inference_mode"),
    ("KeptProducts", 3, "ZeRO-3 cannot run `inner.0` \\(Linear\\) under torch's selective activation checkpointing"),
    ("WrittenElsewhere", 3, "the backward pass of the model fails under ZeRO-3"),
    ("MadeInForward", 3, "ZeRO-3 cannot run the model \\(MadeInForward\\) with other tensors than its parameters"),
]


@pytest.mark.parametrize(("kind", "zero_stage", "message"), CASES)
def test_a_dry_run_refuses_it(kind: str, zero_stage: int, message: str) -> None:
    """As its worker does when it loads the model, or when it runs."""
    plan = plan_for(zero_stage, "fp32")

    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return getattr(unusual_modules, kind)()

    asked = AskDryRun(
        request=plan.request, strategy=plan.strategy, micro_batch=2, accumulation_steps=2, world_size=2, rank=0,
        kind="cpu",
    )  # fmt: skip
    with pytest.raises(RequestError, match=message) as caught:
        refusals.refuse(build(), 0)
        dry_run(build, OBJECTIVE, asked)
    assert "hint: " in str(caught.value)


def refused(kinds: list[tuple[str, int]]) -> list[str]:
    """Return what training says of each, under a stage. Runs on ranks."""
    said = []
    for kind, zero_stage in kinds:
        try:
            trained((kind,), zero_stage, "fp32")
        except RequestError as error:
            said.append(str(error))
        assert F.linear is torch._C._nn.linear  # ZeRO-3 replaces it
    return said


def test_training_refuses_it_on_all_ranks(two_ranks: Ranks) -> None:
    by_rank = two_ranks.run(refused, [(kind, zero_stage) for kind, zero_stage, _ in CASES])
    for said in by_rank:
        assert len(said) == len(CASES)
        for text, (_, _, message) in zip(said, CASES, strict=True):
            assert message.replace("\\", "") in text


def test_parameters_side_by_side_in_one_memory_are_no_tied_ones() -> None:
    rows = torch.randn(4, 6)
    module = torch.nn.ParameterList([rows[:, ::2], rows[:, 1::2], rows.clone()])
    refusals.refuse(module, 2)
    with pytest.raises(RequestError, match="the parameters `0` and `1` are two"):
        refusals.refuse(torch.nn.ParameterList([rows[:3], rows[2:]]), 2)
