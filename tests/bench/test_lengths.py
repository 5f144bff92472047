"""What is claimed of reading lengths was measured."""

import json

from bench.planning.lengths import GOAL, RESULTS


def test_a_million_lengths_are_read_in_a_second() -> None:
    kept = json.loads(RESULTS.read_text())
    assert all(kept["goals"].values()), kept["goals"]
    assert min(kept["lengths_a_second_of_cpu_time"].values()) >= GOAL
