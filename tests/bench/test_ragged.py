"""What is claimed of samples of different lengths was measured."""

import json

from bench.training.ragged import RESULTS


def test_the_kept_results_reach_every_goal() -> None:
    kept = json.loads(RESULTS.read_text())
    assert all(kept["goals"].values()), kept["goals"]
    assert kept["percentile_99_tokens"] >= 10 * kept["median_tokens"]
    assert kept["padding"]["grouped"] <= 0.1 * kept["padding"]["fixed"]
    assert max(kept["peak_bytes_in_fewest_micro_steps"]) <= kept["planned_bytes"]
    assert kept["ratio"] > 1.5
