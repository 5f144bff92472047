"""Candidate strategies and their names."""

from typing import Any

import pytest

from frugal.config.optimizers import Optimizer
from frugal.config.request import Request
from frugal.errors import RequestError
from frugal.planning.strategy import Place, Strategy, allowed_strategies
from tests.planning.synthetic import facts


def modes(can_recompute: bool = True, on_gpus: bool = True, **request: object) -> list[str]:
    made = allowed_strategies(
        Request(loss="plain", zero_stage=3, **request),  # type: ignore[arg-type]  # any field
        facts(1000, can_recompute=can_recompute), world_size=2, offload="none",
        on_gpus=on_gpus,
    )  # fmt: skip
    return [each.activation_checkpointing for each in made]


def test_auto_tries_every_mode_but_none_that_moves_to_the_host_on_a_cpu_and_a_pin_is_kept() -> None:
    assert modes() == ["off", "full", "selective", "offloaded"]
    assert modes(on_gpus=False) == ["off", "full", "selective"]
    assert modes(can_recompute=False) == ["off"]
    assert modes(activation_checkpointing="offloaded") == ["offloaded"]
    assert modes(activation_checkpointing="selective") == ["selective"]


def test_small_buckets_are_an_eighth_and_are_named() -> None:
    usual, small = (
        allowed_strategies(
            Request(zero_stage=3, activation_checkpointing="off"), facts(1_000_000_000), world_size=2, offload="none",
            small_buckets=small,
        )[0]
        for small in (False, True)
    )  # fmt: skip
    assert usual.reduce_bucket_elements == 8 * small.reduce_bucket_elements
    assert usual.prefetch_bucket_elements == 8 * small.prefetch_bucket_elements
    assert usual.max_live_elements == 8 * small.max_live_elements
    assert small.num_mechanisms == usual.num_mechanisms + 1
    assert str(small) == "ZeRO-3, activation checkpointing off, small buckets"


@pytest.mark.parametrize("small", [False, True])
def test_the_bucket_of_an_odd_number_of_parameters_is_even(small: bool) -> None:
    request = Request(precision="bf16")
    for number in (1, 171, 19_999_999):
        made = allowed_strategies(request, facts(number), world_size=2, offload="none", small_buckets=small)
        assert all(strategy.reduce_bucket_elements % 2 == 0 for strategy in made)


def test_gradients_are_summed_in_fp32_unless_bf16_is_asked_for() -> None:
    def dtypes(optimizer: Optimizer = Optimizer(), **asked: object) -> set[str]:  # noqa: B008  # it is frozen
        request = Request(optimizer=optimizer, **asked)  # type: ignore[arg-type]  # any field
        made = allowed_strategies(request, facts(1000), world_size=2, offload="none")
        return {each.gradient_accumulation_dtype for each in made}

    assert dtypes() == {"fp32"}
    in_bf16 = Optimizer(gradient_accumulation_dtype="bf16")
    assert dtypes(in_bf16) == {"bf16"}
    with pytest.raises(RequestError) as caught:
        dtypes(in_bf16, precision="fp16")
    assert str(caught.value) == (
        "`gradient-accumulation-dtype` bf16 is impossible with --precision fp16\n"
        "  because only sums of bf16 gradients are kept in bf16\n\nhint: leave one of them out"
    )


def test_segments_are_expandable_on_gpus_unless_they_are_not_wanted() -> None:
    def expandable(asked: bool | None, *, on_gpus: bool) -> set[bool]:
        request = Request(expandable_segments=asked)
        made = allowed_strategies(request, facts(1000), world_size=2, offload="none", on_gpus=on_gpus)
        return {each.expandable_segments for each in made}

    assert expandable(None, on_gpus=True) == expandable(True, on_gpus=True) == {True}
    assert expandable(False, on_gpus=True) == expandable(True, on_gpus=False) == {False}


def test_each_thing_on_a_disk_is_one_more_mechanism_than_in_host_memory() -> None:
    places: tuple[tuple[Place, Place], ...] = (("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme"))
    host, optimizer, both = (
        Strategy(
            zero_stage=3, offload_optimizer=optimizer, offload_parameters=parameters, nvme_path="/scratch",
            nvme_buffer_elements=1,
        )
        for optimizer, parameters in places
    )  # fmt: skip
    assert host.num_mechanisms == 3 + 2, "the stage splits three kinds of state, two of them are moved"
    assert optimizer.num_mechanisms == host.num_mechanisms + 1
    assert both.num_mechanisms == host.num_mechanisms + 2


@pytest.mark.parametrize(
    ("precision", "world_size", "offload", "stages"),
    [
        ("bf16", 2, "none", {2, 3}),
        ("fp16", 2, "none", {2, 3}),
        ("fp32", 2, "none", {0, 1, 2, 3}),
        ("bf16", 1, "none", {2}),
        ("fp32", 1, "none", {0}),
        ("bf16", 2, "optimizer", {2, 3}),
        ("bf16", 2, "all", {3}),
    ],
)
def test_only_fp32_is_trained_under_stages_0_and_1_one_gpu_takes_the_lowest_and_stage_3_offloads_parameters(
    precision: Any, world_size: int, offload: Any, stages: set[int]
) -> None:
    made = allowed_strategies(Request(precision=precision), facts(1000), world_size=world_size, offload=offload)
    assert {each.zero_stage for each in made} == stages
