"""The charts of a run's page: which there are, what is in them, and what they show in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frugal.html.elements import figure
from frugal.report import words
from frugal.report.records import RunRecord
from frugal.report.run import RecordedRun

_CLOCKS = {"seconds": 1, "minutes": 60, "hours": 3600}
"""Units of time in seconds; a course is drawn in the largest of which it takes two."""


MOST_POINTS = 4000
"""The points of one curve: more than a chart has columns. A page of a run of a million steps stays below a megabyte."""

Points = dict[float, float]
"""y by x."""


@dataclass(frozen=True)
class Series:
    """A curve with its name, its colour and dashes (from 1 on), and its points in order of x."""

    label: str
    colour: int
    points: Points

    def in_words(self, text: Callable[[float], str]) -> str:
        """Describe the curve: its ends, its lowest and its highest point."""
        xs, ys = list(self.points), list(self.points.values())
        least, most = min(range(len(ys)), key=ys.__getitem__), max(range(len(ys)), key=ys.__getitem__)
        return (
            f"{self.label}: from {text(ys[0])} at {xs[0]:g} to {text(ys[-1])} at {xs[-1]:g}; "
            f"lowest {text(ys[least])} at {xs[least]:g}, highest {text(ys[most])} at {xs[most]:g}."
        )


def steps_of(run: RecordedRun, label: str, number: int, value: Callable[[RunRecord], float | None]) -> Series:
    """Return the curve of a value of each step, without steps that lack it."""
    return Series(label, number, thinned({step.step: y for step in run.steps if (y := value(step)) is not None}))


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points: of each stretch the lowest, the highest and both ends."""
    if len(points) <= most:
        return points
    xs = list(points)
    size = -(-4 * len(xs) // most)
    kept: set[float] = set()
    for begin in range(0, len(xs), size):
        stretch = xs[begin : begin + size]
        kept |= {stretch[0], stretch[-1], min(stretch, key=points.__getitem__), max(stretch, key=points.__getitem__)}
    return {x: points[x] for x in xs if x in kept}


@dataclass(frozen=True)
class Axis:
    """An axis: the format of its numbers, its label, and where it begins; None: at the least number."""

    format: str = "number"
    label: str = ""
    least: float | None = None


class Chart:
    """A chart: its place in the page, and what `assets/report.js` draws there. `is_wide`: as wide as the page."""

    def __init__(
        self, name: str, heading: str, series: Sequence[Series], *, y: Axis, x: Axis = Axis("step", "optimizer step"),
        marks: Sequence[dict[str, Any]] = (), is_wide: bool = False,
    ) -> None:  # fmt: skip
        series = [each for each in series if each.points]
        xs = sorted({point for each in series for point in each.points})
        self.name = name
        self.is_wide = is_wide
        says = " ".join([f"{heading}.", *(each.in_words(words.FORMATS[y.format]) for each in series)])
        self.html = figure(name, heading, says=says)
        self.spec = {
            "x": xs, "series": [
                {"label": each.label, "colour": each.colour, "kind": "line", "values": [each.points.get(x) for x in xs]}
                for each in series
            ], "xFormat": x.format, "yFormat": y.format,
            "xLabel": x.label, "yLabel": y.label, "yMin": y.least, "marks": marks,
        }  # fmt: skip


def charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return the charts for which there are numbers; losses and speeds of different units are drawn apart."""
    numbers = {run.name: number for number, run in enumerate(runs, 1)}
    marks = words.marks(runs[0]) if len(runs) == 1 else []

    def of_steps(
        group: Sequence[RecordedRun], name: str, heading: str, value: Callable[[RunRecord], float | None], y: Axis
    ) -> Chart:
        series = [steps_of(run, run.name, numbers[run.name], value) for run in group]
        return Chart(name, heading, series, y=y, marks=marks)

    made: list[Chart] = []
    for group in [list(runs)] if words.speaks_one_unit(runs) else [[run] for run in runs]:
        unit = group[0].unit
        which, of = ("", "") if len(group) == len(runs) else (f"-{runs.index(group[0])}", f" of {group[0].name}")
        how: dict[str, Any] = {"y": Axis(label=f"mean over {unit}"), "marks": marks}
        losses = [steps_of(run, run.name, numbers[run.name], lambda step: step.loss) for run in group]
        validation = [
            Series(run.name, numbers[run.name], {e.step: e.loss for e in run.evaluations if e.loss is not None})
            for run in group
        ]
        if len(runs) == 1:
            both = [replace(losses[0], label="training"), replace(validation[0], label="validation", colour=2)]
            made.append(Chart("loss", "Loss", both, is_wide=True, **how))
        else:
            made.append(Chart(f"loss{which}", f"Training loss{of}", losses, is_wide=True, **how))
            made.append(Chart(f"validation{which}", f"Validation loss{of}", validation, **how))
        axis = Axis("count", f"{unit} a second", 0)
        made.append(of_steps(group, f"speed{which}", f"Speed{of}", lambda step: step.tokens_per_second, axis))
    share, norm = Axis("percent", "positions without a token", 0), Axis("count", "before clipping", 0)
    made += [
        of_steps(runs, "rate", "Learning rate", lambda step: step.learning_rate, Axis("small", least=0)),
        of_steps(runs, "padding", "Padding", lambda step: step.padding_share, share),
        of_steps(runs, "norm", "Norm of the gradient", lambda step: step.grad_norm, norm),
        _course(runs),
    ]
    return [chart for chart in made if chart.spec["series"]]


def _course(runs: Sequence[RecordedRun]) -> Chart:
    """Return the chart of steps over time: where a run stood still, went back and resumed."""
    longest = max((run.seconds or 0.0 for run in runs), default=0.0)
    unit = next((name for name, size in reversed(_CLOCKS.items()) if longest >= 2 * size), "seconds")
    size = _CLOCKS[unit]
    series = []
    for number, run in enumerate(runs, 1):
        records = [*run.steps, *run.starts, *run.history.of("end")]
        timed = sorted((seconds, each.step) for each in records if (seconds := run.since_begin(each)) is not None)
        begins = {run.since_begin(each) for each in run.starts}
        points: Points = {}
        for seconds, step in timed:
            if seconds in begins and points:  # until then it stood still
                points[round(seconds - 0.001, 3) / size] = next(reversed(points.values()))
            points[round(seconds, 3) / size] = step
        series.append(Series(run.name, number, thinned(points)))
    marks = words.marks(runs[0], over_time=True) if len(runs) == 1 else []
    return Chart(
        "course", "Course of the run" if len(runs) == 1 else "Course of the runs", series,
        x=Axis("count", f"{unit} since the first start"), y=Axis("count", "optimizer steps done", 0),
        marks=[mark | {"x": mark["x"] / size} for mark in marks], is_wide=True,
    )  # fmt: skip
