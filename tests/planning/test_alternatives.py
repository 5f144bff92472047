"""Alternatives of a plan fit, are near it, vary nothing that is pinned, and are in plan.json."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frugal.config.run_settings import RunSettings
from frugal.config.sample_lengths import of_counts
from frugal.launch.alternatives import for_run, most_steps
from frugal.planning.plan import Alternative, Plan
from frugal.planning.report import DROPOUT
from frugal.planning.search.alternatives import LEAST_SECONDS, LEAST_STEPS, NEAR, change_to, find, is_worth_it
from frugal.planning.search.search import Search
from frugal.planning.strategy import Strategy
from tests.planning.synthetic import SMALL, SyntheticSource, dry_running, planned

MODEL = SMALL | {"bytes_per_token": 500_000, "can_tile": True, "logits_bytes_per_token": 200_000}
"""Several ways of it are near each other."""

CARDS: dict[str, Any] = {"gpus": 4, "mem": "12G", "global_batch": 64}


def alternatives(plan: Plan, model: dict[str, Any] | None = None) -> tuple[Alternative, ...]:
    source = SyntheticSource(plan.request, plan.cluster, model or MODEL)
    return find(Search(plan.request, plan.cluster, source), plan, dry_running(**(model or MODEL)))


def test_they_fit_are_near_the_plan_and_differ_from_it_in_what_a_running_engine_can_change() -> None:
    plan = planned(**CARDS, model=MODEL)
    others = alternatives(plan)
    seconds = [other.time.total_seconds for other in others]
    assert 3 <= len(others) <= 8
    assert seconds == sorted(seconds) and seconds[-1] <= NEAR * plan.time.total_seconds
    assert len({(str(other.strategy), other.batch.micro_batch) for other in others}) == len(others)
    for other in others:
        alike = replace(
            other.strategy, loss=plan.strategy.loss, activation_checkpointing=plan.strategy.activation_checkpointing
        )
        assert alike == plan.strategy
        assert other.memory.fits and other.batch.global_batch == plan.batch.global_batch
        assert (other.strategy, other.batch) != (plan.strategy, plan.batch)
    assert len({other.batch.micro_batch for other in others}) > 1
    assert len({other.strategy.activation_checkpointing for other in others}) > 1


def test_what_is_pinned_is_not_varied() -> None:
    pinned = planned(**CARDS, model=MODEL, micro_batch=4)
    assert {other.batch for other in alternatives(pinned)} == {pinned.batch}
    pinned = planned(**CARDS, model=MODEL, activation_checkpointing="off", loss="plain")
    assert {other.strategy for other in alternatives(pinned)} == {pinned.strategy}
    assert (
        alternatives(planned(**CARDS, model=MODEL, activation_checkpointing="off", loss="plain", micro_batch=4)) == ()
    )


BY_A_WAY_OF_THEIR_OWN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "offload_ratio",
        {"gpus": 4, "mem": "6.6G", "global_batch": 64, "offload": "optimizer"},
        {"drafts": True, "num_matrices": 200},
    ),
    ("mlp", {"gpus": 4, "mem": "12G", "offload": "none", "mlp": "tiled"}, SMALL | {"mlp_bytes_per_token": 12_000_000}),
    ("sequence_parallel", {"gpus": 4, "mem": "24G", "seq_len": 600_000, "global_batch": 6}, {"can_be_split": True}),
    ("layer_modes", {"gpus": 4, "mem": "12G", "global_batch": 64}, {"num_layers": 24, "drafts": True}),
]


@pytest.mark.parametrize(("name", "settings", "model"), BY_A_WAY_OF_THEIR_OWN, ids=lambda each: str(each)[:20])
def test_what_the_search_adds_to_whole_strategies_has_alternatives_too(
    name: str, settings: dict[str, Any], model: dict[str, Any]
) -> None:
    model = {**model, "can_tile": True, "logits_bytes_per_token": 1000}
    plan = planned(**settings, model=model)
    plain = Strategy(zero_stage=3)
    assert getattr(plan.strategy, name) != getattr(plain, name)
    others = alternatives(plan, model)
    assert any(other.strategy != plan.strategy for other in others)
    for other in others:
        own = replace(
            other.strategy,
            activation_checkpointing=plan.strategy.activation_checkpointing,
            layer_modes=plan.strategy.layer_modes,
            loss=plan.strategy.loss,
        )
        assert own == plan.strategy and other.batch.sequence_parallel == plan.batch.sequence_parallel


def test_even_micro_batches_stay_even() -> None:
    plan = planned(gpus=3, mem="12G", global_batch=90, even=True, model=MODEL)
    assert alternatives(plan) and all(other.batch.is_uniform for other in alternatives(plan))


def test_where_the_gradient_depends_on_the_cut_the_cut_stays() -> None:
    plan = planned(**CARDS, model=MODEL | {"notes": (DROPOUT,)})
    assert {other.batch for other in alternatives(plan)} == {plan.batch}


def test_of_samples_of_different_lengths_both_ends_fit() -> None:
    lengths = of_counts(dict.fromkeys((100, 200, 400, 800, 1024), 50))
    model = MODEL | {"bytes_per_sample": 150_000_000}  # so that many short samples take more than few long ones
    plan = planned(**CARDS, model=model, lengths=lengths)
    others = alternatives(plan, model)
    assert len({other.strategy for other in others}) > 1 and len({other.batch.micro_batch for other in others}) > 1
    shortest = plan.batch.shortest
    assert shortest and {other.batch.shortest for other in others} == {shortest}
    (device,) = plan.cluster.kinds
    for other in others:
        for seq_len in (shortest, plan.request.seq_len):
            samples = max(other.batch.micro_batch) * plan.request.seq_len // seq_len
            source = SyntheticSource(replace(plan.request, seq_len=seq_len), plan.cluster, model)
            memory = source.profile(other.strategy, True).memory(samples, device)
            assert memory.headroom_bytes >= other.memory.headroom_bytes >= 0


def test_alternatives_have_the_memory_of_their_dry_runs_and_those_that_do_not_fit_are_none() -> None:
    plan = planned(**CARDS, model=MODEL, error=1.2)
    promised = alternatives(plan)
    source = SyntheticSource(plan.request, plan.cluster, MODEL, error=1.2)
    others = find(Search(plan.request, plan.cluster, source), plan, dry_running(error=1.2, **MODEL))
    (device,) = plan.cluster.kinds
    for other in others:
        dry_run = source.dry_run(other.strategy, max(other.batch.micro_batch), other.batch.accumulation_steps, device)
        assert other.memory == dry_run and dry_run.fits

    def ways(found: tuple[Alternative, ...]) -> set[tuple[Strategy, tuple[int, ...]]]:
        return {(other.strategy, other.batch.micro_batch) for other in found}

    assert others and ways(promised) - ways(others)


def test_a_plan_with_alternatives_is_read_as_it_was_written() -> None:
    plan = planned(**CARDS, model=MODEL)
    richer = replace(plan, alternatives=alternatives(plan)).sealed()
    assert Plan.from_json(richer.to_json()) == richer
    assert richer.digest != plan.digest
    changed = change_to(richer, richer.alternatives[0])
    assert Plan.from_json(changed.to_json()) == changed
    assert (changed.tuned_from, changed.alternatives) == (richer.digest, ())
    assert (changed.strategy, changed.batch) == (richer.alternatives[0].strategy, richer.alternatives[0].batch)
    assert changed.request == plan.request


# Which runs are tuned.


def test_short_runs_are_not_tuned() -> None:
    plan = planned(**CARDS, model=MODEL)
    seconds = plan.time.total_seconds
    assert not is_worth_it(plan, LEAST_STEPS - 1)
    assert not is_worth_it(plan, 0.9 * LEAST_SECONDS / seconds)
    assert is_worth_it(plan, LEAST_SECONDS / seconds + LEAST_STEPS)


def test_a_run_of_few_data_is_short_whatever_they_hold(tmp_path: Path) -> None:
    plan = planned(**CARDS, model=MODEL)
    (tmp_path / "few.txt").write_text("x" * 65536)
    of_file = RunSettings(data=(str(tmp_path / "few.txt"),), epochs=2)
    assert most_steps(plan, of_file) == 2 * 65536 / 1024 / 64 + 1
    assert most_steps(plan, RunSettings(data=("hub/data",))) == float("inf")
    assert most_steps(plan, RunSettings(data=("hub/data",), steps=7)) == 7
    assert for_run(plan, of_file) is plan  # no worker was asked
    assert for_run(plan, RunSettings(data=("hub/data",), tune=False)) is plan
