"""`python -m bench.kernels.reductions FILE`: what sums, means and norms take from CUDA's allocator inside one call.

A few hundred drawn calls: shapes, layouts, dimensions and types. The requests beside the result on this machine's card,
real or emulated, are added to FILE (JSON, xz) under the threads that the card holds at once, so that `make test` holds
`frugal.dryrun.trace.kernel_memory` to all of them without a GPU.
"""

import lzma
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

SEED, DRAWN = 15, 400
OPERATORS = ("sum", "sum", "mean", "linalg_vector_norm")
DTYPES = ("bfloat16", "float16", "float32")


class Reduction(msgspec.Struct, frozen=True):
    """`torch.ops.aten.NAME` along `dimensions` of a tensor that is made in the order of `layout`, the last fastest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    dimensions: tuple[int, ...]

    def values(self, device: str) -> Tensor:
        """The tensor."""
        made = torch.empty([self.shape[d] for d in self.layout], dtype=getattr(torch, self.dtype), device=device)
        return made.permute([self.layout.index(d) for d in range(len(self.shape))])

    def run(self, values: Tensor) -> Tensor:
        """The call."""
        if self.name == "linalg_vector_norm":
            return torch.linalg.vector_norm(values, dim=self.dimensions)
        return getattr(torch, self.name)(values, dim=self.dimensions)  # type: ignore[no-any-return]  # of a name


class Taken(msgspec.Struct):
    """By the threads that a card holds at once, what each call took."""

    torch: str
    command: str
    calls: list[Reduction]
    sizes: dict[str, list[list[int]]]


def calls() -> list[Reduction]:
    """Gradients of biases and of positions, and drawn ones."""
    found = [
        Reduction(name="sum", dtype=dtype, shape=(rows, width), layout=(0, 1), dimensions=(0,))
        for dtype in ("bfloat16", "float32")
        for rows in (64, 1024, 3152, 4096, 16384)
        for width in (128, 768, 1000, 2304, 3072, 30522)
    ]
    found += [Reduction("sum", "bfloat16", (64, 197, 768), (0, 1, 2), (0,))]
    for layout in ((0, 1, 2, 3), (0, 2, 3, 1)):
        found.append(Reduction("sum", "float16", (16, 768, 14, 14), layout, (0, 2, 3)))
    draw = random.Random(SEED)
    while len(found) < DRAWN:
        num = draw.randint(1, 4)
        shape = tuple(draw.choice((1, 2, 3, 7, 8, 16, 50, 64, 100, 197, 512, 768, 1000, 4096)) for _ in range(num))
        if not 1 << 12 <= _elements(shape) <= 1 << 27:
            continue
        layout, dimensions = draw.sample(range(num), num), draw.sample(range(num), draw.randint(1, num))
        reduction = Reduction(
            draw.choice(OPERATORS), draw.choice(DTYPES), shape, tuple(layout), tuple(sorted(dimensions))
        )
        found.append(reduction)
    return found


def _elements(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def taken(call: Reduction) -> list[int]:
    """Bytes of each request beside the result."""
    values = call.values("cuda")
    call.run(values)
    torch.cuda.memory._record_memory_history(max_entries=1000, context=None, stacks="python")
    result = call.run(values)
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [each["size"] for each in entries if each["action"] == "alloc" and each["addr"] != result.data_ptr()]


def main(path: Path) -> None:
    """Add this machine's card to the file."""
    wanted = calls()
    sizes: dict[str, list[list[int]]] = {}
    if path.exists():
        kept = msgspec.json.decode(lzma.decompress(path.read_bytes()), type=Taken)
        sizes = kept.sizes if (kept.torch, kept.calls) == (str(torch.__version__), wanted) else {}
    card = torch.cuda.get_device_properties(0)
    threads = str(card.multi_processor_count * card.max_threads_per_multi_processor)
    sizes[threads] = [taken(call) for call in wanted]
    data = Taken(str(torch.__version__), "python -m bench.kernels.reductions FILE", wanted, sizes)
    path.write_bytes(lzma.compress(msgspec.json.encode(data), preset=9))
    print(f"{card.name} ({threads} threads): {sum(map(bool, sizes[threads]))} of {len(wanted)} take something")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
