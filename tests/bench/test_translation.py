"""A batch of target tokens is the same on any number of ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from bench.training import translation
from bench.training.translation import MODEL, summary, table, trained, written

SEQ_LEN, GLOBAL_TOKENS, MICRO_BATCH = 128, 1024, 2


def test_real_pairs_learn_the_same_on_one_rank_and_two(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**MODEL, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1}))
    text = written(tmp_path, files=12, seq_len=SEQ_LEN)
    longest = int(text.load().train.counted_tokens.max())
    runs = {}
    for world_size, group in ((1, one_rank), (2, two_ranks)):
        plan = plan_by_hand(
            world_size=world_size, global_batch=GLOBAL_TOKENS // SEQ_LEN, micro_batch=MICRO_BATCH, zero_stage=2,
            request={"model": str(config), "seq_len": SEQ_LEN, "global_tokens": GLOBAL_TOKENS},
        )  # fmt: skip
        batch = replace(plan.batch, global_tokens=GLOBAL_TOKENS, shortest=16)
        runs[world_size] = trained(replace(plan, batch=batch).sealed(), group, text, 3)
    monkeypatch.setattr(translation, "GLOBAL_TOKENS", GLOBAL_TOKENS)
    monkeypatch.setattr(translation, "MAX_TOKENS", MICRO_BATCH * SEQ_LEN)
    found = summary(runs, longest)
    assert all(found["goals"].values()), found
    assert found["ranks"][1]["micro_steps_a_step"] > 1.5 * found["ranks"][2]["micro_steps_a_step"]
    losses = found["ranks"][1]["losses"]
    assert losses[2] < losses[0]
    assert len(table(found).splitlines()) == 4
