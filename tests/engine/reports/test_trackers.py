"""Trackers of experiments: what TensorBoard's own reader finds, and that none of them ends a run."""

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from accelerate import tracking
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from bench.plans import plan_by_hand
from bench.runs import records
from frugal.config.run_settings import TRACKERS, RunSettings
from frugal.engine.evaluation import Evaluation
from frugal.engine.reports import trackers
from frugal.engine.reports.trackers import Trackers
from frugal.errors import RequestError
from tests.engine.reports.test_metrics import log_steps, logged, result


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar that TensorBoard shows, without records that a resumed run did again."""
    shown = EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, each.value) for each in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def hyperparameters(folder: Path) -> dict[str, Any]:
    """Return what TensorBoard shows in its tab of hyper-parameters, of the only start that stored any."""
    (kept,) = folder.glob("*/events*")
    metadata = EventAccumulator(str(kept.parent)).Reload().SummaryMetadata("_hparams_/session_start_info")
    values = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def test_tensorboard_shows_the_curves_of_a_run_and_of_its_resume_and_what_was_asked(tmp_path: Path) -> None:
    plan = plan_by_hand(world_size=2, global_batch=8, micro_batch=2, zero_stage=2, request={"learning_rate": 1e-3})
    asked = trackers.hyperparameters(plan, RunSettings(steps=5, data=("a.txt", "b.txt")).of_run)
    log, _ = logged(tmp_path, 5, trackers=Trackers(["tensorboard"], tmp_path, asked, 0))
    with log:
        log.memory(2, 3 << 20)
        for step in (1, 2, 3):
            log.step(step, result(loss=5.0 - step), 0.5)
        log.evaluation(3, Evaluation(loss=1.0, targets=70, samples=7))
    log, _ = logged(tmp_path, 5, first_step=2, trackers=Trackers(["tensorboard"], tmp_path, asked, 2))
    with log:
        for step in (3, 4, 5):
            log.step(step, result(loss=2.0), 0.5)
        log.evaluation(5, Evaluation(loss=0.5, targets=70, samples=7))
        log.evaluation(5, Evaluation(loss=0.75, targets=70, samples=7), of="test")
    shown = curves(tmp_path / "tensorboard")
    assert shown["train/loss"] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert shown["train/tokens_per_second"] == [(step, 2000.0) for step in range(1, 6)]
    assert shown["train/memory_bytes"] == [(1, 3 << 20), (2, 3 << 20)]
    assert shown["train/grad_norm"][0] == (1, 0.5)
    assert shown["train/learning_rate"][0] == (1, pytest.approx(3e-4))
    assert shown["eval/loss"] == [(5, 0.5)], "the one after step 3 was beyond the checkpoint"
    assert shown["test/loss"] == [(5, 0.75)]
    values = hyperparameters(tmp_path / "tensorboard")
    assert values["learning_rate"] == 1e-3
    assert (values["global_batch"], values["world_size"], values["data"]) == (8, 2, "a.txt, b.txt")
    assert values["strategy"] == str(plan.strategy)


def test_a_tracker_that_fails_is_left_out_with_one_line_and_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise ConnectionError("the service is down\nsecond line")

    log, written = logged(tmp_path, trackers=Trackers(["tensorboard"], tmp_path, {}, 0))
    with log:
        log_steps(log, 1)
        monkeypatch.setattr(tracking.TensorBoardTracker, "log", broken)
        log_steps(log, 2, 3)
    said = [line for line in written.getvalue().splitlines() if "tracker" in line]
    assert said == ["the tracker tensorboard is left out from here on: ConnectionError: the service is down"]
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]
    assert [step for step, _ in curves(tmp_path / "tensorboard")["train/loss"]] == [1]


def test_a_run_goes_on_where_tensorboards_files_are_deleted_under_it(tmp_path: Path) -> None:
    log, _ = logged(tmp_path, trackers=Trackers(["tensorboard"], tmp_path, {}, 0))
    with log:
        log_steps(log, 1)
        shutil.rmtree(tmp_path / "tensorboard")
        log_steps(log, 2, 3, 4, 5)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_tracker_that_is_not_installed_or_cannot_be_started_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorboard").write_text("a file in its place")
    with pytest.raises(RequestError, match="cannot start the tracker tensorboard\n  because "):
        Trackers(["tensorboard"], tmp_path, {}, 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "comet_ml" else SimpleNamespace())
    with pytest.raises(RequestError) as raised:
        trackers.check(["tensorboard", "comet_ml"])
    assert "hint: pip install comet-ml, or leave --track comet_ml out" in str(raised.value)


def test_a_run_with_a_service_goes_on_under_the_id_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without W&B itself: what accelerate's tracker, which is real, hands to it."""
    begun: list[dict[str, Any]] = []

    def init(**options: Any) -> SimpleNamespace:
        begun.append(options)
        return SimpleNamespace(id=options["id"], log=lambda *_a, **_k: None, finish=lambda: None)

    wandb = ModuleType("wandb")
    wandb.__spec__ = SimpleNamespace()  # type: ignore[assignment]  # is looked for, not used
    wandb.init = init  # type: ignore[attr-defined]
    wandb.config = SimpleNamespace(update=lambda values, **_: begun[-1].update(config=values))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    Trackers(["wandb"], tmp_path, {"steps": 5}, 0).finish()
    Trackers(["wandb"], tmp_path, {"steps": 5}, 3).finish()
    first, second = begun
    assert first["id"] == second["id"]
    assert (first["resume"], first["project"], first["config"]) == ("allow", "frugal", {"steps": 5})
    assert "config" not in second


def test_the_names_of_trackers_are_accelerates(tmp_path: Path) -> None:
    assert set(TRACKERS) == set(tracking.LOGGER_TYPE_TO_CLASS)
    with pytest.raises(RequestError, match="--track is tensorbord\n  because it must be one of tensorboard, wandb"):
        RunSettings(track=("tensorbord",))
