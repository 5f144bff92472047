"""Tuning while training: take the first optimizer steps in several ways and continue in the fastest.

The gradient of a global batch does not depend on how the batch is cut or on what is recomputed, so every step of tuning
is a step of the run: nothing is repeated or discarded. `Plan.alternatives` lists the ways to try: other micro-batches,
modes of activation checkpointing and losses, each dry-run to fit, all within one DeepSpeed engine.

The ways take turns of `TURN` steps, of which the first warms up and is not counted. Each round, in which the plan takes
part so that all ways are compared under the same load of the machine, drops the slower half (successive halving,
Jamieson and Talwalkar 2016, arXiv:1502.07943). The last way and the plan meet in `FINALS` rounds. A way leaves early
if one of its steps takes `FAR` times as long as the plan's, or if it cannot be faster than the plan any more.

A time is the seconds of the slowest rank, for each token or sample, divided by the median of the plan's in the same
round; a way's time is the median of these. The standard error of a median is 1.2533 x 1.4826 x MAD / sqrt(n), as for a
normal distribution. A way replaces the plan if it is faster by `LEAST_GAIN` and by `STANDARD_ERRORS` of the difference.
Left out: drifts within a round.

A way that runs out of memory is dropped; its step is recovered as always. Tuning ends with the plan if the plan itself
runs out of memory or a step is not finite.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from math import hypot, inf, sqrt
from statistics import median
from typing import Any

import torch

from frugal.distributed.exchange import gather
from frugal.engine.oom_limits import AdaptiveLimits
from frugal.engine.oom_retry import abandon
from frugal.engine.train_step import Stepper, StepResult
from frugal.errors import RequestError
from frugal.models import activation_checkpointing, tiled_loss
from frugal.planning.plan import Plan
from frugal.planning.search.alternatives import change_to
from frugal.units import plural

TURN = 3
FINALS = 3
FAR = 1.5
ENOUGH = 4  # counted steps from which a standard error is known
LEAST_GAIN = 0.01
STANDARD_ERRORS = 3

FIRST_STEPS = 2
"""Steps before tuning: the plan's memory is measured in them, and the optimizer allocates its states."""

logger = logging.getLogger("frugal")


@dataclass
class Way:
    """A way of taking optimizer steps, with its counted times as parts of the plan's; `dropped`: why it cannot win."""

    plan: Plan
    relative: list[float] = field(default_factory=list)
    num_steps: int = 0
    dropped: str = ""

    @property
    def typical(self) -> float:
        """The time of a step as a part of the plan's; infinite if none was counted."""
        return median(self.relative) if self.relative else inf

    @property
    def error(self) -> float:
        """The standard error of `typical`; infinite if too few steps were counted."""
        if len(self.relative) < ENOUGH:
            return inf
        spread = median(abs(each - self.typical) for each in self.relative)
        return 1.2533 * 1.4826 * spread / sqrt(len(self.relative))


def steps_needed(num_ways: int) -> int:
    """Return the most steps that a race of this many ways takes after `FIRST_STEPS`, the plan's among them."""
    return TURN * sum(_round_sizes(num_ways))


def _round_sizes(num_ways: int) -> list[int]:
    sizes = [num_ways]
    while sizes[-1] > 2:
        sizes.append(max(2, -(-sizes[-1] // 2)))
    return sizes + [2] * (FINALS - 1)


def race(ways: Sequence[Way]) -> Generator[Way, float | None, Way]:
    """Yield the way of each next step, receive its time (None: out of memory), and return the winner.

    The first way is the plan. A time is in seconds for a fixed amount of work.
    """
    plan, *running = ways
    for _ in range(FIRST_STEPS):
        yield plan
    for size in _round_sizes(len(ways)):
        running = sorted(running, key=lambda way: way.typical)[: size - 1]
        of_plan = inf  # seconds of its typical step in this round
        for way in (plan, *running):
            counted: list[float] = []
            for number in range(TURN):
                seconds = yield way
                if seconds is None:
                    way.dropped = "out of memory"
                    break
                if number:
                    counted.append(seconds)
                    if seconds > FAR * of_plan:
                        way.dropped = "slower"
                        break
            if way is plan:
                of_plan = median(counted)
            way.relative += [seconds / of_plan for seconds in counted]
        running = [way for way in running if not way.dropped and 1 - way.typical + _noise(plan, way) >= LEAST_GAIN]
        if not running:
            return plan
    fastest = min(running, key=lambda way: way.typical)
    return fastest if 1 - fastest.typical > max(LEAST_GAIN, _noise(plan, fastest)) else plan


def _noise(plan: Way, way: Way) -> float:
    return STANDARD_ERRORS * hypot(plan.error, way.error)


def switch(engine: Stepper, plan: Plan) -> None:
    """Make the engine take its next steps as `plan` says, which differs from its own as an `Alternative` may.

    Call it between two steps, on all ranks. No communication. ZeRO-3's record of gathers is reset, since modules run in
    another order from here on, and memory that CUDA's allocator caches is released.
    """
    before, now = engine.plan.strategy, plan.strategy
    recomputes = engine.adaptive_limits.is_lowered  # memory ran out, and it may have been switched on
    modes = now.activation_checkpointing, now.layer_modes
    if modes != (before.activation_checkpointing, before.layer_modes) or recomputes:
        activation_checkpointing.apply(engine.module, *modes)
    if now.loss != before.loss and now.loss == "tiled":
        tiled_loss.apply(engine.module, now.kernels)
    elif now.loss != before.loss:
        tiled_loss.remove(engine.module)
    engine.plan = plan
    engine.adaptive_limits = AdaptiveLimits(plan, engine.module)
    engine.zero.remember()
    abandon(engine.zero)


class Tuner:
    """A race between the ways of one engine, which takes its steps. Collective.

    When it `is_over`, `engine.plan` is the fastest, and `on_end` received the event `tuned` of `metrics.jsonl`, on all
    ranks.
    """

    def __init__(self, engine: Stepper, most_steps: int, on_end: Callable[[dict[str, Any]], None]) -> None:
        """Raises RequestError: the plan has no alternatives, or `most_steps` are too few to compare two ways."""
        plan, self._engine, self._on_end = engine.plan, engine, on_end
        ways = [Way(plan), *(Way(change_to(plan, other)) for other in plan.alternatives)]
        num_ways = max((n for n in range(2, len(ways) + 1) if steps_needed(n) <= most_steps), default=0)
        if num_ways == 0:
            because = (
                f"{plural(most_steps, 'step')} are too few" if plan.alternatives else "its plan has no alternatives"
            )
            raise RequestError("there is nothing to tune", because=because)
        self._ways = ways[:num_ways]  # alternatives are sorted by prediction, the fastest first
        self._race = race(self._ways)
        self._current = next(self._race)
        self._seconds_of_plan: list[float] = []
        self.is_over = False
        of = f" of {len(plan.alternatives)}" if num_ways < len(ways) else ""
        _say(
            engine,
            f"trying {plural(num_ways - 1, 'alternative')}{of} in the first {FIRST_STEPS + steps_needed(num_ways)} "
            "steps; --no-tune turns this off",
        )

    def step(self, samples: Sequence[Any], take: Callable[[], StepResult]) -> StepResult:
        """Take a step on these samples, and choose the way of the next one."""
        engine, plan, num_recoveries = self._engine, self._ways[0], self._engine.num_recoveries
        began = self._now()
        result = take()
        seconds = max(gather(self._now() - began, float, engine.votes))
        has_recovered = engine.num_recoveries > num_recoveries
        if not result.is_finite or (has_recovered and self._current is plan):
            why = "memory ran out" if result.is_finite else "a step was not finite"
            self._end(plan, f"ended, as {why} in step {engine.deepspeed.global_steps}")
            return result
        self._current.num_steps += 1
        if self._current is plan:
            self._seconds_of_plan.append(seconds)
        lengths = getattr(samples, "lengths", None)
        work = float(len(samples) if lengths is None else sum(lengths))  # tokens, or samples if these are not known
        try:
            way = self._race.send(None if has_recovered else seconds / work)
        except StopIteration as end:
            self._end(end.value)
            return result
        if way is not self._current:
            self._current = way
            switch(engine, way.plan)
        return result

    def _now(self) -> float:
        """Return the seconds of a clock once the device's queued work is done."""
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        return time.perf_counter()

    def _end(self, way: Way, why: str = "") -> None:
        """Continue in this way, and report the outcome."""
        self.is_over = True
        engine, plan = self._engine, self._ways[0]
        if engine.plan is not way.plan:  # limits that were lowered under the plan itself stay lowered
            switch(engine, way.plan)
        gain = 0.0 if way is plan else 1 - way.typical
        outcome = why or f"none of {plural(len(self._ways) - 1, 'alternative')} is faster than the plan"
        if way is not plan:
            strategy, batch = way.plan.strategy, way.plan.batch
            cut = f"micro-batch {batch.largest_micro_batch} in {plural(batch.accumulation_steps, 'micro-step')}"
            outcome = f"{strategy}, {cut}, takes {100 * gain:.1f} % less time than planned"
        reasons = (f"tuned while training: {outcome}", *plan.plan.why)
        tuned = replace(way.plan, alternatives=(), tuned_from=plan.plan.digest, why=reasons).sealed()
        engine.plan = engine.recorded_plan = tuned
        _say(engine, outcome + ("" if way is plan else f"; plan.json is {tuned.digest[:12]} from here on"))
        ways = [] if why else [self._record(each) | {"is_kept": each is way} for each in self._ways]
        self._on_end({
            "event": "tuned", "step": engine.deepspeed.global_steps, "gain": gain, "plan_digest": tuned.digest,
            "ways": ways, **_in_numbers(tuned),
        })  # fmt: skip

    def _record(self, way: Way) -> dict[str, Any]:
        seconds = way.typical * median(self._seconds_of_plan) if way.relative else None
        return {**_in_numbers(way.plan), "num_steps": way.num_steps, "seconds": seconds, "dropped": way.dropped}


def _say(engine: Stepper, text: str) -> None:
    if engine.rank == 0:
        logger.warning("tuning: %s", text)


def _in_numbers(plan: Plan) -> dict[str, Any]:
    return {
        "strategy": str(plan.strategy),
        "micro_batch": plan.batch.largest_micro_batch,
        "accumulation_steps": plan.batch.accumulation_steps,
    }
