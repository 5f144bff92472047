"""cuBLAS's workspaces begin with the first product of forward and of backward, and never end; scratch of sums does."""

import random

import pytest
import torch

from frugal.config.hardware.cluster import CARDS
from frugal.dryrun.trace.kernel_memory import scratch
from frugal.planning.memory.timeline import BACKWARD, FORWARD, INITIALISATION, Timeline, TimelineBuilder
from frugal.planning.memory.workspaces import (
    WORKSPACE,
    lt_workspace_bytes,
    scratch_bytes,
    with_scratch,
    with_workspaces,
    workspace_bytes,
)
from frugal.units import MIB


def two_steps() -> Timeline:
    """Two steps of a product in forward and one in backward, after a cache that is emptied."""
    builder = TimelineBuilder()
    builder.phase(INITIALISATION)
    builder.born(100, 0, "to device")
    builder.empty_cache()
    for _ in range(2):
        builder.phase(FORWARD)
        builder.born(10, 3, "aten.embedding.default")
        product = builder.born(20, 3, "aten.addmm.default")
        builder.phase(BACKWARD)
        builder.born(10, 3, "aten.mul.Tensor")
        builder.born(30, 6, "aten.mm.default")
        builder.events.append(product)
    return builder.timeline()


def test_a_workspace_follows_the_first_product_of_each_thread_and_stays() -> None:
    plain, timeline = two_steps(), with_workspaces(two_steps(), 1000)
    names = [timeline.names[timeline.operators[each]] for each in timeline.events]
    assert names[:7] == [
        "to device", "aten.embedding.default", "aten.addmm.default", WORKSPACE, "aten.mul.Tensor", "aten.mm.default",
        WORKSPACE,
    ]  # fmt: skip
    assert names.count(WORKSPACE) == 2
    assert timeline.empties == plain.empties == (1,)
    assert [(phase.phase, phase.live_bytes) for phase in timeline.intervals(1)] == [
        (phase.phase, phase.live_bytes + (0 if number == 0 else 1000 if number == 1 else 2000))
        for number, phase in enumerate(plain.intervals(1))
    ]


def test_a_step_without_products_has_none() -> None:
    builder = TimelineBuilder()
    builder.phase(FORWARD)
    builder.born(10, 3, "aten.mul.Tensor")
    assert with_workspaces(builder.timeline(), 1000) == builder.timeline()


@pytest.mark.parametrize(
    ("capability", "size_bytes"),
    [((7, 5), 8_519_680), ((8, 0), 8_519_680), ((8, 9), 8_519_680), ((9, 0), 32 * MIB), ((12, 0), 32 * MIB)],
)
def test_hopper_and_blackwell_have_32_mib(capability: tuple[int, int], size_bytes: int) -> None:
    assert workspace_bytes(capability) == size_bytes


def test_up_to_torch_2_11_hopper_alone_has_them() -> None:
    assert workspace_bytes((9, 0), (2, 6)) == 32 * MIB
    assert workspace_bytes((10, 0), (2, 11)) == workspace_bytes((12, 0), (2, 11)) == 8_519_680


def test_cublaslt_takes_the_workspace_of_cublas_in_torch_2_13_only() -> None:
    assert lt_workspace_bytes() == lt_workspace_bytes((2, 13)) == 0
    assert lt_workspace_bytes((2, 11)) == lt_workspace_bytes((2, 14)) == MIB


def test_of_any_number_of_rows_the_most_is_taken_that_keeps_the_card_busy() -> None:
    threads = CARDS["a100-80g"].resident_threads or 0
    assert scratch_bytes(768, threads) == 108 * MIB
    assert scratch_bytes(50304, 28 * 1536) == 0


def test_of_known_rows_it_is_what_the_kernel_takes() -> None:
    generator, threads = random.Random(0), CARDS["a100-80g"].resident_threads or 0
    found = []
    for _ in range(300):
        width, rows = 128 * generator.randrange(1, 40), generator.randrange(1, 20_000)
        taken = scratch(torch.empty(rows, width, dtype=torch.bfloat16, device="meta"), [0], threads)
        found.append((scratch_bytes(width, threads, rows), sum(taken[:1])))
    assert all(ours == kernels for ours, kernels in found) and len({kernels for _, kernels in found}) > 100


def test_the_scratch_of_a_bias_gradient_lives_inside_its_sum() -> None:
    builder = TimelineBuilder()
    builder.phase(FORWARD)
    builder.born(2 * 768, 3, "aten.sum.dim_IntList")
    builder.phase(BACKWARD)
    bias = builder.born(2 * 768, 1, "aten.sum.dim_IntList")
    builder.born(0, 3, "aten.sum.dim_IntList", per_sample=2 * 768)
    builder.born(2 * 1024, 3, "aten.sum.dim_IntList")
    builder.events.append(bias)
    timeline = with_scratch(builder.timeline(), {768}, 2, 28 * 1536)
    assert timeline.events == (0, 1, 4, 4, 2, 3, 1), "inside the gradient of a parameter of 768 elements alone"
    assert timeline.fixed[4] == 22_020_096
    assert timeline.phases == ((FORWARD, 0), (BACKWARD, 1))
