"""Host memory in a dry run: pinned blocks, states on it, and what a process takes without any tensor."""

from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
import pytest
import torch

from bench.plans import plan_by_hand
from frugal.config.optimizers import Optimizer
from frugal.dryrun.trace.operators import untouched_host_tensor
from frugal.planning.memory import breakdown
from frugal.units import GIB, MIB
from tests.dryrun.test_truth import SMALL_BUCKETS, dry_run_of
from tests.engine.small_models import tiny_gpt2

MODEL = partial(tiny_gpt2, n_embd=128, n_layer=4, vocab_size=2048)
ELEMENTS = sum(parameter.numel() for parameter in MODEL().parameters())


def host_bytes(zero_stage: int, world_size: int = 1, request: dict[str, Any] | None = None, **strategy: Any) -> int:
    """The peak of a rank's tensors on the host of a GPU."""
    plan = plan_by_hand(
        world_size=world_size, global_batch=world_size, micro_batch=1, zero_stage=zero_stage,
        request={"precision": "bf16", **(request or {})}, strategy={**SMALL_BUCKETS, **strategy},
    )  # fmt: skip
    return dry_run_of(plan, MODEL, kind="cuda").host_bytes


def power_of_two(size_bytes: int) -> int:
    return 1 << (size_bytes - 1).bit_length()


def test_offloaded_states_are_pinned_in_powers_of_two_and_moments_are_not() -> None:
    """Master weights, gradients and the updated parameters are pinned, 4 + 4 + 2 bytes; the moments take 8."""
    states = 2 * power_of_two(4 * ELEMENTS) + power_of_two(2 * ELEMENTS) + 8 * ELEMENTS
    largest = 2 * 4 * 2048 * 128  # two gradients of the largest parameter on their way
    assert states <= host_bytes(2, offload_optimizer="cpu") <= states + 2 * power_of_two(largest)


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": Optimizer(name="sgd", momentum=0.9)}])
def test_an_update_of_all_tensors_at_once_takes_about_as_much_on_the_host(optimizer: dict[str, Any]) -> None:
    """AdamW's denominator takes two tensors of 4 bytes an element in the loop, and one list at once (adam.py)."""
    at_once, in_turns = (
        host_bytes(2, request={"optimizer": Optimizer(implementation=each), **optimizer}, offload_optimizer="cpu")
        for each in ("foreach", "for-loop")
    )
    assert at_once > 8 * ELEMENTS and abs(at_once - in_turns) <= 4 * ELEMENTS + 4096


def test_each_rank_holds_its_share() -> None:
    alone, one_of_four = (host_bytes(3, world, offload_optimizer="cpu") for world in (1, 4))
    assert one_of_four < alone / 2


def test_what_is_on_disk_is_not_in_host_memory_but_its_buffers_are() -> None:
    on_disk = {"offload_optimizer": "nvme", "nvme_path": "/nowhere", "sub_group_elements": 100_000}
    buffers = 4 * 4 * 2048 * 128  # four of the largest sub-group, which is the largest parameter
    in_memory = host_bytes(3, offload_optimizer="cpu", sub_group_elements=100_000)
    assert buffers <= host_bytes(3, **on_disk)
    assert host_bytes(3, **on_disk) < in_memory + buffers - 8 * 2048 * 128


def test_parameters_on_disk_pass_through_buffers_that_hold_any_of_them() -> None:
    largest = 2048 * 128
    on_disk = {
        "offload_optimizer": "nvme", "offload_parameters": "nvme", "nvme_path": "/nowhere",
        "nvme_buffer_elements": largest, "sub_group_elements": 100_000, "max_live_elements": 0,
        "prefetch_bucket_elements": 0,
    }  # fmt: skip
    assert host_bytes(3, **on_disk) >= 5 * 2 * largest + 4 * 4 * largest


def test_a_nodes_ranks_are_processes_too() -> None:
    assert breakdown.node_host_bytes(10 * GIB, "cuda", 8) == 8 * (2 * GIB + int(10 * GIB * 1.03))
    assert breakdown.node_host_bytes(10 * GIB, "cpu", 8) == 0
    assert breakdown.rank_host_bytes(0, "cpu") == 372 * MIB


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2", reason="this machine gives no address space away"
)
def test_a_tensor_twice_the_size_of_the_machine_is_only_address_space() -> None:
    elements = 2 * psutil.virtual_memory().total // 4
    before = psutil.Process().memory_info().rss
    made = untouched_host_tensor((elements // 8, 8), None, torch.float32)
    assert (made.shape, made.dtype, made.device.type) == ((elements // 8, 8), torch.float32, "cpu")
    assert made.untyped_storage().nbytes() == elements // 8 * 8 * 4
    assert made._base is None, "a view would keep the memory when the tensor is given other"
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert untouched_host_tensor((4, 3), (1, 4), torch.bfloat16).stride() == (1, 4)
