"""What `bench.planning.choice` measures: real steps of every plan, in turns, on real ranks."""

from bench.planning.choice_worker import timed
from bench.plans import plan_by_hand
from bench.ranks import Ranks


def test_every_plan_is_trained_and_timed_on_all_ranks() -> None:
    plans = [
        plan_by_hand(
            world_size=2, global_batch=8, micro_batch=micro, zero_stage=stage,
            request={"model": "bench/memory/families.py:llama", "seq_len": 16},
            strategy={"activation_checkpointing": mode},
        )
        for stage, mode, micro in ((2, "off", 4), (2, "selective", 1))
    ]  # fmt: skip
    ranks = Ranks(2)
    try:
        for found in ranks.run(timed, plans, turns=1, steps=1):
            assert [len(seconds) for seconds in found] == [1, 1]
            assert all(0 < each < 60 for seconds in found for each in seconds)
            assert found[1][0] > found[0][0]  # four micro-steps of one sample, against one of four
    finally:
        ranks.close()
