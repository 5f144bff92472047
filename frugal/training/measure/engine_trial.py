"""A run tries another ZeRO stage, offloading or size of buckets: it restarts for it, and goes back where it is slower.

Tuning in place (`tuner`) leaves what the engine was made for. Of that the plan may list one alternative
(`frugal.planning.search.alternatives.find_of_other_engine`). Where the rest of the run is so long that two restarts,
there and back, are at most `TRIAL_SHARE` of it, the run

- takes `COUNTED` steps as it is, and saves a checkpoint,
- has every rank replace its process (`frugal.distributed.replacement`) and resume under the alternative,
- takes as many steps, and stays, or saves and goes back in the same way.

It stays where these steps are faster by more than the noise, and otherwise where going back would take longer than what
staying loses. `plan.json` stays the former plan's until then, so that a run which is ended meanwhile goes on with it. A
trial that fails does so, too. There is one trial in a run.

Left out: engines of a user's own script, which cannot be restarted; several nodes, whose hosts would all have to write
and find the run's `plan.json` at the same moment.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from frugal import file_errors
from frugal.config.run_settings import RunSettings
from frugal.distributed import replacement
from frugal.distributed.exchange import from_rank_0, gather
from frugal.distributed.replacement import Replaced
from frugal.planning.memory import breakdown
from frugal.planning.plan import Alternative, Plan
from frugal.planning.search import alternatives
from frugal.planning.search.alternatives import NEAR, TRIAL_SHARE
from frugal.planning.search.measured_ways import LEAST_GAIN, MeasuredWay, noise
from frugal.training.checkpoint import run_folder
from frugal.training.measure.race import Contestant
from frugal.training.measure.tuner import TimedSteps, in_numbers, in_words, way_of

if TYPE_CHECKING:
    from frugal.training.reports.metrics import Log
    from frugal.training.train_step import Stepper

PLAN = "plan.json"

LEFT_ALONE = 2
"""Steps of a process before those that count."""

COUNTED = 8
"""Steps that are compared, before the restart and after it."""

_PROBE_BYTES = 32 << 20


def alternative_of(plan: Plan) -> Alternative | None:
    """What another engine may run, of the plan's alternatives."""
    return next((other for other in plan.alternatives if alternatives.needs_other_engine(plan, other)), None)


def plan_of_trial(plan: Plan) -> Plan:
    """The plan that is tried, of a run whose `plan.json` is `plan`."""
    other = alternative_of(plan)
    assert other is not None, "a trial was begun without an alternative"
    return replace(alternatives.changed_to(plan, other), tuned_from=plan.tuned_from).sealed()


def is_possible(engine: "Stepper", settings: RunSettings) -> bool:
    """Whether this run can restart in the midst of it, and has something to try."""
    can_go_on = settings.save_every != 0 and not settings.callback  # what callbacks hold would be lost
    return can_go_on and len(engine.plan.cluster.nodes) == 1 and alternative_of(engine.plan) is not None


class EngineTrial(TimedSteps):
    """Measures the steps to come, in the process before the restart and in the one after it, and decides. Collective.

    `on_ways`: told on rank 0 of what both engines took, once that is known. `is_over`: there is nothing more to do;
    `engine.restart` says whether to restart.
    """

    def __init__(
        self, engine: "Stepper", settings: RunSettings, log: "Log", steps_left: int,
        on_ways: Callable[[tuple[MeasuredWay, ...]], None] = lambda _: None,
    ) -> None:  # fmt: skip
        super().__init__(engine)
        self._settings, self._log = settings, log
        self._steps_left, self._on_ways = steps_left, on_ways
        self._own = engine.plan
        self._this = replacement.this()
        self._start_seconds = max(gather(replacement.start_seconds(), float, engine.votes))
        self._is_asked = bool(settings.tune)
        self._num_seen = 0
        self._rates: list[float] = []  # seconds for each token or sample
        self._seconds: list[float] = []
        self.is_over = False

    def after_step(self, step: int, samples: Sequence[Any], *, is_finite: bool) -> None:
        """Step number `step` is done, of these samples."""
        took = self._took(samples)
        self._num_seen += 1
        if took.has_recovered or not is_finite:
            self.is_over = True
            if took.has_recovered and self._this.is_trial:
                self._go_back(step, "memory ran out")
            return
        if self._num_seen <= LEFT_ALONE:
            return
        self._rates.append(took.seconds / took.work)
        self._seconds.append(took.seconds)
        plan = self._engine.plan
        self._log.event(
            event="tuning", step=step, is_planned=_way(plan) == _way(self._own) and not self._this.is_trial,
            seconds=took.seconds, work=took.work, given_up="", **in_numbers(plan),
        )  # fmt: skip
        if len(self._rates) == COUNTED:
            self.is_over = True
            if self._this.is_trial:
                self._decide(step)
            else:
                self._may_restart()
                if self._engine.restart is None:
                    own = _compared(self._rates, self._rates)
                    self._on_ways((way_of(plan, median(self._seconds), own),))

    @property
    def _num_to_come(self) -> int:
        return self._steps_left - self._num_seen

    def _may_restart(self) -> None:
        """Restart for the trial, if it may pay."""
        engine, log, plan = self._engine, self._log, self._engine.plan
        other = alternative_of(plan)
        assert other is not None
        if other.time.total_seconds > NEAR * plan.time.total_seconds:  # than what tuning has found
            return
        what = in_words(plan_of_trial(plan))
        left = self._num_to_come * median(self._seconds)
        restart, why_not = from_rank_0(
            self._cost(left) if engine.rank == 0 else (0.0, ""), tuple[float, str], engine.votes
        )
        if why_not:
            return log.say(f"tuning: {what} is not tried: {why_not}")
        kept = replace(plan, tuned_from=plan.tuned_from or plan.digest).sealed()
        if problem := from_rank_0(self._write(kept), str, engine.votes):
            return log.say(f"tuning: {what} is not tried: {problem}")
        engine.plan = engine.recorded_plan = kept
        predicted = (
            f"{other.time.total_seconds / (plan.time.total_seconds or 1):.2f} times the step's time is predicted"
        )
        log.say(
            f"tuning: restarting to try {what} for {LEFT_ALONE + COUNTED} steps: {predicted}, which may be "
            f"{100 * (NEAR - 1):.0f} % off; two restarts take about {2 * restart:.0f} s of {left:.0f} s left"
        )
        engine.restart = Replaced(
            is_trial=True, began=time.time(), seconds=tuple(self._rates), restart_seconds=restart
        )  # fmt: skip

    def _cost(self, left: float) -> tuple[float, str]:
        """Seconds of a restart, and why the trial is left out, if it is. On rank 0."""
        plan, settings = self._engine.plan, self._settings
        bytes_saved = breakdown.checkpoint_bytes(plan.request, plan.strategy, plan.model)
        try:
            free = shutil.disk_usage(settings.out).free
            if free < 2 * bytes_saved + run_folder.saved_bytes(plan, settings):
                return 0.0, "the disk has no room for two more checkpoints"
            rate = _disk_seconds(settings.out)
        except OSError as error:
            return 0.0, file_errors.explain(error, settings.out).because
        restart = self._start_seconds + 2 * rate * bytes_saved  # written, and read again
        if self._num_to_come <= LEFT_ALONE + COUNTED:
            return restart, "the run ends before"
        if 2 * restart > TRIAL_SHARE * left and not self._is_asked:
            because = (
                f"two restarts of about {restart:.0f} s each are {200 * restart / left:.1f} % of the rest of the run"
            )
            return restart, f"{because}, and more than {100 * TRIAL_SHARE:g} %"
        return restart, ""

    def _decide(self, step: int) -> None:
        """Stay with what was tried, or go back."""
        before, now = (_compared(rates, self._this.seconds) for rates in (self._this.seconds, self._rates))
        self._tell_ways(before, now)
        gain, at_random = 1 - now.typical, noise(before.error, now.error)
        is_faster = gain > max(LEAST_GAIN, at_random)
        lost = self._num_to_come * median(self._seconds) * (1 - 1 / now.typical)  # by staying, where it is slower
        outcome = f"takes {100 * abs(gain):.1f} % {'less' if gain >= 0 else 'more'} time than before"
        if is_faster:
            return self._stay(step, gain, outcome)
        outcome += f", where noise is {100 * at_random:.1f} %"
        if not self._is_asked and lost < self._this.restart_seconds:
            return self._stay(step, 0.0, f"{outcome}; it stays, as going back would take longer than that loses")
        return self._go_back(step, f"it {outcome}")

    def _tell_ways(self, before: Contestant, now: Contestant) -> None:
        """What both took, for the typical work of these steps. The former plan is the run's still."""
        if self._engine.rank:
            return
        former, of_former = Plan.read(self._settings.out / PLAN), median(self._this.seconds)
        seconds = of_former * median(each / rate for each, rate in zip(self._seconds, self._rates, strict=True))
        plans = ((former, before), (self._engine.plan, now))
        self._on_ways(tuple(way_of(plan, each.typical * seconds, each) for plan, each in plans))

    def _stay(self, step: int, gain: float, outcome: str) -> None:
        engine = self._engine
        said = f"{in_words(engine.plan)} {outcome}"
        plan = replace(engine.plan, why=(f"tuned while training: {said}", *engine.plan.why)).sealed()
        engine.plan = engine.recorded_plan = plan
        problem = from_rank_0(self._write(plan), str, engine.votes)
        replacement.settled()
        where = problem or f"plan.json is {plan.digest[:12]} from here on"
        self._log.say(f"tuning: {said}; the restart took {self._start_seconds:.0f} s; {where}")
        self._tell(step, plan, gain)

    def _go_back(self, step: int, why: str) -> None:
        engine = self._engine
        kept = (self._settings.out / PLAN).read_text() if engine.rank == 0 else None
        former = Plan.from_json((from_rank_0(kept, str | None, engine.votes) or "").encode())
        former = without_trial(former, self._settings, engine, f"{in_words(engine.plan)} was tried: {why}")
        self._log.say(f"tuning: {in_words(engine.plan)} is not kept: {why}; restarting to go on as before")
        self._tell(step, former, 0.0)
        engine.restart = Replaced(began=time.time())

    def _tell(self, step: int, plan: Plan, gain: float) -> None:
        self._log.event(event="tuned", step=step, gain=gain, plan_digest=plan.digest, **in_numbers(plan))

    def _write(self, plan: Plan) -> str:
        """Have the run's folder hold this plan, on rank 0; why it does not."""
        return "" if self._engine.rank else write(plan, self._settings)


def write(plan: Plan, settings: RunSettings) -> str:
    """Have the run's folder hold this plan; why it does not, or nothing."""
    try:
        run_folder.write_record(plan, settings)
    except OSError as error:
        because, _ = file_errors.explain(error, settings.out)
        return f"plan.json is not written, {because}"
    return ""


def without_trial(former: Plan, settings: RunSettings, engine: "Stepper", why: str) -> Plan:
    """The former plan, with nothing left to try, which is in the run's folder from here on. Collective."""
    plan = replace(former, alternatives=(), why=(f"tuned while training: {why}", *former.why)).sealed()
    from_rank_0("" if engine.rank else write(plan, settings), str, engine.votes)  # a run that is resumed tries nothing
    return plan


def after_failure(engine: "Stepper", settings: RunSettings, log: "Log", step: int) -> None:
    """Say and record why the trial before this process failed; the run goes on with the former plan. Collective."""
    reasons = gather(replacement.this().failed, str, engine.votes)
    why = next((each for each in reasons if each not in ("", replacement.LOST)), replacement.LOST)
    tried = alternative_of(engine.plan)
    what = "the plan" if tried is None else in_words(plan_of_trial(engine.plan))
    plan = without_trial(engine.plan, settings, engine, f"{what} was tried and failed: {why}")
    engine.plan = engine.recorded_plan = plan
    log.say(f"tuning: {what} cannot be trained here: {why}; the run goes on as before")
    log.event(event="tuned", step=step, gain=0.0, plan_digest=plan.digest, **in_numbers(plan))


def words_to_resume(settings: RunSettings) -> list[str]:
    """What Python is started with to go on with the run in this folder, on any rank."""
    words = replace(settings, resume=True).rank_words(settings.out)
    return ["-u", "-m", "frugal.training.run", "--plan", str(settings.out / PLAN), *words]


def _way(plan: Plan) -> tuple[object, ...]:
    return plan.strategy, plan.batch.micro_batch, plan.batch.overhead_tokens


def _compared(rates: Sequence[float], before: Sequence[float]) -> Contestant:
    """Steps as parts of a typical one before."""
    typical = median(before)
    return Contestant(0, relative=[rate / typical for rate in rates])


def _disk_seconds(folder: Path) -> float:
    """Seconds that a byte takes to be written to the disk of `folder`, and to be read for its checksum."""
    content, path = os.urandom(_PROBE_BYTES), folder / f".probe-{os.getpid()}"
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    hashlib.sha256(content).digest()
    return (time.perf_counter() - began) / _PROBE_BYTES
