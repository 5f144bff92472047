"""One rank and two train the same under every ZeRO stage."""

import json
from pathlib import Path

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from bench.training.scaling import MODEL, in_turns, summary, table
from bench.training.training_rank import Text


@pytest.mark.exhaustive
def test_runs_take_turns_and_end_with_the_same_perplexity(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**MODEL, "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64}))
    text = Text(
        ("stdlib",), "causal-lm", 64, tmp_path / "tokenised", limit=8, validation_fraction=0.2, validation_samples=20
    )
    plans = {
        (2, ranks): plan_by_hand(
            world_size=ranks, global_batch=8, micro_batch=2, zero_stage=2,
            request={"model": str(config), "learning_rate": 1e-2},
        )
        for ranks in (1, 2)
    }  # fmt: skip
    text.load()
    found, perplexities = in_turns(plans, {(2, 1): one_rank, (2, 2): two_ranks}, text, rounds=2, steps=2)
    assert [list(turn) for turn in found] == [[(2, 1), (2, 2)], [(2, 2), (2, 1)]]
    result = summary(found, perplexities)
    assert result["goals"]["the same perplexity in all runs"], perplexities
    assert 1 < perplexities[2, 1] < 250, "260 tokens to choose from"
    assert len(table(result["stages"]).splitlines()) == 3


def test_another_perplexity_is_not_taken_for_the_same() -> None:
    seconds = [{(0, 1): 2.0, (0, 2): 1.0}]
    found = summary(seconds, {(0, 1): 10.0, (0, 2): 10.002})
    assert not found["goals"]["the same perplexity in all runs"]
    assert found["stages"][0]["speed_up"]["median"] == pytest.approx(2.0)
