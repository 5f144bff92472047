"""The learning rate over a run: transformers' schedules by their names, as pure functions of the steps done.

So a resumed run needs no state, and can say what another schedule would have meant. With p running from 0 to 1 between
the end of warmup and the end of the schedule, and m the part of the peak at which it ends (--min-lr-ratio, usually 0),
the factor on the peak is m + (1 - m) f:

    cosine, cosine_with_min_lr       f = (1 + cos(pi p)) / 2; the second must be given m
    linear                           f = 1 - p
    polynomial                       f = (1 - p) ** power
    warmup_stable_decay              f = 1, and over the last --decay-ratio of the schedule cosine's
    constant, constant_with_warmup   f = 1
    inverse_sqrt                     f = sqrt(warmup / step), which has no end; without warmup that of 10,000 steps

Warmup is linear. It is transformers' but for one step: its first step has the rate 1 / warmup, where theirs has 0 and
changes nothing, so that step s of a warmup has the rate of their step s + 1. After it all is as theirs. Left out: their
cosine_with_restarts, cosine_warmup_with_min_lr, greedy, and reduce_lr_on_plateau, which depends on more than the step.
"""

import math
from dataclasses import dataclass
from typing import Literal

from frugal.errors import RequestError

Schedule = Literal[
    "cosine", "linear", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial", "inverse_sqrt",
    "warmup_stable_decay",
]  # fmt: skip

ENDLESS: tuple[Schedule, ...] = ("constant", "constant_with_warmup", "inverse_sqrt")
"""They do not depend on how long the run is."""

DECAY_RATIO = 0.1
"""Of warmup_stable_decay: Hägele et al. 2024 (arXiv 2405.18392) find 10 to 20 % as good as cosine over the run."""

_INVERSE_SQRT_STEPS = 10_000
"""transformers' own number, where there is no warmup."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The learning rate over a run.

    Attributes:
        peak: after warmup.
        schedule: what comes then.
        warmup_steps: optimizer steps until the peak.
        total_steps: optimizer steps of the schedule, with warmup.
        min_ratio: m, the part of the peak at the end.
        decay_steps: of warmup_stable_decay, those in which it falls, at the end.
        power: of polynomial.
    """

    peak: float
    schedule: Schedule
    warmup_steps: int
    total_steps: int
    min_ratio: float = 0.0
    decay_steps: int = 0
    power: float = 1.0

    def factor(self, step: int) -> float:
        """On the peak, in the step after `step` steps. The last step of a schedule is not quite at its end."""
        if step < self.warmup_steps:
            rising = (step + 1) / self.warmup_steps
            return self._above_minimum(rising) if self.schedule == "warmup_stable_decay" else rising
        if self.schedule == "inverse_sqrt":
            timescale = self.warmup_steps or _INVERSE_SQRT_STEPS
            return math.sqrt(timescale / (timescale + step - self.warmup_steps))
        begin = self.total_steps - self.decay_steps if self.schedule == "warmup_stable_decay" else self.warmup_steps
        progress = min(max((step - begin) / max(self.total_steps - begin, 1), 0.0), 1.0)
        match self.schedule:
            case "constant" | "constant_with_warmup":
                return 1.0
            case "linear" | "polynomial":
                return self._above_minimum((1.0 - progress) ** self.power)
        return self._above_minimum((1.0 + math.cos(math.pi * progress)) / 2.0)

    def _above_minimum(self, part: float) -> float:
        return self.min_ratio + (1.0 - self.min_ratio) * part

    def change_from(self, before: "Curve", step: int) -> str | None:
        """What another schedule than `before` means for the step after `step` steps; None where it is the same."""
        if str(before) == str(self):
            return None
        rates = [each.peak * each.factor(step) for each in (before, self)]
        longer = (
            before.schedule == self.schedule and self.schedule not in ENDLESS and before.total_steps > self.total_steps
        )
        keeping = f"; --schedule-steps {before.total_steps} keeps it" if longer else ""
        return f"learning rate of step {step + 1} {rates[0]:.4g} -> {rates[1]:.4g} ({before} -> {self}{keeping})"

    def __str__(self) -> str:
        words = self.schedule + (f" of power {self.power:g}" if self.power != 1 else "")
        words += "" if self.schedule in ENDLESS else f" over {self.total_steps} steps"
        words += f" down to {self.min_ratio:.4g} of its peak" if self.min_ratio else ""
        parts = [f"{self.warmup_steps} of warmup"] if self.warmup_steps else []
        parts += [f"{self.decay_steps} of decay"] if self.decay_steps else []
        return words + (f" with {' and '.join(parts)}" if parts else "")


def check_options(
    schedule: Schedule,
    warmup_ratio: float | None,
    min_ratio: float,
    decay_ratio: float | None,
    power: float | None,
) -> None:
    """Whether these go together.

    Raises:
        RequestError: they do not.
    """
    for flag, value in (
        ("--warmup-ratio", warmup_ratio),
        ("--min-lr-ratio", min_ratio),
        ("--decay-ratio", decay_ratio),
    ):
        if value is not None and not 0 <= value <= 1:
            raise RequestError(f"{flag} is {value:g}", because="it is a part: at least 0, at most 1")
    for flag, value, needed in (
        ("--decay-ratio", decay_ratio, "warmup_stable_decay"), ("--schedule-power", power, "polynomial")
    ):  # fmt: skip
        if value is not None and schedule != needed:
            raise RequestError(
                f"{flag} was given with --schedule {schedule}",
                because=f"only {needed} has one to choose",
                hint=f"leave it out, or use --schedule {needed}",
            )
    if min_ratio and schedule in ENDLESS:
        raise RequestError(
            f"--min-lr-ratio was given with --schedule {schedule}",
            because="this schedule has no end to fall to",
            hint="leave it out, or use --schedule cosine",
        )
    if schedule == "cosine_with_min_lr" and not min_ratio:
        raise RequestError(
            "--schedule cosine_with_min_lr was given without --min-lr-ratio",
            because="what the learning rate is to end at is not known",
            hint="add --min-lr-ratio 0.1, or use --schedule cosine, which ends at 0",
        )


def check_length(curve: Curve, steps: int, flag: str) -> None:
    """Whether `curve` goes on to the end of a run of `steps`; `flag` says what its length comes from.

    Raises:
        RequestError: its learning rate is 0 before, or it is too short for its warmup and its decay.
    """
    total = curve.total_steps
    if total < steps and not curve.min_ratio and curve.schedule not in ENDLESS:
        raise RequestError(
            f"--schedule-steps {total} is less than the {steps} steps of the run",
            because=f"the {curve.schedule} schedule ends at a learning rate of 0, and steps after it would change "
            "nothing",
            hint=f"use --schedule-steps {steps}, or --schedule constant",
        )
    if curve.warmup_steps > total:
        raise RequestError(
            f"--warmup-steps {curve.warmup_steps} is more than {flag} {total}",
            because="the learning rate would never reach its peak",
        )
    if curve.warmup_steps + curve.decay_steps > total:
        raise RequestError(
            f"{curve.warmup_steps} steps of warmup and {curve.decay_steps} of decay are more than {flag} {total}",
            because="the learning rate would fall before it has reached its peak",
            hint="shorten --warmup-steps or --decay-ratio",
        )
