"""`python -m bench.memory.coverage [RESULTS ...]`: how many measurements lie within the bounds that plans give, and how
wide the bounds are.

Taken from results that are kept, without a run: live bytes on CPU ranks (`accuracy-cpu.json`), and rows of
`bench.gpu.truth` on real or emulated GPUs. The bounds are those of tensors and allocator; no row knows a context.

What a GPU needed is the smallest memory in which the allocator grants the requests that the run really made, where they
were kept; else what the run went through with: what it was allowed where it was capped, or what it had reserved. So a
row without requests may be outside although less would have done.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from frugal.config.hardware.cluster import CARDS
from frugal.planning.memory.breakdown import Bounds, of_tensors

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: the bounds of a plan, and what was enough. Both of tensors and allocator, in bytes."""

    name: str
    interval: Bounds
    needed_bytes: int

    @property
    def is_inside(self) -> bool:
        """True if it is within the bounds."""
        return self.interval.lower_bytes <= self.needed_bytes <= self.interval.upper_bytes

    @property
    def width(self) -> float:
        """The width of the bounds, as a share of what was needed."""
        return (self.interval.upper_bytes - self.interval.lower_bytes) / self.needed_bytes


def of_cpu(row: dict[str, Any]) -> Row:
    """A row of `bench.memory.accuracy`."""
    predicted, measured = row["predicted_bytes"], row["measured_bytes"]
    bounds = Bounds.around(predicted, of_tensors(predicted, predicted, on_cpu=True, is_known_card=True))
    name = " ".join(str(value) for value in row.get("configuration", {}).values())
    return Row(name=name, interval=bounds, needed_bytes=measured)


def of_gpu(row: dict[str, Any], *, is_known_card: bool) -> Row | None:
    """A row of `bench.gpu.truth`; None where nothing was predicted or measured."""
    figures, runs = row["prediction"]["figures"], row["runs"]
    free = runs.get("free")
    if figures is None or free is None or not row["measured_bytes"]:
        return None
    live = figures["peak_allocated_bytes"] - figures["categories"].get("rounding", 0)
    capacity = figures["smallest_capacity_bytes"]
    bounds = Bounds.around(capacity, of_tensors(live, capacity, on_cpu=False, is_known_card=is_known_card))
    answer = free["answer"]
    of_libraries = max(answer["phases"].values()) - row["measured_bytes"]  # cuBLAS's, where they are not predicted
    if row.get("capacity_bytes"):
        needed = row["capacity_bytes"] - of_libraries
    else:
        capped = runs.get("capped")
        survived = capped is not None and capped["cap_bytes"] is not None and capped["answer"]["survived"]
        needed = capacity if survived else answer["of_gpu"]["reserved_bytes"] - of_libraries
    return Row(name=row["name"], interval=bounds, needed_bytes=needed)


def rows(content: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of a file of results."""
    for row in content["rows"]:
        if "predicted_bytes" in row and row.get("measured_bytes"):
            yield of_cpu(row)
        elif "prediction" in row:
            card = row["prediction"]["configuration"].get("card") or "an unknown one"
            known = any(name.split("-")[0] == card.split("-")[0] for name in CARDS)
            if (found := of_gpu(row, is_known_card=known)) is not None:
                yield found


def report(title: str, measured: Sequence[Row]) -> list[str]:
    """Return the share inside the bounds, their widths, and the rows outside."""
    if not measured:
        return [f"{title}: nothing measured"]
    inside = sum(row.is_inside for row in measured)
    widths = sorted(row.width for row in measured)
    lines = [
        f"{title}: {inside} of {len(measured)} inside ({inside / len(measured):.1%}), "
        f"width {statistics.median(widths):.2%} in the median, {widths[-1]:.2%} at most"
    ]
    for row in measured:
        if not row.is_inside:
            bounds = row.interval
            lines.append(
                f"  outside: {row.name}: {row.needed_bytes:,} needed, "
                f"bounds {bounds.lower_bytes:,} to {bounds.upper_bytes:,}"
            )
    return lines


def main(paths: Sequence[Path]) -> int:
    """Print the report of each file; 1 if a measurement is outside."""
    worst = 0
    for path in paths:
        measured = list(rows(msgspec.json.decode(path.read_bytes())))
        print("\n".join(report(path.name, measured)))
        worst = max(worst, int(any(not row.is_inside for row in measured)))
    return worst


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    sys.exit(main(given or [RESULTS / "accuracy-cpu.json", *sorted(RESULTS.glob("*gpu*.json"))]))
