"""What the README shows of faults is what was kept."""

import json
from pathlib import Path

from bench.faults import RESULTS, Outcome, table


def test_the_readme_has_the_kept_table() -> None:
    kept = [Outcome(**each) for each in json.loads(RESULTS.read_text())["outcomes"]]
    assert table(kept) in (Path(__file__).parents[2] / "README.md").read_text()
    assert all(each.is_exact and each.seconds < 60 for each in kept)
