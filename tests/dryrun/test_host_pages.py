"""Host tensors of a dry run may be larger than the host."""

from pathlib import Path

import psutil
import pytest
import torch

from frugal.dryrun.trace.operators import untouched_host_tensor


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


def test_strides_are_kept() -> None:
    assert untouched_host_tensor((4, 3), (1, 4), torch.bfloat16).stride() == (1, 4)
