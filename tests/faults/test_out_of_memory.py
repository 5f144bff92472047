"""Out of memory on one rank, anywhere in a step: nobody hangs, and the weights are those of an undisturbed run."""

from typing import Any

import pytest

from bench.ranks import Ranks
from frugal.config.adapters import Lora
from tests.faults import disturbed
from tests.faults.disturbed import FAULTS, HALVING

SMALL = {"reduce_bucket_elements": 5000}
SMALL_3 = {**SMALL, "persistence_threshold_elements": 0, "prefetch_bucket_elements": 3000, "sub_group_elements": 20000}
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {"ZeRO-0": (0, {})}
for stage in (1, 2, 3):
    STRATEGIES |= {
        f"ZeRO-{stage}": (stage, {}),
        f"ZeRO-{stage}, host optimizer": (stage, {"offload_optimizer": "cpu"}),
        f"ZeRO-{stage}, overlap": (stage, {"overlap_comm": True}),
        f"ZeRO-{stage}, small buckets": (stage, SMALL_3 if stage == 3 else SMALL),
    }
STRATEGIES |= {
    "ZeRO-2, bf16": (2, {"precision": "bf16"}),
    "ZeRO-2, tiled loss": (2, {"loss": "tiled"}),
    "ZeRO-3, bf16, activation checkpointing": (3, {"precision": "bf16", "activation_checkpointing": "full"}),
}
LORA = Lora.of("r=4,dropout=0.1")
STRATEGIES |= {
    "ZeRO-0, adapters": (0, {"lora": LORA}),
    "ZeRO-2, adapters, tiled loss": (2, {"lora": LORA, "loss": "tiled"}),
    "ZeRO-2, adapters, host optimizer": (2, {"lora": LORA, "offload_optimizer": "cpu"}),
    "ZeRO-3, adapters, small buckets": (3, {"lora": LORA, **SMALL_3}),
    "ZeRO-3, adapters, activation checkpointing": (3, {"lora": LORA, "activation_checkpointing": "full"}),
}
IN_EVERY_RUN = {("ZeRO-2, bf16", 2)}


def cases() -> list[Any]:
    """Every strategy on two ranks and on three; a few of them in every run of the tests."""
    return [
        pytest.param(
            name,
            ranks,
            id=f"{name}, {ranks} ranks",
            marks=[] if (name, ranks) in IN_EVERY_RUN else pytest.mark.exhaustive,
        )
        for name in STRATEGIES
        for ranks in (2, 3)
    ]


@pytest.mark.parametrize(("name", "world_size"), cases())
def test_out_of_memory_on_one_rank_leaves_no_trace(
    name: str, world_size: int, request: pytest.FixtureRequest, survived: Any
) -> None:
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 3: "three_ranks"}[world_size])
    strategy = STRATEGIES[name]
    undisturbed = {
        halved: ranks.run(disturbed.run, *strategy, None, halved=halved, timeout=120)[0]
        for halved in ("", "training", "evaluation")
    }
    for fault in FAULTS:
        like = "training" if fault in HALVING else "evaluation" if fault == "evaluation" else ""
        disturbed_run = ranks.run(disturbed.run, *strategy, fault, world_size - 1, timeout=120)[0]
        assert disturbed_run == undisturbed[like], fault
    survived(len(FAULTS))
