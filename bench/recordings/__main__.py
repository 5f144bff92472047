"""`python -m bench.recordings`: frugal's model of CUDA's allocator against recordings of real cards by other people.

Each recording is the stream of requests of somebody's run, in order; replayed, it has to come to the segments that the
card's allocator had at their most, to the bytes that torch counted in blocks at the end, and to the peak of allocated
bytes where the script printed it. `python -m bench.recordings.keep` adds one. Results go to
`bench/results/recordings.json`.
"""

import json
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.recordings.recording import Recording, kept

RESULTS = Path(__file__).parents[1] / "results" / "recordings.json"


def row(recording: Recording) -> dict[str, Any]:
    """Return the figures of one recording."""
    stream = recording.stream
    return {
        "name": stream.name, "card": stream.device, "torch": stream.versions["torch"],
        "repository": recording.source.repository,
        "path": recording.source.path, "commit": recording.source.commit, "script": recording.script,
        "requests": len(stream.sizes), "is_clean": recording.is_clean,
        "made_bytes": recording.made_bytes,
        "reserved_bytes": stream.reserved_bytes, "reserved_error": recording.reserved_error,
        "allocated_at_end_bytes": recording.allocated_at_end_bytes, "allocated_error": recording.allocated_error,
        "peak_allocated_bytes": recording.peak_allocated_bytes, "printed_peak_gib": recording.printed_peak_gib,
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of all rows, in short."""
    figures = {}
    for name in ("reserved_error", "allocated_error"):
        errors = [abs(each[name]) for each in rows]
        figures[name] = {
            "median": statistics.median(errors), "worst": max(errors), "exact": sum(error == 0 for error in errors)
        }  # fmt: skip
    sources = {
        name: len({each[name].partition("+")[0] for each in rows} - {"not stated"})  # 2.11.0+cu128 is 2.11.0
        for name in ("card", "torch", "repository")
    }
    printed = [each for each in rows if each["printed_peak_gib"] is not None]
    same = sum(round(each["peak_allocated_bytes"] / 2**30, 2) == each["printed_peak_gib"] for each in printed)
    peaks = {"printed": len(printed), "same": same}
    clean = sum(each["is_clean"] for each in rows)
    made = sum(each["made_bytes"] > 0 for each in rows)
    return {
        "recordings": len(rows),
        "clean": clean,
        "with_new_segments": made,
        **sources,
        **figures,
        "printed_peaks": peaks,
    }


def main() -> None:
    """Replay all, print the table, and write the results."""
    rows = [row(recording) for recording in kept()]
    for each in rows:
        start = "clean" if each["is_clean"] else "in use"
        reserved, allocated = (each[name] / 2**20 for name in ("reserved_bytes", "allocated_at_end_bytes"))
        print(
            f"{each['name']:<58} {each['card']:<16} torch {each['torch']:<12} "
            f"{each['requests']:>6} requests  {start:<6} reserved {reserved:>9.1f} MiB {each['reserved_error']:+.4%}  "
            f"allocated {allocated:>9.1f} MiB {each['allocated_error']:+.4%}"
        )
    result = summary(rows)
    print(json.dumps(result, indent=1))
    about = {
        "command": "python -m bench.recordings", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "the cards of the rows; replayed on a CPU", "versions": {"python": platform.python_version()},
    }  # fmt: skip
    RESULTS.write_text(json.dumps({**about, "summary": result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
