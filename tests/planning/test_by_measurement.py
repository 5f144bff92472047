"""A way that a run has measured to be the fastest is planned, where it fits and answers the question that is asked."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frugal.config.hardware import local_host
from frugal.config.schema import understand
from frugal.dryrun.planner import make_plan
from frugal.errors import RequestError
from frugal.planning.batch import BatchPlan
from frugal.planning.plan import Plan
from frugal.planning.search import measured_ways
from frugal.planning.search.measured_ways import MeasuredDevice, MeasuredRun, MeasuredWay, question_of
from frugal.planning.strategy import Strategy
from tests.planning.synthetic import dry_running

ASKED: dict[str, Any] = {"device": "cpu", "gpus": 2, "mem": "20G", "precision": "fp32", "global_batch": 64}
MODEL: dict[str, Any] = {"parameters": 100_000_000, "num_layers": 4}


def planned(*runs: MeasuredRun, error: float = 1.0, **settings: Any) -> Plan:
    made = understand(ASKED | settings)
    return make_plan(*made, dry_run=dry_running(error, **MODEL), measured=runs)


def cut(plan: Plan, micro_batch: int) -> BatchPlan:
    return BatchPlan.of(plan.batch.global_batch, (micro_batch,) * len(plan.batch.micro_batch))


def way(strategy: Strategy, batch: BatchPlan, seconds: float, error: float | None = 0.001) -> MeasuredWay:
    return MeasuredWay(strategy=strategy, batch=batch, seconds=seconds, error=error)


def run_of(plan: Plan, *ways: MeasuredWay, date: str = "2026-11-23") -> MeasuredRun:
    return MeasuredRun(
        question=question_of(plan.request, plan.model, plan.cluster), model=plan.request.model,
        num_ranks=plan.batch.world_size, date=date, folder="/runs/1", ways=ways,
    )  # fmt: skip


def half(plan: Plan) -> BatchPlan:
    """Micro-batches of half the size."""
    return cut(plan, plan.batch.largest_micro_batch // 2)


def test_a_way_that_was_measured_faster_is_planned_and_the_plan_says_so() -> None:
    predicted = planned()
    measured = run_of(
        predicted, way(predicted.strategy, predicted.batch, 2.0), way(predicted.strategy, half(predicted), 1.5)
    )
    plan = planned(measured)
    assert (plan.strategy, plan.batch) == (predicted.strategy, half(predicted))
    assert plan.memory.total_bytes < predicted.memory.total_bytes and plan.digest == plan.compute_digest()
    assert plan.why[0] == (
        "measured fastest on this machine on 2026-11-23: 1.5 s a step, 25 % less than the way predicted fastest "
        f"({predicted.strategy}, micro-batch {predicted.batch.largest_micro_batch}: 2.0 s)"
    )
    assert plan.why[-1].startswith("nothing binds: micro-batch ")
    assert not any(each.reason.startswith("not faster by") for each in plan.rejected)


def test_another_strategy_that_was_measured_faster_is_planned() -> None:
    predicted = planned()
    other = replace(predicted.strategy, activation_checkpointing="full")
    measured = run_of(predicted, way(predicted.strategy, predicted.batch, 2.0), way(other, predicted.batch, 1.9))
    plan = planned(measured)
    assert plan.strategy == other and str(predicted.strategy) in plan.why[0]
    assert [str(each.strategy) for each in plan.rejected].count(str(predicted.strategy)) == 1


@pytest.mark.parametrize(
    ("seconds", "error"),
    [
        pytest.param(1.5, None, id="too few steps to say"),
        pytest.param(1.5, 0.2, id="within the noise"),
        pytest.param(1.99, 0.001, id="by less than 1 %"),
        pytest.param(2.5, 0.001, id="slower"),
    ],
)
def test_what_was_not_faster_is_not_planned(seconds: float, error: float | None) -> None:
    predicted = planned()
    other = way(predicted.strategy, half(predicted), seconds, error)
    plan = planned(run_of(predicted, way(predicted.strategy, predicted.batch, 2.0), other))
    assert (plan.strategy, plan.batch) == (predicted.strategy, predicted.batch)
    assert plan.why[0] == "measured on this machine on 2026-11-23: 2.0 s a step, and none of 1 other way was faster"
    assert plan.why[1:] == predicted.why


@pytest.mark.parametrize(
    "asked",
    [
        {"global_batch": 32}, {"seq_len": 512}, {"gpus": 4}, {"zero_stage": 2}, {"optimizer": "sgd"},
        {"lengths": [100, 1000]}, {"activation_checkpointing": "off"},
    ],
    ids=str,
)  # fmt: skip
def test_what_answers_another_question_changes_nothing(asked: dict[str, Any]) -> None:
    predicted = planned()
    measured = run_of(
        predicted, way(predicted.strategy, predicted.batch, 2.0), way(predicted.strategy, half(predicted), 1.5)
    )
    assert planned(measured, **asked) == planned(**asked)


def test_how_fast_a_step_is_does_not_depend_on_the_learning_rate_or_where_defaults_are_written() -> None:
    predicted = planned(global_batch=512)
    measured = run_of(
        predicted, way(predicted.strategy, predicted.batch, 2.0), way(predicted.strategy, half(predicted), 1.5)
    )
    assert planned(measured, learning_rate=1e-2, global_batch=None).batch == half(predicted)


def test_what_does_not_fit_now_is_not_planned() -> None:
    large = planned(mem="40G")
    ways = way(large.strategy, large.batch, 1.0), way(large.strategy, half(large), 3.0)
    small = planned(run_of(large, *ways), mem="8G")
    assert small.batch.largest_micro_batch < large.batch.largest_micro_batch // 2
    assert small.memory.fits and small.batch == planned(mem="8G").batch


def test_what_its_dry_run_refutes_is_not_planned() -> None:
    predicted = planned()
    ways = way(predicted.strategy, predicted.batch, 2.0), way(predicted.strategy, half(predicted), 1.5)
    refuted = planned(run_of(predicted, *ways), error=5.0)
    assert refuted.memory.fits and refuted.batch == planned(error=5.0).batch != half(predicted)


def test_a_way_that_was_never_measured_has_to_promise_more_than_what_was() -> None:
    small, large = planned(mem="8G"), planned(mem="40G")
    assert large.time.total_seconds < small.time.total_seconds
    seconds, enough = small.time.total_seconds, large.time.total_seconds / small.time.total_seconds
    own = way(small.strategy, small.batch, 3 * seconds)
    assert planned(run_of(small, own), mem="40G").batch == large.batch  # three times as long would it take, too
    faster = way(small.strategy, cut(small, 1), 3 * seconds * enough * 0.5)
    plan = planned(run_of(small, own, faster), mem="40G")
    assert plan.batch == cut(small, 1) and "was not measured" in plan.why[0]


def test_runs_under_different_loads_are_compared_by_what_they_have_in_common() -> None:
    predicted = planned()
    own, other = (predicted.strategy, predicted.batch), (predicted.strategy, half(predicted))
    idle = run_of(predicted, way(*own, 2.0), way(*other, 1.5), date="2026-11-01")
    busy = run_of(predicted, way(*other, 6.0), date="2026-11-02")
    plan = planned(idle, busy)
    assert plan.batch == half(predicted)
    assert "6.0 s a step, 25 % less" in plan.why[0] and "on 2026-11-02" in plan.why[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return measured_ways.measured_folder()


def here() -> MeasuredDevice:
    torch = local_host.library_versions()["torch"]
    return MeasuredDevice(kind="cpu", device=local_host.cpu_name(), card=None, driver="", torch=torch)


def test_runs_at_once_are_all_kept_and_the_oldest_are_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    runs = [run_of(plan, way(plan.strategy, plan.batch, float(number))) for number in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:  # each opens the lock for itself, as processes do
        list(pool.map(lambda run: measured_ways.keep(run, here()), runs))
    kept, notes = measured_ways.known(plan.request, plan.cluster)
    assert sorted(run.ways[0].seconds for run in kept) == [float(number) for number in range(1, 9)] and not notes
    monkeypatch.setattr(measured_ways, "MOST_RUNS", 3)
    measured_ways.keep(runs[4], here())
    last, _ = measured_ways.known(plan.request, plan.cluster)
    assert last == (*kept[-2:], runs[4])


def test_what_others_measured_or_another_model_needs_is_left_out(folder: Path) -> None:
    plan = planned()
    run = run_of(plan, way(plan.strategy, plan.batch, 1.0))
    for device in (replace(here(), device="another"), replace(here(), torch="1.0"), replace(here(), kind="cuda")):
        measured_ways.keep(run, device)
    measured_ways.keep(replace(run, model="another"), here())
    measured_ways.keep(replace(run, num_ranks=3), here())
    assert measured_ways.known(plan.request, plan.cluster) == ((), [])
    measured_ways.keep(run, here())
    assert measured_ways.known(plan.request, plan.cluster) == ((run,), [])


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (b"", "truncated"),
        (b"{}", "schema None"),
        (b'{"schema": 2, "runs": "of a later frugal"}', "it has schema 2, this frugal reads schema 1"),
        (b'{"schema": 1, "kind": "cpu"}', "missing required field"),
        (b'{"schema":' * 200_000, "recursion"),
        (b"\xff\xfe", ""),
    ],
    ids=["empty", "no schema", "later", "incomplete", "deep", "bytes"],
)
def test_a_file_that_cannot_be_read_is_told_and_left_as_it_is(folder: Path, text: bytes, because: str) -> None:
    plan = planned()
    path = measured_ways.keep(run := run_of(plan, way(plan.strategy, plan.batch, 1.0)), here())
    path.write_bytes(text)
    kept, (note,) = measured_ways.known(plan.request, plan.cluster)
    assert kept == () and str(path) in note and because in note
    with pytest.raises(RequestError, match="cannot read") as refused:
        measured_ways.keep(run, here())
    assert refused.value.hint == "move it away to begin a new one" and path.read_bytes() == text


def test_seconds_that_cannot_be_are_no_measurement(folder: Path) -> None:
    plan = planned()
    path = measured_ways.keep(run_of(plan, way(plan.strategy, plan.batch, 1.0)), here())
    content = json.loads(path.read_text())
    content["runs"][0]["ways"][0]["seconds"] = -1.0
    path.write_text(json.dumps(content))
    kept, (note,) = measured_ways.known(plan.request, plan.cluster)
    assert kept == () and "-1.0 seconds a step are none" in note
