"""What the user pins is kept, and pins that cannot be are refused with their numbers."""

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from frugal.deepspeed_adapter.json_config import batch_config
from frugal.errors import NothingFitsError, RequestError
from tests.planning.synthetic import SMALL, planned


@pytest.mark.parametrize("choice", ["off", "selective", "full", "offloaded"])
def test_pinned_activation_checkpointing_is_kept(choice: str) -> None:
    made = planned(gpus=4, mem="24G", activation_checkpointing=choice)
    assert made.strategy.activation_checkpointing == choice
    assert made.why[0].endswith("as asked")


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_pinned_stage_is_kept(zero_stage: int) -> None:
    assert planned(gpus=2, mem="80G", precision="fp32", zero_stage=zero_stage).strategy.zero_stage == zero_stage


def test_a_cap_in_tokens_binds() -> None:
    made = planned(gpus=4, mem="80G", max_tokens_per_gpu=3000, model=SMALL)
    assert max(made.batch.micro_batch) == 2
    assert made.why[-1] == "--max-tokens-per-gpu binds: it allows 2 samples at once"


def test_pinned_micro_batch_and_steps_are_kept() -> None:
    made = planned(gpus=4, mem="80G", micro_batch=4, accumulation_steps=32, model=SMALL)
    assert (set(made.batch.micro_batch), made.batch.accumulation_steps) == ({4}, 32)
    assert planned(gpus=4, mem="80G", accumulation_steps=100, model=SMALL).batch.accumulation_steps == 100


def test_a_micro_batch_that_is_never_full_is_told() -> None:
    made = planned(gpus=4, mem="24G", micro_batch=16, global_batch=32, model=SMALL)
    assert made.warnings == ("--micro-batch 16 comes to 8: the global batch is spread evenly over its micro-steps",)


@given(
    global_batch=st.integers(1, 700), gpus=st.integers(1, 8), micro=st.none() | st.integers(1, 9),
    steps=st.none() | st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=40)  # each makes up to three plans
def test_even_micro_batches_are_the_global_batch_or_are_refused_with_those_next_to_it(
    global_batch: int, gpus: int, micro: int | None, steps: int | None
) -> None:
    """Ask again with the batches that a refusal names."""
    asked: dict[str, Any] = {"gpus": gpus, "mem": "12G", "micro_batch": micro, "accumulation_steps": steps}
    assume(micro is None or steps is None)
    try:
        made = planned(**asked, global_batch=global_batch, even=True, model=SMALL)
    except RequestError as error:
        assume("equal micro-batches" in error.what)
        assert error.hint is not None
        named = sorted(map(int, re.findall(r"\d+", error.hint)))
        assert named[-1] > global_batch and all(near < global_batch for near in named[:-1])
        for near in named:
            with suppress(NothingFitsError):
                assert planned(**asked, global_batch=near, even=True, model=SMALL).batch.is_uniform
        return
    except NothingFitsError:
        return
    assert len(set(made.batch.micro_batch)) == 1
    assert made.batch.largest_micro_batch * made.batch.accumulation_steps * gpus == global_batch
    assert batch_config(made.batch)["train_batch_size"] == global_batch


def test_even_micro_batches_are_so_on_cards_that_differ() -> None:
    made = planned(mem="8G,8G,12G,12G", gpus=4, global_batch=500, even=True, model=SMALL)
    assert set(made.batch.micro_batch) == {5} and made.batch.is_uniform


def test_a_plan_warns_of_what_the_json_alone_would_train() -> None:
    asked: dict[str, Any] = {"gpus": 4, "mem": "12G", "model": SMALL}
    (note,) = planned(**asked, global_batch=500, max_tokens_per_gpu=8192).warnings
    assert note.startswith("ds_config.json alone would train 512 samples per step, not 500")
    assert note.endswith("use plan.json, or `frugal export`, which plans equal ones")
    assert planned(**asked, global_batch=500, max_tokens_per_gpu=8192, even=True).warnings == ()
    assert planned(**asked, global_batch=501).warnings[0].endswith("use plan.json")


def test_ranks_without_a_sample_are_said() -> None:
    few, enough = (planned(gpus=4, mem="12G", model=SMALL, global_batch=size).warnings for size in (3, 4))
    assert few[0] == "3 samples on 4 GPUs: some have none" and enough == ()


def test_even_says_what_else_would_fit() -> None:
    made = planned(gpus=4, mem="12G", even=True, model=SMALL)
    assert made.why[-1].endswith("; 10 would fit, and 8 is the largest that cuts 512 samples evenly, as asked")


IMPOSSIBLE_PINS: list[tuple[dict[str, Any], str, str]] = [
    ({"micro_batch": 8, "accumulation_steps": 32}, "8 x 32 x 4 = 1024 samples, and the global batch is 512",
     "use --micro-batch 4, or --accumulation-steps 16, or --global-batch 1024"),
    ({"micro_batch": 2, "accumulation_steps": 16}, "2 x 16 x 4 = 128 samples, and the global batch is 512",
     "use --micro-batch 8, or --accumulation-steps 64, or --global-batch 128"),
    ({"micro_batch": 8, "accumulation_steps": 1, "global_batch": 10},
     "8 x 1 x 4 = 32 samples, and the global batch is 10", "use --micro-batch 3, or --global-batch 32"),
    ({"accumulation_steps": 600}, "every micro-step needs at least one sample", "use at most --accumulation-steps 512"),
    ({"accumulation_steps": 2, "max_tokens_per_gpu": 32768}, "--max-tokens-per-gpu allows 32",
     "use --accumulation-steps 4, or leave it out"),
    ({"micro_batch": 8, "max_tokens_per_gpu": 4096}, "it allows 4 samples of 1024 tokens",
     "leave one of them out, or use --micro-batch 4"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "because", "hint"), IMPOSSIBLE_PINS, ids=str)
def test_impossible_pins_are_refused_with_their_numbers(settings: dict[str, Any], because: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        planned(gpus=4, mem="80G", model=SMALL, **settings)
    assert (tuple(caught.value.because), caught.value.hint) == ((because,), hint)
