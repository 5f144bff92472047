"""The goals of a benchmark: kept with its result, printed, and told by the exit code."""

import json
from pathlib import Path
from typing import Any


def report_goals(result: dict[str, Any], file: Path | None = None) -> int:
    """Keep `result` in `file`, if one is given; 0 if all its `goals` are reached, 1 if not."""
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")
    for goal, reached in result["goals"].items():
        print(f"{'reached' if reached else 'MISSED'}: {goal}")
    return 0 if all(result["goals"].values()) else 1
