"""Out of memory before any operator of a step, drawn from seeds: the losses and weights are those of a run without."""

from typing import Any

import pytest

from bench.ranks import Ranks
from tests.faults import anywhere
from tests.faults.test_out_of_memory import STRATEGIES

IN_EVERY_RUN = ("ZeRO-2, bf16", "ZeRO-3, small buckets")
SEEDS = 4


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in STRATEGIES]
)
def test_out_of_memory_anywhere_leaves_no_trace(name: str, two_ranks: Ranks, survived: Any) -> None:
    undisturbed = two_ranks.run(anywhere.run, *STRATEGIES[name], None, 0)
    counts = [min(of_step) for of_step in zip(*(seen for _, seen, _ in undisturbed), strict=True)]
    for seed in range(1 if name in IN_EVERY_RUN else SEEDS):
        disturbed = two_ranks.run(anywhere.run, *STRATEGIES[name], counts, seed, timeout=120)
        assert sum(times for _, _, times in disturbed) == anywhere.FAULTS, seed
        for (result, _, _), (expected, _, _) in zip(disturbed, undisturbed, strict=True):
            assert result == expected, seed
        survived(anywhere.FAULTS)
