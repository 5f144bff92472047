"""The charts of a run's page: which there are, what is in them, and what they show in words."""

from collections.abc import Callable, Sequence
from typing import Any

from frugal.html.elements import figure
from frugal.report import words
from frugal.report.compare import speaks_one_unit
from frugal.report.records import RunRecord
from frugal.report.run import RecordedRun
from frugal.report.series import Series, course, evaluations_of, steps_of

_CLOCKS = {"seconds": 1, "minutes": 60, "hours": 3600}
"""Units of time in seconds; a course is drawn in the largest of which it takes two."""


class Chart:
    """A chart: its place in the page, and what `assets/report.js` draws there. `is_wide`: as wide as the page."""

    def __init__(
        self, name: str, heading: str, series: Sequence[Series], *, x: str = "step", x_label: str = "",
        y: str = "number", y_label: str = "", y_min: float | None = None, marks: Sequence[dict[str, Any]] = (),
        is_wide: bool = False,
    ) -> None:  # fmt: skip
        series = [each for each in series if each.points]
        xs = sorted({point for each in series for point in each.points})
        self.name = name
        self.is_wide = is_wide
        self.is_empty = not series
        says = " ".join([f"{heading}.", *(each.in_words(words.FORMATS[y]) for each in series)])
        self.html = figure(name, heading, says=says)
        self.spec = {
            "x": xs, "series": [each.drawn(xs) for each in series], "xFormat": x, "yFormat": y,
            "xLabel": x_label or "optimizer step", "yLabel": y_label, "yMin": y_min, "marks": marks,
        }  # fmt: skip


def charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return the charts for which there are numbers; losses and speeds of different units are drawn apart."""
    marks = words.marks(runs[0]) if len(runs) == 1 else []
    made: list[Chart] = []
    for group in [list(runs)] if speaks_one_unit(runs) else [[run] for run in runs]:
        which, of = ("", "") if len(group) == len(runs) else (f"-{runs.index(group[0])}", f" of {group[0].name}")
        made += _of_one_unit(group, runs, which, of, marks)
    made += [
        _of_steps(
            runs, runs, "rate", "Learning rate", lambda step: step.learning_rate, y="small", y_min=0, marks=marks
        ),
        _of_steps(
            runs, runs, "padding", "Padding", lambda step: step.padding_share, y="percent", y_min=0,
            y_label="positions without a token", marks=marks,
        ),
        _of_steps(
            runs, runs, "norm", "Norm of the gradient", lambda step: step.grad_norm, y="count", y_min=0,
            y_label="before clipping", marks=marks,
        ),
        _course(runs),
    ]  # fmt: skip
    return [chart for chart in made if not chart.is_empty]


def _course(runs: Sequence[RecordedRun]) -> Chart:
    """Return the chart of steps over time: where a run stood still, went back and resumed."""
    longest = max((run.seconds or 0.0 for run in runs), default=0.0)
    unit = next((name for name, size in reversed(_CLOCKS.items()) if longest >= 2 * size), "seconds")
    size = _CLOCKS[unit]
    marks = words.marks(runs[0], over_time=True) if len(runs) == 1 else []
    return Chart(
        "course", "Course of the run" if len(runs) == 1 else "Course of the runs",
        [course(run, run.name, number, size) for number, run in enumerate(runs, 1)],
        x="count", x_label=f"{unit} since the first start", y="count", y_min=0, y_label="optimizer steps done",
        marks=[mark | {"x": mark["x"] / size} for mark in marks], is_wide=True,
    )  # fmt: skip


def _of_one_unit(
    group: Sequence[RecordedRun], runs: Sequence[RecordedRun], which: str, of: str, marks: Sequence[dict[str, Any]]
) -> list[Chart]:
    """Return the charts of losses and speed of runs that count the same unit."""
    unit = group[0].unit
    losses = [steps_of(run, run.name, runs.index(run) + 1, lambda step: step.loss) for run in group]
    validation = [evaluations_of(run, run.name, runs.index(run) + 1) for run in group]
    how: dict[str, Any] = {"y_label": f"mean over {unit}", "marks": marks}
    if len(runs) == 1:
        both = [losses[0].renamed("training", 1), validation[0].renamed("validation", 2)]
        drawn = [Chart("loss", "Loss", both, is_wide=True, **how)]
    else:
        drawn = [
            Chart(f"loss{which}", f"Training loss{of}", losses, is_wide=True, **how),
            Chart(f"validation{which}", f"Validation loss{of}", validation, **how),
        ]
    speed = _of_steps(
        group, runs, f"speed{which}", f"Speed{of}", lambda step: step.tokens_per_second, y="count", y_min=0,
        y_label=f"{unit} a second", marks=marks,
    )  # fmt: skip
    return [*drawn, speed]


def _of_steps(
    group: Sequence[RecordedRun], runs: Sequence[RecordedRun], name: str, heading: str,
    value: Callable[[RunRecord], float | None], **how: Any,
) -> Chart:  # fmt: skip
    """Return a chart with one series a run."""
    return Chart(name, heading, [steps_of(run, run.name, runs.index(run) + 1, value) for run in group], **how)
