"""`python -m bench.kernels.products FILE`: the three products of an output head, by how its classes lie in memory.

gpt2's head has 50,257 classes, an odd number: rows of logits in half precision do not begin at multiples of 16 bytes,
and on an H200 cuBLAS took kernels of an old kind (`cutlass_75_..._align1`), which were 32 of the 83 ms that the GPU
worked in a step of 16 x 1024 tokens. What would help, in milliseconds of the median product:

- `as it is`: classes as the model has them;
- `rows`: rows of logits that begin at multiples of 16 bytes, and the model's weight;
- `padded`: classes padded to a multiple of 8, in the weight as well, which takes a copy of it.

Needs a GPU.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

CLASSES, WIDTH, ROWS, REPEATS = (50_257, 32_001, 32_000), 768, 4096, 20


def milliseconds(run: Callable[[], object]) -> float:
    """Return the milliseconds of the median of `REPEATS` runs."""
    times = []
    for _ in range(REPEATS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def measured(classes: int, layout: str) -> dict[str, float]:
    """The three products of one layout: logits, gradient of the hidden states, gradient of the weight."""
    padded = -(-classes // 8) * 8
    columns = padded if layout == "padded" else classes
    weight = torch.randn(columns, WIDTH, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    logits: Tensor = torch.randn(ROWS, padded if layout == "rows" else columns, device="cuda", dtype=torch.bfloat16)
    logits = logits[:, :columns]
    total = torch.zeros(columns, WIDTH, device="cuda")
    return {
        "logits": milliseconds(lambda: torch.mm(hidden, weight.t(), out=logits)),
        "hidden": milliseconds(lambda: logits @ weight),
        "weight": milliseconds(lambda: torch.addmm(total, logits.t(), hidden, out_dtype=torch.float32, out=total)),
    }


if __name__ == "__main__":
    found = {
        f"{number} {layout}": measured(number, layout)
        for number in CLASSES
        for layout in ("as it is", "rows", "padded")
    }
    Path(sys.argv[1]).write_text(json.dumps({"device": torch.cuda.get_device_name(), "milliseconds": found}, indent=1))
    for name, each in found.items():
        print(f"{name:20} " + "  ".join(f"{product} {time:.3f}" for product, time in each.items()))
