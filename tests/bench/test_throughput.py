"""The contenders train the same tokens, and what is claimed of their speed was measured."""

import json
from dataclasses import replace

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from bench.training.throughput import MODEL, RESULTS, USUAL, Docstrings, rounds, summary, table
from bench.training.throughput_rank import CONTENDERS
from tests import readme


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


def test_the_docs_have_the_kept_table() -> None:
    assert table(json.loads(RESULTS.read_text())) in readme.text("benchmarks")


@pytest.mark.parametrize("ranks", ["1 ranks, room for 8", "2 ranks, room for 8"])
def test_what_the_kept_results_show(ranks: str) -> None:
    kept = json.loads(RESULTS.read_text())[ranks]
    faster = {name: ratio["median"] for name, ratio in kept["frugal_is_faster"].items()}
    assert kept["goals"]["the losses are those of the loop by hand"]
    assert faster["by hand"] > 0.9  # rounds differ by as much
    assert min(faster["trainer"], faster["accelerate"]) > 1.8


@pytest.mark.parametrize("ranks", ["1 ranks, room for 1", "2 ranks, room for 1"])
def test_where_memory_holds_one_full_length_sample_frugal_is_faster_than_grouping_by_length(ranks: str) -> None:
    kept = json.loads(RESULTS.read_text())[ranks]
    assert kept["goals"]["the losses are those of the loop by hand"]
    assert kept["goals"]["trainer, grouped: 1.1x"]
