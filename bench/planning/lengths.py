"""`python -m bench.planning.lengths`: how fast lengths are read, as `frugal plan --lengths` and `--data` do it.

Counted are the seconds of CPU time of one core, best of three, so that others on the machine do not matter: of a JSON
list with the tokens of each sample, and of tokenised data, whose lengths are a column on disk. Tokenising comes before
that and is not part of it; it is done once, and training needs it anyway. Of more than `MOST_LENGTHS` samples some are
read, evenly spread, and the plan says how many.

Goal: a million lengths a second.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints

from bench.environment import environment
from bench.goals import report_goals
from frugal.config import sample_lengths
from frugal.data.corpus import histogram
from frugal.data.store.arrow_store import ArrowSamples

RESULTS = Path(__file__).parents[1] / "results" / "lengths-cpu.json"
IN_A_FILE, ON_DISK, MANY = 2_000_000, 20_000_000, 200_000_000
GOAL = 1e6


def seconds(work: Callable[[], Any]) -> float:
    """CPU time of it, best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def drawn(number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Lengths of a heavy tail, up to 8192 tokens."""
    return np.clip(np.random.default_rng(0).lognormal(5, 1.2, number), 2, 8192).astype(np.int32)


def main() -> int:
    """Measure, write the results, and say whether the goal is reached."""
    rates = {}
    with TemporaryDirectory() as name:
        file = Path(name) / "lengths.json"
        file.write_text(json.dumps(drawn(IN_A_FILE).tolist()))
        rates["a JSON list"] = IN_A_FILE / seconds(lambda: sample_lengths.of(file))
        arrow = Path(name) / "samples.arrow"
        column = pa.record_batch({"length": pa.array(drawn(ON_DISK))})
        with pa.OSFile(str(arrow), "wb") as out, pa.ipc.new_stream(out, column.schema) as stream:
            for start in range(0, ON_DISK, 100_000):
                stream.write_batch(column.slice(start, 100_000))
        rates["tokenised data"] = ON_DISK / seconds(lambda: histogram(ArrowSamples(arrow).lengths, "data", []))
    many = np.broadcast_to(np.int32(100), MANY)
    said = histogram(many, "data", []).source
    goals = {f"a million a second: {name}": rate >= GOAL for name, rate in rates.items()}
    goals |= {"a part of a huge set is said": said == "data; lengths of one sample in 2"}
    result = environment("python -m bench.planning.lengths") | {
        "lengths_a_second_of_cpu_time": {name: round(rate) for name, rate in rates.items()},
        "said_of_200_million": said,
        "goals": goals,
    }
    for name, rate in rates.items():
        sys.stdout.write(f"{name}: {rate / 1e6:.1f} million lengths a second\n")
    return report_goals(result, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
