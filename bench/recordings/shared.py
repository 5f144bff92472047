"""`python -m bench.recordings.shared [FILE ...]`: rows that people gave away, from `frugal measure --share`.

They lie in `bench/recordings/rows/`, added by pull requests; files may be named before they are. Each is printed with
what was predicted on that machine, by the frugal of the row, and what was measured.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from frugal.dryrun.compare import SharedRow

FOLDER = Path(__file__).with_name("rows")


def figures(row: SharedRow) -> dict[str, Any]:
    """Return the errors of a row, with its card and versions."""
    measured, predicted = row.measured, row.predicted
    return {
        "card": row.card, "ranks": row.num_ranks, "torch": row.versions["torch"],
        "frugal": row.versions["frugal-trainer"], "zero_stage": row.strategy.zero_stage,
        "allocated_error": predicted.peak_allocated_bytes / measured.peak_allocated_bytes - 1,
        "reserved_error": predicted.peak_reserved_bytes / measured.peak_reserved_bytes - 1,
        "survived_cap": row.survived_cap,
    }  # fmt: skip


def main(names: Sequence[str]) -> int:
    """Print the rows of these files, or all that are kept."""
    for path in map(Path, names) if names else sorted(FOLDER.glob("*.json")):
        try:
            each = figures(msgspec.json.decode(path.read_bytes(), type=SharedRow))
        except (OSError, msgspec.DecodeError) as error:
            print(f"error: {path} is not a row of `frugal measure --share`: {error}", file=sys.stderr)
            return 2
        print(
            f"{path.name:<40} {each['card']} x {each['ranks']}, torch {each['torch']}, ZeRO-{each['zero_stage']}  "
            f"allocated {each['allocated_error']:+.3%}  reserved {each['reserved_error']:+.3%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
