"""A run that is tuned in its first steps: when it begins, what is kept of it, and how the run goes on when resumed.

First what one engine can change to (`tuner`), then, in long runs, another engine (`engine_trial`).

With --calibrate, what was measured is also kept for later plans (`frugal.planning.search.measured_ways`).
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from frugal import file_errors
from frugal.config.hardware import local_host
from frugal.config.hardware.cluster import recognise_card
from frugal.config.run_settings import RunSettings
from frugal.distributed import env, replacement
from frugal.distributed.exchange import from_rank_0
from frugal.errors import FrugalError, RequestError
from frugal.planning.plan import Plan
from frugal.planning.search import alternatives, measured_ways
from frugal.planning.search.alternatives import is_worth_it
from frugal.planning.search.measured_ways import MeasuredDevice, MeasuredRun, MeasuredWay, question_of
from frugal.training.checkpoint import run_folder
from frugal.training.measure import engine_trial, tuner
from frugal.training.measure.engine_trial import EngineTrial
from frugal.training.measure.race import ENOUGH
from frugal.units import plural

if TYPE_CHECKING:
    from frugal.training.engine import Engine
    from frugal.training.reports.metrics import Log

PLAN = "plan.json"

SHARE_ASKED = 0.5
"""Of a run's steps that tuning may take where it was asked for."""


def continued(plan: Plan, settings: RunSettings) -> Plan:
    """The plan that the run in this folder was tuned to, where it is started again with the one before. Collective."""
    if replacement.this().is_trial:
        return engine_trial.plan_of_trial(plan)
    if not settings.resume:
        return plan
    text = from_rank_0(_tuned_from(plan, settings.out / PLAN) if env.rank() == 0 else None, str | None)
    return plan if text is None else Plan.from_json(text.encode())


def _tuned_from(plan: Plan, path: Path) -> str | None:
    try:
        kept = Plan.read(path)
    except FrugalError:  # it is written anew
        return None
    return kept.to_json().decode() if kept.tuned_from == plan.digest else None


def begin(engine: "Engine", settings: RunSettings, log: "Log", steps_left: int, first_step: int = 0) -> None:
    """Have the steps to come tuned, where that is wanted and may pay; what is found is in the run's folder. Collective.

    A run that is resumed in the midst of it begins again; one that has ended it goes on with what was found. With
    --calibrate, what was measured is kept for later plans, also of a run that is not tuned: its own steps.
    `first_step`: steps done before.
    """
    own, calibrates, this = engine.plan, settings.calibrate, replacement.this()

    def keep(ways: tuple[MeasuredWay, ...]) -> None:
        if calibrates:
            _keep(engine, own, ways, settings, log)

    if this.failed:
        engine_trial.after_failure(engine, settings, log, first_step)
    if this.is_trial:
        engine.tuner = EngineTrial(engine, settings, log, steps_left, keep)
    if this.number:
        return

    def on_event(values: dict[str, Any]) -> None:
        log.event(**values)
        if values["event"] != "tuned" or not log.is_rank_0:
            return
        try:
            run_folder.write_record(engine.plan, settings)
        except OSError as error:
            because, _ = file_errors.explain(error, settings.out)
            log.say(f"the tuned plan is not kept, a resumed run tunes again: {because}")
        assert isinstance(engine.tuner, tuner.Tuner)
        keep(engine.tuner.measured)

    why_not, most = _why_not(own, settings, steps_left)
    if not why_not and engine_trial.is_possible(engine, settings):
        engine.tuner = EngineTrial(engine, settings, log, steps_left, keep)
    trial = engine.tuner
    if most:
        engine.tune(most, on_event)
        assert engine.tuner is not None
        engine.tuner.then = trial
        return
    if why_not and why_not != UNWANTED:
        log.say(f"tuning: {why_not}, so nothing is tried")
    if calibrates and trial is None:  # which measures them, too
        number = min(tuner.OWN_STEPS, steps_left - tuner.FIRST_STEPS)
        if number < ENOUGH:
            log.say(f"--calibrate: {plural(steps_left, 'step')} are too few to measure one, so nothing is kept")
            return
        log.say("--calibrate: the run is not tuned, so that only steps of its plan are measured")
        engine.tuner = tuner.OwnSteps(engine, number, lambda way: keep((way,)))


UNWANTED = "it is not wanted"


def _why_not(plan: Plan, settings: RunSettings, steps_left: int) -> tuple[str, int]:
    """Why a run is not tuned, empty if it is; and the most steps that this may take in one engine, which may be 0."""
    asked = settings.tune
    if asked is False or plan.tuned_from or not (asked or is_worth_it(plan, steps_left)):
        return UNWANTED, 0
    if not plan.alternatives:
        return "the plan lists no alternatives", 0
    if all(alternatives.needs_other_engine(plan, other) for other in plan.alternatives):
        return "", 0
    most = int(steps_left * (SHARE_ASKED if asked else tuner.SHARE)) - tuner.FIRST_STEPS
    return ("", most) if most >= tuner.LEAST_STEPS else (f"{steps_left} steps are too few", 0)


def _keep(engine: "Engine", plan: Plan, ways: tuple[MeasuredWay, ...], settings: RunSettings, log: "Log") -> None:
    """Add what was measured to what this machine's later plans know; on rank 0."""
    if not log.is_rank_0:
        return
    if not ways:
        log.say("--calibrate: nothing was measured to the end, so nothing is kept")
        return
    run = MeasuredRun(
        question=question_of(plan.request, plan.model, plan.cluster), model=plan.request.model,
        num_ranks=plan.batch.world_size, date=datetime.now(UTC).strftime("%Y-%m-%d"), folder=str(settings.out),
        ways=ways,
    )  # fmt: skip
    try:
        path = measured_ways.keep(run, _device(engine.device))
    except RequestError as error:
        log.say(f"--calibrate: what was measured is not kept: {error.what}: {'; '.join(error.because)}")
        return
    log.say(
        f"--calibrate: the seconds of {plural(len(ways), 'way')} are kept in {path}; later plans of this training use "
        "them unless given --no-calibration"
    )


def _device(device: torch.device) -> MeasuredDevice:
    """What this rank runs on."""
    torch_version = local_host.library_versions()["torch"]
    if device.type == "cpu":
        return MeasuredDevice(kind="cpu", device=local_host.cpu_name(), card=None, driver="", torch=torch_version)
    properties = torch.cuda.get_device_properties(device)
    return MeasuredDevice(
        kind="cuda", device=properties.name, card=recognise_card(properties.name, properties.total_memory),
        driver=local_host.cuda_driver(), torch=torch_version,
    )  # fmt: skip
