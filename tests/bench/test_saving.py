"""What is claimed of checkpoints written in the background was measured."""

import json

from bench.reliability.saving import RESULTS
from tests import readme


def test_the_docs_say_what_was_measured() -> None:
    kept = json.loads(RESULTS.read_text())
    said = " ".join(readme.text("reliability").split())
    assert f"with a {kept['bytes'] / 1e6:.0f} MB checkpoint" in said
    assert f"{kept['waits']:.2f} of the time, and the steps beside the writing took {kept['step']:.2f}" in said
