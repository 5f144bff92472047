"""A run that is tuned in its first steps: when it begins, what is kept of it, and how the run goes on when resumed.

First what one engine can change to (`tuner`), then, in long runs, another engine (`engine_trial`).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from frugal import file_errors
from frugal.config.run_settings import RunSettings
from frugal.distributed import env, replacement
from frugal.distributed.exchange import from_rank_0
from frugal.errors import FrugalError
from frugal.planning.plan import Plan
from frugal.planning.search import alternatives
from frugal.planning.search.alternatives import is_worth_it
from frugal.training.checkpoint import run_folder
from frugal.training.measure import engine_trial, tuner
from frugal.training.measure.engine_trial import EngineTrial

if TYPE_CHECKING:
    from frugal.training.checkpoint.held_folder import HeldFolder
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


def begin(engine: "Engine", held: "HeldFolder", log: "Log", steps_left: int, first_step: int = 0) -> None:
    """Have the steps to come tuned, where that is wanted and may pay; what is found is in the run's folder. Collective.

    A run that is resumed in the midst of it begins again; one that has ended it goes on with what was found.
    `first_step`: steps done before.
    """
    plan, asked, this = engine.plan, held.settings.tune, replacement.this()
    if this.failed:
        engine_trial.after_failure(engine, held, log, first_step)
    if this.is_trial:
        engine.tuner = EngineTrial(engine, held, log, steps_left)
    if this.number:
        return
    if asked is False or plan.tuned_from or not (asked or is_worth_it(plan, steps_left)):
        return
    if not plan.alternatives:
        log.say("tuning: the plan lists no alternatives, so nothing is tried")
        return

    def on_event(values: dict[str, Any]) -> None:
        log.event(**values)
        if values["event"] == "tuned" and log.is_rank_0:
            try:
                run_folder.write_record(engine.plan, held.settings)
            except OSError as error:
                because, _ = file_errors.explain(error, held.settings.out)
                log.say(f"the tuned plan is not kept, a resumed run tunes again: {because}")

    trial = EngineTrial(engine, held, log, steps_left) if engine_trial.is_possible(engine, held.settings) else None
    if all(alternatives.needs_other_engine(plan, other) for other in plan.alternatives):
        engine.tuner = trial
        return
    most = int(steps_left * (SHARE_ASKED if asked else tuner.SHARE)) - tuner.FIRST_STEPS
    if most < tuner.LEAST_STEPS:
        log.say(f"tuning: {steps_left} steps are too few, so nothing is tried")
        return
    engine.tune(most, on_event)
    assert engine.tuner is not None
    engine.tuner.then = trial
