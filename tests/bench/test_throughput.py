"""The contenders train the same tokens."""

from dataclasses import replace

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from bench.training.throughput import MODEL, USUAL, Docstrings, rounds, summary
from bench.training.throughput_rank import CONTENDERS


@pytest.mark.exhaustive
def test_every_contender_trains_every_token_and_the_loop_by_hand_has_the_same_losses(two_ranks: Ranks) -> None:
    shape = {**MODEL, "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 160}
    samples = Docstrings(64, 160)
    plan = plan_by_hand(world_size=2, global_batch=32, micro_batch=8, zero_stage=2, request={"seq_len": 160})
    plan = replace(plan, batch=replace(plan.batch, shortest=40)).sealed()
    found = rounds(plan, two_ranks, samples, shape, replace(USUAL, steps=2), 1)
    tokens = int(samples.lengths.sum())
    kept = summary(plan, found, tokens, USUAL.goals)
    assert {name: sum(rank["tokens"] for rank in found[0][name]) for name in CONTENDERS} == dict.fromkeys(
        CONTENDERS, tokens
    )
    assert kept["goals"]["the losses are those of the loop by hand"]
    losses = kept["losses_of_the_first_round"]
    assert {name: len(each) for name, each in losses.items()} == dict.fromkeys(CONTENDERS, 2)
    assert losses["frugal"][0] == pytest.approx(losses["trainer"][0], rel=0.02)  # other samples, the same weights
    assert kept["padded_for_each_token"]["frugal"] < kept["padded_for_each_token"]["trainer"]
