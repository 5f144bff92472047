"""Which way of taking a step is the fastest: successive halving over turns of a few steps. Arithmetic alone.

Contestant 0 is the plan; it runs in every round, so that all are compared with it under the same load of the machine.
Of a turn of `TURN` steps the first does not count: it warms up. After each round the faster half goes on, until one is
left beside the plan; these two meet in `FINALS` rounds. What takes `FAR` times as long as the plan in its first counted
step is given up at once.

A step's time is divided by the median of the plan's steps in the same round, so that what the machine does besides
changes all contestants of a round alike. A contestant's time is the median of these. The noise of a comparison is
`STANDARD_ERRORS` of the difference of both medians, each of which has 1.2533 x 1.4826 x MAD / sqrt(n) as for a normal
distribution. A contestant wins where it is faster by more than the noise and by `LEAST_GAIN`; the race ends early where
none can, or one has won already against all others.

Left out: drifts within a round.

Successive halving: Jamieson and Talwalkar, 2016, arXiv:1502.07943.
"""

from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median

from frugal.planning.search.measured_ways import LEAST_GAIN, noise

TURN = 3
FINALS = 3
FAR = 1.5
ENOUGH = 4  # steps that say something of how much they vary
SLOWER = "slower"


def steps_needed(num_contestants: int) -> int:
    """Steps of a race of so many, the plan among them, if it does not end early."""
    return TURN * sum(_rounds(num_contestants))


def most_contestants(most_steps: int, num_contestants: int) -> int:
    """Of so many contestants those that can race in so many steps; below 2: none can."""
    return max((number for number in range(num_contestants + 1) if steps_needed(number) <= most_steps), default=0)


def _rounds(num_contestants: int) -> list[int]:
    """Contestants of each round."""
    if num_contestants < 2:
        return []
    sizes = [num_contestants]
    while sizes[-1] > 2:
        sizes.append(max(2, -(-sizes[-1] // 2)))
    return sizes + [2] * (FINALS - 1)


@dataclass
class Contestant:
    """One way of taking steps, and why it is `out`, if it is.

    `now`: seconds of its counted steps in this round; `seconds`: in those before; `relative`: the same as parts of the
    plan's.
    """

    number: int
    now: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    relative: list[float] = field(default_factory=list)
    out: str = ""

    @property
    def typical(self) -> float:
        """Of a step, as a part of the plan's; infinite where none counted."""
        return median(self.relative) if self.relative else inf

    @property
    def error(self) -> float:
        """Standard error of `typical`; infinite where too few steps counted."""
        if len(self.relative) < ENOUGH:
            return inf
        spread = median(abs(each - self.typical) for each in self.relative)
        return 1.2533 * 1.4826 * spread / sqrt(len(self.relative))


class Race:
    """A race of `num_contestants`. `current` runs the next step; `after_step` is told what it took."""

    def __init__(self, num_contestants: int) -> None:
        self.contestants = [Contestant(number) for number in range(num_contestants)]
        self._sizes = _rounds(num_contestants)
        self._turns: list[Contestant] = []  # of this round, the current one first
        self._num_steps = 0  # of the current turn
        self.is_over = False
        self._next_round()

    @property
    def plan(self) -> Contestant:
        """Contestant 0."""
        return self.contestants[0]

    @property
    def current(self) -> int:
        """The contestant of the next step; at the end the winner."""
        return self._turns[0].number if self._turns else self.winner

    @property
    def winner(self) -> int:
        """The fastest, where it is faster than the plan beyond the noise; otherwise 0, the plan."""
        best = min(self._running(), key=lambda each: each.typical, default=self.plan)
        return best.number if self._is_faster(best) else 0

    def gain_of(self, number: int) -> float:
        """How much less time a contestant takes than the plan, as a part of the plan's; 0 where that is not known."""
        return 1 - self.contestants[number].typical if self.contestants[number].relative else 0.0

    def after_step(self, seconds: float) -> None:
        """A step of the current contestant took `seconds`, for as much work as all others."""
        self._num_steps += 1
        runner = self._turns[0]
        if self._num_steps > 1:
            runner.now.append(seconds)
            if runner is not self.plan and seconds > FAR * median(self.plan.now):
                runner.out = SLOWER
        if self._num_steps == TURN or runner.out:
            self._end_turn()

    def give_up(self, why: str) -> None:
        """The current contestant cannot run."""
        self._turns[0].out = why
        self._end_turn()

    def _end_turn(self) -> None:
        self._turns.pop(0)
        self._num_steps = 0
        if not self._turns:
            self._end_round()
            self._next_round()

    def _end_round(self) -> None:
        of_plan = median(self.plan.now)
        for each in self.contestants:
            each.relative += [seconds / of_plan for seconds in each.now]
            each.seconds += each.now
            each.now = []

    def _next_round(self) -> None:
        running = sorted(self._running(), key=lambda each: each.typical)
        self.is_over = not self._sizes or not running or self._is_decided(running)
        if self.is_over:
            return
        kept = running[: self._sizes.pop(0) - 1]
        for each in running[len(kept) :]:
            each.out = SLOWER
        self._turns = [self.plan, *sorted(kept, key=lambda each: each.number)]

    def _running(self) -> list[Contestant]:
        return [each for each in self.contestants[1:] if not each.out]

    def _is_decided(self, running: list[Contestant]) -> bool:
        """Whether more steps would change nothing: none can be faster than the plan, or one is faster than all."""
        if all(1 - each.typical + self._noise(each) < LEAST_GAIN for each in running):
            return True
        best, *others = running
        return self._is_faster(best) and all(
            other.typical - best.typical > noise(best.error, other.error) for other in others
        )

    def _is_faster(self, other: Contestant) -> bool:
        return other is not self.plan and 1 - other.typical > max(LEAST_GAIN, self._noise(other))

    def _noise(self, other: Contestant) -> float:
        return noise(self.plan.error, other.error)
