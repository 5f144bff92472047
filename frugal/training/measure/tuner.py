"""Tuning while training: the first optimizer steps are taken in several ways, and the run goes on in the fastest.

The gradient of a global batch does not depend on how it is cut or on what is recomputed, so each of these steps is a
step of the run: nothing is repeated and nothing thrown away. What may be tried is in the plan (`Plan.alternatives`);
which way a step takes, and when it is known which is the fastest, is decided by `race`. All ranks know the seconds of
each other and decide alike, on those of the slowest.

A way in which memory runs out is given up; the step itself is recovered as always. Where memory runs out under the plan
itself, or a step is not finite, tuning ends.

Between two ways the engine stays. What changes: how a global batch is cut, which of the model's layers recompute what,
and what the output head does. Gathers of ZeRO-3 are forgotten, as modules now run in another order, and memory that
CUDA's allocator keeps is given back.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from frugal.distributed.exchange import gather
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.planning.search import alternatives
from frugal.planning.search.measured_ways import MeasuredWay
from frugal.training.measure.race import ENOUGH, Contestant, Race, most_contestants, steps_needed
from frugal.training.models import activation_checkpointing, tiled_loss
from frugal.training.oom_limits import AdaptiveLimits
from frugal.training.oom_retry import abandon
from frugal.units import plural

if TYPE_CHECKING:
    from frugal.training.train_step import Stepper

logger = logging.getLogger("frugal")

SHARE = 0.1
"""Of a run's steps that tuning may take at most."""

FIRST_STEPS = 2
"""Steps before it: the memory of the plan is measured in them, and the optimizer makes its states."""

LEAST_STEPS = steps_needed(2)
"""That tell two ways apart."""

Event = Callable[[dict[str, Any]], None]
"""Told of what was tried and found, on all ranks alike; keys as in `metrics.jsonl`."""


class Watcher(Protocol):
    """What is told of an engine's steps until it `is_over`, and what is told `then`. Collective."""

    then: "Watcher | None"

    @property
    def is_over(self) -> bool:
        """Whether it has seen what it wanted to."""

    def before_step(self) -> None:
        """A step begins."""

    def after_step(self, step: int, samples: Sequence[Any], *, is_finite: bool) -> None:
        """Step number `step` is done, of these samples."""


class Took(NamedTuple):
    """What a step took: seconds of the slowest rank, the work that was done in them (`work_of`), and whether it was
    begun again because memory ran out."""

    seconds: float
    work: float
    has_recovered: bool


class TimedSteps:
    """The part of a `Watcher` that times the steps of an engine. Collective."""

    then: Watcher | None = None

    def __init__(self, engine: "Stepper") -> None:
        self._engine = engine
        self._start, self._num_recoveries = 0.0, 0

    def before_step(self) -> None:
        """A step begins."""
        self._num_recoveries = self._engine.num_recoveries
        self._wait()
        self._start = time.perf_counter()

    def _took(self, samples: Sequence[Any]) -> Took:
        """The step of these samples is done."""
        self._wait()
        seconds = max(gather(time.perf_counter() - self._start, float, self._engine.votes))
        return Took(seconds, work_of(samples), self._engine.num_recoveries > self._num_recoveries)

    def _wait(self) -> None:
        """Until the device has done all that it was told."""
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)


def switch(engine: "Stepper", plan: Plan) -> None:
    """Have the engine take its next steps as `plan` says, which is its own but for what an `Alternative` may change.

    Call it between two steps, on all ranks. No communication.
    """
    before, now = engine.plan.strategy, plan.strategy
    recomputes = engine.adaptive_limits.is_lowered  # memory ran out, and it may have been switched on
    modes = now.activation_checkpointing, now.layer_modes
    if modes != (before.activation_checkpointing, before.layer_modes) or recomputes:
        activation_checkpointing.apply(engine.module, *modes)
    if now.loss != before.loss:
        (tiled_loss.apply if now.loss == "tiled" else tiled_loss.remove)(engine.module)
    engine.plan = plan
    engine.adaptive_limits = AdaptiveLimits(plan, engine.module)
    abandon(engine.zero)


class Tuner(TimedSteps):
    """Tunes one engine in the steps to come. `before_step` and `after_step` are called around each of them. Collective.

    `first_steps`: steps that are left alone before. `is_over`: the engine has the fastest plan; `then` goes on.
    """

    def __init__(self, engine: "Stepper", most_steps: int, on_event: Event, first_steps: int = FIRST_STEPS) -> None:
        """Raises RequestError: the plan has no alternatives, or `most_steps` are too few to compare two ways."""
        super().__init__(engine)
        own = engine.plan
        others = [each for each in own.alternatives if not alternatives.needs_other_engine(own, each)]
        number = most_contestants(most_steps, 1 + len(others))
        if number < 2:
            because = "its plan has no alternatives" if not others else f"{plural(most_steps, 'step')} are too few"
            raise RequestError("there is nothing to tune", because=because)
        self._on_event = on_event
        self._plans = [own, *(alternatives.changed_to(own, other) for other in others[: number - 1])]
        self._race = Race(number)
        self._left_alone = first_steps
        self._step = 0
        self._work: list[float] = []
        self.measured: tuple[MeasuredWay, ...] = ()  # once it is over: what each way took
        self.is_over = False
        tried, known = plural(number - 1, "alternative"), f" of {len(others)}" if number - 1 < len(others) else ""
        self._say(
            f"tuning: trying {tried}{known} in the first {first_steps + steps_needed(number)} steps; --no-tune to "
            "leave it out"
        )

    @property
    def own_plan(self) -> Plan:
        """The plan that the run began with."""
        return self._plans[0]

    def after_step(self, step: int, samples: Sequence[Any], *, is_finite: bool) -> None:
        """Step number `step` is done, of these samples."""
        took = self._took(samples)
        self._step = step
        if not is_finite or (took.has_recovered and self._race.current == 0):
            return self._end(f"ended, as {'memory ran out' if is_finite else 'a step was not finite'} in step {step}")
        if self._left_alone:
            self._left_alone -= 1
            return None
        number = self._race.current
        self._work.append(took.work)
        if took.has_recovered:
            self._race.give_up("out of memory")
        else:
            self._race.after_step(took.seconds / took.work)
        self._tell(number, took)
        if self._race.is_over:
            return self._end()
        if self._race.current != number:
            switch(self._engine, self._plans[self._race.current])
        return None

    def _tell(self, number: int, took: Took) -> None:
        plan, contestant = self._plans[number], self._race.contestants[number]
        self._on_event({
            "event": "tuning", "step": self._step, "is_planned": number == 0, "seconds": took.seconds,
            "work": took.work, "given_up": contestant.out, **in_numbers(plan),
        })  # fmt: skip

    def _end(self, why: str = "") -> None:
        """Go on in the fastest way, and say what was found."""
        self.is_over = True
        race, own, engine = self._race, self.own_plan, self._engine
        number = 0 if why else race.winner
        plan, gain = self._plans[number], race.gain_of(number) if number else 0.0
        if engine.plan is not own or number:  # where memory ran out under the own plan, its limits stay lowered
            switch(engine, plan)
        num_others = plural(len(self._plans) - 1, "alternative")
        said = why or f"none of {num_others} is faster than the plan"
        if number:
            said = f"{in_words(plan)} takes {100 * gain:.1f} % less time than planned"
        self.measured = () if why else self._ways()
        left = tuple(each for each in own.alternatives if alternatives.needs_other_engine(own, each))
        plan = replace(plan, alternatives=left, tuned_from=own.digest, why=(f"tuned while training: {said}", *own.why))
        engine.plan = engine.recorded_plan = plan.sealed()
        self._say(f"tuning: {said}" + (f"; plan.json is {engine.plan.digest[:12]} from here on" if number else ""))
        self._on_event({
            "event": "tuned", "step": self._step, "gain": gain, "plan_digest": engine.plan.digest, **in_numbers(plan),
        })  # fmt: skip

    def _ways(self) -> tuple[MeasuredWay, ...]:
        """What each way took, as a part of the plan's steps in the same rounds, for their typical work."""
        of_plan = median(self._race.plan.seconds) * median(self._work)
        return tuple(
            way_of(plan, each.typical * of_plan, each)
            for plan, each in zip(self._plans, self._race.contestants, strict=True)
            if each.relative
        )

    def _say(self, text: str) -> None:
        if self._engine.rank == 0:
            logger.warning(text)


OWN_STEPS = 20
"""Of a run that is not tuned: so many are measured."""


class OwnSteps(TimedSteps):
    """Measures steps of a run that is not tuned, as a `Tuner` does that has nothing to choose from.

    `on_way`: told of the plan's way, on all ranks. `num_steps` are counted after the first ones; what is begun again
    because memory ran out is not.
    """

    def __init__(self, engine: "Stepper", num_steps: int, on_way: Callable[[MeasuredWay], None]) -> None:
        super().__init__(engine)
        self._on_way = on_way
        self._left_alone, self._left = FIRST_STEPS, num_steps
        self._rates = Contestant(0)
        self._work: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether all steps were seen."""
        return not self._left

    def after_step(self, step: int, samples: Sequence[Any], *, is_finite: bool) -> None:
        """It is done."""
        took = self._took(samples)
        if self._left_alone:
            self._left_alone -= 1
            return
        self._left -= 1
        if is_finite and not took.has_recovered:
            self._rates.relative.append(took.seconds / took.work)
            self._work.append(took.work)
        if self.is_over and len(self._work) >= ENOUGH:
            self._on_way(way_of(self._engine.plan, self._rates.typical * median(self._work), self._rates))


def way_of(plan: Plan, seconds: float, measured: Contestant) -> MeasuredWay:
    """How `plan` takes steps; `seconds` of one, measured as `measured` says."""
    error = measured.error / measured.typical
    return MeasuredWay(
        strategy=plan.strategy, batch=plan.batch, seconds=seconds, error=error if math.isfinite(error) else None
    )


def work_of(samples: Sequence[Any]) -> float:
    """The tokens of samples, where these are known; otherwise their number."""
    lengths = getattr(samples, "lengths", None)
    return float(len(samples) if lengths is None else sum(lengths))


def in_words(plan: Plan) -> str:
    """The way of a plan, to be followed by a verb."""
    steps = plural(plan.batch.accumulation_steps, "micro-step")
    besides = (
        "" if plan.batch.overhead_tokens is None else f", grouped as if each took {plan.batch.overhead_tokens} tokens"
    )
    return f"{plan.strategy}, micro-batch {plan.batch.largest_micro_batch} in {steps}{besides},"


def in_numbers(plan: Plan) -> dict[str, Any]:
    """The same for programs, with the keys of `metrics.jsonl`."""
    return {
        "strategy": str(plan.strategy),
        "micro_batch": plan.batch.largest_micro_batch,
        "accumulation_steps": plan.batch.accumulation_steps,
        "overhead_tokens": plan.batch.overhead_tokens,
    }
