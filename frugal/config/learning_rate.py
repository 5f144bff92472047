"""The learning rate over a run: transformers' schedules by their names, as pure functions of the steps done.

So a resumed run needs no state, and can say what another schedule would have meant. With p running from 0 to 1 between
the end of warmup and the end of the schedule, and m the part of the peak at which it ends (`min-lr-ratio`, usually 0),
the factor on the peak is m + (1 - m) f:

    cosine, cosine_with_min_lr       f = (1 + cos(pi p)) / 2; the second must be given m
    linear                           f = 1 - p
    polynomial                       f = (1 - p) ** power
    warmup_stable_decay              f = 1, and over the last decay-ratio of the schedule cosine's
    constant, constant_with_warmup   f = 1
    inverse_sqrt                     f = sqrt(warmup / step), which has no end; without warmup that of 10,000 steps

Warmup is linear. It is transformers' but for one step: its first step has the rate 1 / warmup, where theirs has 0 and
changes nothing, so that step s of a warmup has the rate of their step s + 1. After it all is as theirs. Left out: their
cosine_with_restarts, cosine_warmup_with_min_lr, greedy, and reduce_lr_on_plateau, which depends on more than the step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from frugal.config.setting import MOST_COUNT, KeyTable
from frugal.errors import refuse
from frugal.units import parse_count

ScheduleName = Literal[
    "cosine", "linear", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial", "inverse_sqrt",
    "warmup_stable_decay",
]  # fmt: skip

ENDLESS: tuple[ScheduleName, ...] = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not depend on the length of the run."""

DECAY_RATIO = 0.1
"""Default of warmup_stable_decay. Hägele et al. 2024 (arXiv 2405.18392) find 10 to 20 % as good as cosine."""

_INVERSE_SQRT_STEPS = 10_000
"""transformers' own number, where there is no warmup."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule after warmup, by name or with keys: `--schedule cosine,min-lr-ratio=0.1`, or the table `[schedule]`.

    Attributes:
        name: cosine, linear, constant, constant_with_warmup, cosine_with_min_lr, polynomial, inverse_sqrt or
            warmup_stable_decay.
        min_lr_ratio: the part of the peak learning rate at which it ends.
        decay_ratio: the part at the end of warmup_stable_decay in which the rate falls.
        power: of polynomial.
        steps: optimizer steps of the schedule, for a run that ends before and can be resumed on the same curve.
    """

    name: ScheduleName = "cosine"
    min_lr_ratio: float = 0.0
    decay_ratio: float | None = None
    power: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        parts = {"min-lr-ratio": self.min_lr_ratio, "decay-ratio": self.decay_ratio or 0.0}
        only = {"decay-ratio": (self.decay_ratio, "warmup_stable_decay"), "power": (self.power, "polynomial")}
        refuse(
            *(
                (
                    not 0 <= value <= 1,
                    f"`{key}` of --schedule is {value:g}",
                    "it is a part, from 0 to 1",
                    None,
                )
                for key, value in parts.items()
            ),
            *(
                (
                    value is not None and self.name != needed,
                    f"`{key}` was given with --schedule {self.name}",
                    f"only {needed} has one to choose",
                    f"leave it out, or use --schedule {needed}",
                )
                for key, (value, needed) in only.items()
            ),
            (
                self.power is not None and not (math.isfinite(self.power) and self.power >= 0),
                f"`power` of --schedule is {self.power}",
                "it must be a finite number, at least 0",
                None,
            ),
            (
                self.steps is not None and not 1 <= self.steps <= MOST_COUNT,
                f"`steps` of --schedule is {self.steps}",
                f"it must be from 1 to {MOST_COUNT:,}",
                None,
            ),
            (
                self.min_lr_ratio and self.name in ENDLESS,
                f"`min-lr-ratio` was given with --schedule {self.name}",
                "this schedule has no end to fall to",
                "leave it out, or use --schedule cosine",
            ),
            (
                self.name == "cosine_with_min_lr" and not self.min_lr_ratio,
                "--schedule cosine_with_min_lr was given without `min-lr-ratio`",
                "the learning rate at its end is not known",
                "use --schedule cosine_with_min_lr,min-lr-ratio=0.1, or --schedule cosine, which ends at 0",
            ),
        )

    @classmethod
    def of(cls, value: "str | Mapping[str, Any] | Schedule") -> "Schedule":
        """Return the schedule that a flag, a table of frugal.toml or a caller describes.

        Raises:
            RequestError: a key is unknown or has a wrong value, or keys contradict each other.
        """
        return value if isinstance(value, Schedule) else cls(**SCHEDULE.read(value))

    def __str__(self) -> str:
        """The text that `of` reads: the name, and the keys that are not at their defaults."""
        return SCHEDULE.text(self)

    def curve(self, peak: float, steps: int, warmup: str) -> "Curve":
        """Return the learning rate over a run of `steps` optimizer steps; `warmup` is a number of these or a part.

        Raises:
            RequestError: its learning rate is 0 before the end of the run, or it is too short for its warmup and decay.
        """
        total, ratio = self.steps or steps, DECAY_RATIO if self.decay_ratio is None else self.decay_ratio
        curve = Curve(
            peak=peak, schedule=self.name, total_steps=total, min_ratio=self.min_lr_ratio,
            warmup_steps=math.ceil(float(warmup[:-1]) / 100 * total) if warmup.endswith("%") else parse_count(warmup),
            decay_steps=math.ceil(ratio * total) if self.name == "warmup_stable_decay" else 0,
            power=1.0 if self.power is None else self.power,
        )  # fmt: skip
        whole = f"the {total} steps of the run" if self.steps is None else f"`steps` of --schedule, {total}"
        refuse(
            (
                total < steps and not self.min_lr_ratio and self.name not in ENDLESS,
                f"`steps` {total} of --schedule is less than the {steps} steps of the run",
                f"the {self.name} schedule ends at a learning rate of 0, and steps after it would change nothing",
                f"use --set schedule.steps={steps}, or --schedule constant",
            ),
            (
                curve.warmup_steps > total,
                f"--warmup {curve.warmup_steps} is more than {whole}",
                "the learning rate would never reach its peak",
                "give --warmup a part, such as 5%",
            ),
            (
                curve.warmup_steps + curve.decay_steps > total,
                f"{curve.warmup_steps} steps of warmup and {curve.decay_steps} of decay are more than {whole}",
                "the learning rate would fall before it has reached its peak",
                "shorten --warmup or `decay-ratio`",
            ),
        )
        return curve


SCHEDULE = KeyTable(
    flag="--schedule",
    types=get_type_hints(Schedule),
    example="cosine,min-lr-ratio=0.1",
    others={"min_lr_rate": "min_lr_ratio"},
    settings={"warmup": "--warmup", "warmup_steps": "--warmup", "lr": "--learning-rate"},
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The learning rate over a run.

    Attributes:
        peak: learning rate after warmup.
        schedule: its name.
        warmup_steps: optimizer steps until the peak.
        total_steps: optimizer steps of the schedule, with warmup.
        min_ratio: m, the part of the peak at the end.
        decay_steps: the last steps of warmup_stable_decay, in which it falls.
        power: the power of polynomial.
    """

    peak: float
    schedule: ScheduleName
    warmup_steps: int
    total_steps: int
    min_ratio: float = 0.0
    decay_steps: int = 0
    power: float = 1.0

    def factor(self, step: int) -> float:
        """Return the factor on the peak in the step after `step` steps. Its last step is just before its end."""
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
        """Describe what changing from the curve `before` does to the step after `step` steps; None if nothing."""
        if str(before) == str(self):
            return None
        rates = [each.peak * each.factor(step) for each in (before, self)]
        longer = (
            before.schedule == self.schedule and self.schedule not in ENDLESS and before.total_steps > self.total_steps
        )
        keeping = f"; --set schedule.steps={before.total_steps} keeps it" if longer else ""
        return f"learning rate of step {step + 1} {rates[0]:.4g} -> {rates[1]:.4g} ({before} -> {self}{keeping})"

    def __str__(self) -> str:
        words = self.schedule + (f" of power {self.power:g}" if self.power != 1 else "")
        words += "" if self.schedule in ENDLESS else f" over {self.total_steps} steps"
        words += f" down to {self.min_ratio:.4g} of its peak" if self.min_ratio else ""
        parts = [f"{self.warmup_steps} of warmup"] if self.warmup_steps else []
        parts += [f"{self.decay_steps} of decay"] if self.decay_steps else []
        return words + (f" with {' and '.join(parts)}" if parts else "")
