"""`python -m bench.planning.cpu_paces`: how long one thread takes for a byte of each operator's traffic, against GELU.

These are the weights in `frugal.memory_watch.cpu_pace`, by which times on CPUs are predicted. Bytes
are counted as frugal counts them. Operators take turns on 16 MiB of fp32, more than a core's own cache holds; the best
of several rounds counts, because other work on the machine only ever adds. Printed beside each: the weight in use.
"""

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1"}

import torch
from torch import Tensor

from frugal.config.hardware.local_host import cpu_name
from frugal.memory_watch import cpu_pace, traffic

RESULTS = Path(__file__).parents[1] / "results" / "cpu-paces.json"
ROWS, COLUMNS = 4096, 1024
aten = torch.ops.aten


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Operators that models and optimizers spend their time in, and what they are called with."""
    x, y = (torch.randn(ROWS, COLUMNS) for _ in range(2))
    scale = torch.ones(COLUMNS)
    mean, inverse = torch.zeros(ROWS, 1), torch.ones(ROWS, 1)
    log_p = torch.log_softmax(x, -1)
    return {
        "gelu": (aten.gelu.default, (x,)),
        "gelu backward": (aten.gelu_backward.default, (x, y)),
        "silu": (aten.silu.default, (x,)),
        "silu backward": (aten.silu_backward.default, (x, y)),
        "layer norm": (aten.native_layer_norm.default, (x, [COLUMNS], scale, scale, 1e-5)),
        "layer norm backward": (
            aten.native_layer_norm_backward.default, (x, y, [COLUMNS], mean, inverse, scale, scale, [True] * 3),
        ),
        "exp in place": (aten.exp_.default, (torch.zeros(ROWS, COLUMNS),)),
        "add": (aten.add.Tensor, (x, y)),
        "add in place": (aten.add_.Tensor, (torch.zeros(ROWS, COLUMNS), y)),
        "multiply": (aten.mul.Tensor, (x, y)),
        "copy": (aten.clone.default, (x,)),
        "sum of rows": (aten.sum.dim_IntList, (x, [-1])),
        "maximum": (aten.amax.default, (x, [-1])),
        "softmax": (aten._softmax.default, (x, -1, False)),
        "log-softmax": (aten._log_softmax.default, (x, -1, False)),
        "log-softmax backward": (aten._log_softmax_backward_data.default, (x, log_p, -1, torch.float32)),
        "dropout": (aten.native_dropout.default, (x, 0.1, True)),
    }  # fmt: skip


def main() -> None:
    """Measure all operators, print them and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asked = calls()
    rates = dict.fromkeys(asked, 0.0)
    with torch.no_grad():
        for _ in range(arguments.rounds):
            for name, (func, args) in asked.items():
                rates[name] = max(rates[name], rate(func, args))
    reference = math.sqrt(rates["gelu"] * rates["gelu backward"])
    found = {
        name: {"gb_per_s": rates[name] / 1e9, "pace": reference / rates[name], "in_use": cpu_pace(func)}
        for name, (func, _) in asked.items()
    }
    print(f"{'':<22} {'GB/s':>6} {'pace':>6} {'in use':>7}")
    for name, each in found.items():
        print(f"{name:<22} {each['gb_per_s']:>6.1f} {each['pace']:>6.2f} {each['in_use']:>7.2f}")
    if arguments.record:
        record = {
            "command": "python -m bench.planning.cpu_paces --record",
            "date": datetime.now(UTC).date().isoformat(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
            "versions": {"torch": version("torch")},
            "operators": found,
        }
        RESULTS.write_text(json.dumps(record, indent=2) + "\n")


def rate(func: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Bytes of one call's traffic per second."""
    began = time.perf_counter()
    out = func(*args)
    seconds = time.perf_counter() - began
    return traffic(func, tuple(a for a in args if isinstance(a, Tensor)), {}, out) / seconds


if __name__ == "__main__":
    main()
