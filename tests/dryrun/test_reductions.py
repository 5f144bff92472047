"""The scratch of reductions, against what single calls asked of CUDA's allocator on cards of several sizes."""

import lzma
from pathlib import Path

import msgspec
import pytest

from bench.kernels.reductions import Taken
from frugal.dryrun.trace.reductions import scratch

CUDA = msgspec.json.decode(
    lzma.decompress((Path(__file__).parent / "reduction_requests.json.xz").read_bytes()), type=Taken
)


def test_the_calls_are_of_several_cards_and_many_take_something() -> None:
    assert len(CUDA.sizes) >= 4
    for sizes in CUDA.sizes.values():
        assert len(sizes) == len(CUDA.calls) >= 400
        assert sum(map(bool, sizes)) > 50


@pytest.mark.parametrize("threads", CUDA.sizes)
def test_a_reduction_takes_what_torch_asks_for_inside_to_the_byte(threads: str) -> None:
    for call, sizes in zip(CUDA.calls, CUDA.sizes[threads], strict=True):
        ours = scratch(call.values("meta"), call.dimensions, int(threads), wide=call.name != "linalg_vector_norm")
        assert list(ours) == sizes, call
