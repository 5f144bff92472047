"""Steps taken in several ways are the steps of an untuned run, which then continues in the fastest way."""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from bench.runs import records
from frugal.checkpoint import manifest
from frugal.checkpoint.progress import Progress
from frugal.config.run_settings import RunSettings
from frugal.data.batches import GlobalBatches
from frugal.engine import training
from frugal.engine.engine import Engine
from frugal.engine.measure.tuner import FIRST_STEPS, TURN, Way, race, steps_needed
from frugal.engine.reports.metrics import Log
from frugal.errors import RequestError
from frugal.planning.batch import BatchPlan
from frugal.planning.plan import Alternative, Plan
from tests.engine.engines import run_loop, running
from tests.engine.gradients import bound_of_losses
from tests.engine.small_models import ragged_samples, tiny_gpt2

STEPS = FIRST_STEPS + steps_needed(3) + 1
STEPS_AROUND = 10  # the first way after the plan begins in the sixth
SAMPLES = ragged_samples(STEPS * 8, longest=32)


def raced(seconds: list[float], *, noise: float = 0.0, seed: int = 0, drift: float = 0.0) -> tuple[int, list[int]]:
    """Return the winner of a race and who took each step; a step takes its way's seconds and what chance adds."""
    ways = [Way(a_plan(0, ())) for _ in seconds]
    chance, ran, running = random.Random(seed), list[int](), race(ways)
    way = next(running)
    while True:
        number = next(i for i, each in enumerate(ways) if each is way)
        ran.append(number)
        load = 1 + drift * ((len(ran) - 1 - FIRST_STEPS) // (TURN * len(seconds)))  # grows from round to round
        try:
            way = running.send(seconds[number] * load * (1 + noise * chance.random()))
        except StopIteration as end:
            return next(i for i, each in enumerate(ways) if each is end.value), ran


@pytest.mark.parametrize(
    ("seconds", "changes", "winner"),
    [
        ([1.0, 1.1, 0.8, 0.9, 1.2], {"noise": 0.01}, 2),
        ([1.0, 1.0, 1.0, 1.0], {"noise": 0.2}, 0),
        ([1.0, 0.995, 1.3], {}, 0),  # faster, by less than a change is worth
        ([1.0, 0.9], {"drift": 0.5}, 1),  # a machine that slows down from round to round
        ([1.0, 1.1], {"drift": 0.5}, 0),
        *(([1.0, 1.05, 1.02], {"noise": 0.05, "seed": seed}, 0) for seed in range(10)),
        *(([1.0, 0.8, 1.02], {"noise": 0.05, "seed": seed}, 1) for seed in range(10)),
    ],
)
def test_a_way_wins_if_it_is_faster_than_the_plan_beyond_the_noise(
    seconds: list[float], changes: dict[str, Any], winner: int
) -> None:
    assert raced(seconds, **changes)[0] == winner


def test_a_race_takes_no_step_that_cannot_change_its_result() -> None:
    assert raced([1.0, 3.0, 0.9])[1].count(1) == 2  # far slower in its first counted step
    assert len(raced([1.0, 1.2])[1]) < FIRST_STEPS + steps_needed(2)
    for number in range(2, 10):
        assert len(raced([1.0] * number, noise=0.5)[1]) <= FIRST_STEPS + steps_needed(number)


def test_a_way_that_runs_out_of_memory_is_dropped_and_the_others_race_on() -> None:
    ways = [Way(a_plan(0, ())) for _ in range(3)]
    running, took = race(ways), {id(ways[0]): 1.0, id(ways[1]): None, id(ways[2]): 0.7}
    way = next(running)
    with pytest.raises(StopIteration) as end:
        while True:
            way = running.send(took[id(way)])
    assert end.value.value is ways[2] and ways[1].dropped == "out of memory"


def with_ways(plan: Plan, ways: Sequence[dict[str, Any]]) -> Plan:
    """Return the plan with alternatives: fields of its strategy, and `micro_batch`."""
    made = plan.batch

    def alternative(way: dict[str, Any]) -> Alternative:
        strategy = {name: value for name, value in way.items() if name != "micro_batch"}
        caps = (way.get("micro_batch", 2),) * len(made.micro_batch)
        batch = BatchPlan.of(8, caps, sequence_parallel=made.sequence_parallel)
        return Alternative(
            strategy=replace(plan.strategy, **strategy),
            batch=replace(batch, shortest=made.shortest, overhead_tokens=made.overhead_tokens),
            memory=plan.memory,
            time=plan.time,
        )

    return replace(plan, alternatives=tuple(map(alternative, ways))).sealed()


def a_plan(zero_stage: int, ways: Sequence[dict[str, Any]]) -> Plan:
    """Micro-batches of 2 on 2 ranks, and alternatives."""
    request = {"learning_rate": 1e-2}
    plan = plan_by_hand(world_size=2, global_batch=8, micro_batch=2, zero_stage=zero_stage, request=request)
    return with_ways(plan, ways)


def losses(plan: Plan, tune: bool, fail: str = "", steps: int = STEPS) -> dict[str, Any]:
    """What the steps of a run give, tuned or not; runs on ranks. `fail`: the way in which memory runs out once."""
    ends: list[dict[str, Any]] = []
    with running(plan) as engine:
        if tune:
            engine.tune(steps_needed(1 + len(plan.alternatives)), ends.append)
        if fail:
            _run_out_once(engine, fail)
        results = [engine.train_step(SAMPLES[8 * step : 8 * step + 8]) for step in range(steps)]
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "ends": ends,
            "digest": engine.plan.digest,
            "tuned_from": engine.plan.tuned_from,
            "sizes": engine.plan.batch.micro_batch,
            "is_over": engine.tuner is None,
        }


@functools.cache
def bound(steps: int) -> float:
    """Return how far the losses of so many steps may be apart, relative."""
    batches = [SAMPLES[8 * step : 8 * step + 8] for step in range(steps)]
    return bound_of_losses(tiny_gpt2, batches, learning_rate=1e-2)


def _run_out_once(engine: Engine, mode: str) -> None:
    """Rank 1 is out of memory in the first forward under this mode of activation checkpointing."""
    usual, failed = engine.accumulate, []

    def accumulate(*args: Any) -> Any:
        if engine.plan.strategy.activation_checkpointing == mode and not failed:
            failed.append(True)
            if engine.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB.")
        return usual(*args)

    engine.accumulate = accumulate  # type: ignore[method-assign]  # of this engine alone


FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}


@pytest.mark.parametrize("zero_stage", [2, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 3))])
def test_a_tuned_run_is_the_untuned_one(zero_stage: int, two_ranks: Ranks) -> None:
    same_sums = a_plan(zero_stage, (FULL, SELECTIVE))
    untuned, _ = two_ranks.run(losses, same_sums, False)
    same, on_other_rank = two_ranks.run(losses, same_sums, True)
    assert (same["losses"], same["norms"]) == (untuned["losses"], untuned["norms"])  # bit for bit
    (end,) = same["ends"]
    assert [way["strategy"] for way in end["ways"]] == [
        str(same_sums.strategy), *(str(other.strategy) for other in same_sums.alternatives)
    ]  # fmt: skip
    assert sum(way["is_kept"] for way in end["ways"]) == 1 and all(way["num_steps"] > 1 for way in end["ways"])
    assert (same["digest"], same["tuned_from"]) == (on_other_rank["digest"], same_sums.digest)
    assert same["is_over"] and end["event"] == "tuned"


def test_a_way_in_which_memory_runs_out_is_given_up(two_ranks: Ranks) -> None:
    plan = a_plan(2, (FULL, SELECTIVE))
    untuned, _ = two_ranks.run(losses, plan, False, "", STEPS_AROUND)
    tuned, _ = two_ranks.run(losses, plan, True, "full")
    assert tuned["losses"][:STEPS_AROUND] == pytest.approx(untuned["losses"], rel=bound(STEPS_AROUND))
    (dropped,) = [way for way in tuned["ends"][0]["ways"] if way["dropped"] == "out of memory"]
    assert (dropped["strategy"], dropped["num_steps"]) == (str(plan.alternatives[0].strategy), 1)
    assert tuned["sizes"] == plan.batch.micro_batch  # what was lowered in that step is as planned again


def test_memory_that_runs_out_under_the_plan_ends_tuning(two_ranks: Ranks) -> None:
    tuned, _ = two_ranks.run(losses, a_plan(2, (FULL,)), True, "off", 3)
    assert [end["ways"] for end in tuned["ends"]] == [[]] and tuned["tuned_from"]


def refusals(plan: Plan) -> list[str]:
    """What is said where there is nothing to tune; runs on ranks."""
    said = []
    with running(plan) as engine:
        for alternatives, steps in ((plan.alternatives, 5), ((), 500)):
            engine.plan = replace(plan, alternatives=alternatives)
            with pytest.raises(RequestError) as error:
                engine.tune(steps)
            said += error.value.because
    return said


def test_without_alternatives_or_with_too_few_steps_there_is_nothing_to_tune(two_ranks: Ranks) -> None:
    assert two_ranks.run(refusals, a_plan(0, (FULL,)))[0] == ["5 steps are too few", "its plan has no alternatives"]


def a_run(folder: Path, plan: Plan, **changes: Any) -> dict[str, Any]:
    """A run of 60 steps as `frugal.engine.run` puts it together, told of as far as it is tuned; runs on ranks."""
    settings = RunSettings(**{"steps": 60, "save_every": 8, "keep": 9, "eval_every": 7, "out": folder} | changes)
    folder.mkdir(parents=True, exist_ok=True)
    started = training.plan_to_resume(plan, folder) if settings.resume else plan
    with running(started) as engine:
        tuned = []

        def begin(log: Log, start: Progress) -> None:
            engine.tuner = training.tuner_of_run(engine, settings, log, (settings.steps or 0) - start.step)
            tuned.append(engine.tuner is not None)

        batches, evaluate = GlobalBatches(SAMPLES, global_batch=8), partial(engine.evaluate, SAMPLES[:5])
        run_loop(engine, batches, settings, evaluate=evaluate, begin=begin)
        return {"began with": started.digest, "ended with": engine.plan.digest, "was tuned": tuned == [True]}


def test_a_run_keeps_what_it_found_and_goes_on_with_it(tmp_path: Path, two_ranks: Ranks) -> None:
    plan = a_plan(2, (FULL, {"micro_batch": 4}))
    first, on_other_rank = two_ranks.run(a_run, tmp_path, plan, tune=True)
    assert first == on_other_rank
    kept = Plan.read(tmp_path / "plan.json")
    assert (kept.digest, kept.tuned_from) == (first["ended with"], plan.digest)
    assert kept.why[0].startswith("tuned while training: ")
    found = records(tmp_path)
    (end,) = (record for record in found if record["event"] == "tuned")
    assert end["plan_digest"] == kept.digest and end["time"] > 0
    midst = manifest.read(tmp_path / "checkpoints" / "step-000008")
    assert (midst.plan_digest, midst.strategy) == (plan.digest, str(plan.strategy))  # not of what was just tried
    assert manifest.read(tmp_path / "checkpoints" / "step-000060").plan_digest == kept.digest
    again, _ = two_ranks.run(a_run, tmp_path, plan, tune=True, steps=62, resume=True)
    assert (again["began with"], again["was tuned"]) == (kept.digest, False)


def test_what_is_not_wanted_or_too_short_is_not_tuned(tmp_path: Path, two_ranks: Ranks) -> None:
    plan = a_plan(0, (FULL,))
    for changes in ({"tune": False}, {"tune": None}, {"tune": True, "steps": 12}):
        done, _ = two_ranks.run(a_run, tmp_path / str(changes), plan, **({"steps": 5, "save_every": 0} | changes))
        assert not done["was tuned"] and done["ended with"] == plan.digest
