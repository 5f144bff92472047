"""Which strategies are candidates, and how they are called."""

import pytest

from frugal.config.request import Request
from frugal.errors import RequestError
from frugal.planning.strategy import Strategy, candidates


def modes(can_recompute: bool = True, on_gpus: bool = True, **request: object) -> list[str]:
    made = candidates(
        Request(loss="plain", zero_stage=3, **request),  # type: ignore[arg-type]  # any field
        world_size=2, offload="none", trainable_parameters=1000, can_recompute=can_recompute,
        on_gpus=on_gpus,
    )  # fmt: skip
    return [each.activation_checkpointing for each in made]


def test_auto_tries_every_mode_but_none_that_moves_to_the_host_on_a_cpu_and_a_pin_is_kept() -> None:
    assert modes() == ["off", "full", "selective", "offloaded"]
    assert modes(on_gpus=False) == ["off", "full", "selective"]
    assert modes(can_recompute=False) == ["off"]
    assert modes(activation_checkpointing="offloaded") == ["offloaded"]
    assert modes(activation_checkpointing="selective") == ["selective"]


def test_a_strategy_says_its_mode() -> None:
    assert str(Strategy(zero_stage=2, activation_checkpointing="selective")) == (
        "ZeRO-2, activation checkpointing selective"
    )


def test_small_buckets_are_an_eighth_and_are_named() -> None:
    usual, small = (
        candidates(
            Request(zero_stage=3, activation_checkpointing="off"), world_size=2, offload="none",
            trainable_parameters=1_000_000_000, small_buckets=small,
        )[0]
        for small in (False, True)
    )  # fmt: skip
    assert usual.reduce_bucket_elements == 8 * small.reduce_bucket_elements
    assert usual.prefetch_bucket_elements == 8 * small.prefetch_bucket_elements
    assert usual.max_live_elements == 8 * small.max_live_elements
    assert small.num_mechanisms == usual.num_mechanisms + 1
    assert str(small) == "ZeRO-3, activation checkpointing off, small buckets"


def test_gradients_are_summed_in_fp32_unless_bf16_is_asked_for() -> None:
    def dtypes(**asked: object) -> set[str]:
        request = Request(**asked)  # type: ignore[arg-type]  # any field
        made = candidates(request, world_size=2, offload="none", trainable_parameters=1000)
        return {each.gradient_accumulation_dtype for each in made}

    assert dtypes() == {"fp32"}
    assert dtypes(gradient_accumulation_dtype="bf16") == {"bf16"}
    with pytest.raises(RequestError) as caught:
        dtypes(gradient_accumulation_dtype="bf16", precision="fp16")
    assert str(caught.value) == (
        "--gradient-accumulation-dtype bf16 is impossible with --precision fp16\n"
        "  because only sums of bf16 gradients are kept in bf16\n\nhint: leave one of them out"
    )
