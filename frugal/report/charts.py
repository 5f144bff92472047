"""The charts of a run's page: which there are, what is in them, and what they show in words."""

from collections.abc import Callable, Sequence
from typing import Any

from frugal.html.elements import figure
from frugal.report import words
from frugal.report.compare import speaks_one_unit
from frugal.report.records import RunRecord
from frugal.report.run import RecordedRun
from frugal.report.series import Series, course, evaluations_of, steps_of

_X_LABELS = {"step": "optimizer step", "seconds": "time since the first start"}


class Chart:
    """One chart: its place in the page, and what `assets/report.js` draws there. `is_wide`: as wide as the page."""

    def __init__(
        self, name: str, heading: str, series: Sequence[Series], *, x: str = "step", y: str = "number",
        y_label: str = "", y_min: float | None = None, marks: Sequence[dict[str, Any]] = (), is_wide: bool = False,
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
            "xLabel": _X_LABELS[x], "yLabel": y_label, "yMin": y_min, "marks": marks,
        }  # fmt: skip


def charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Those for which there are numbers; losses and speeds of different units in charts of their own."""
    marks = words.marks(runs[0]) if len(runs) == 1 else []
    made: list[Chart] = []
    for group in [list(runs)] if speaks_one_unit(runs) else [[run] for run in runs]:
        which, of = ("", "") if len(group) == len(runs) else (f"-{runs.index(group[0])}", f" of {group[0].name}")
        made += _of_one_unit(group, runs, which, of, marks)
    numbers = range(1, len(runs) + 1)
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
        Chart(
            "course", "Course of the run" if len(runs) == 1 else "Course of the runs",
            [course(run, run.name, number) for run, number in zip(runs, numbers, strict=True)],
            x="seconds", y="count", y_min=0, y_label="optimizer steps done", is_wide=True,
            marks=words.marks(runs[0], over_time=True) if len(runs) == 1 else [],
        ),
    ]  # fmt: skip
    return [chart for chart in made if not chart.is_empty]


def _of_one_unit(
    group: Sequence[RecordedRun], runs: Sequence[RecordedRun], which: str, of: str, marks: Sequence[dict[str, Any]]
) -> list[Chart]:
    """Losses and speed of runs that count the same."""
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
    """One series a run."""
    return Chart(name, heading, [steps_of(run, run.name, runs.index(run) + 1, value) for run in group], **how)
