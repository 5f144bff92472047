"""What is claimed of checkpoints written in the background was measured."""

import json
from pathlib import Path

from bench.saving import RESULTS


def test_the_readme_says_what_was_measured() -> None:
    kept = json.loads(RESULTS.read_text())
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert f"with a {kept['bytes'] / 1e6:.0f} MB checkpoint" in readme
    assert f"{kept['waits']:.2f} of the time, and the steps beside the writing took {kept['step']:.2f}" in readme
