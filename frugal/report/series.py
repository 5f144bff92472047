"""Curves of a run: points to draw, thinned where there are too many, and their summary in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frugal.report.records import RunRecord
from frugal.report.run import RecordedRun

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

    def renamed(self, label: str, colour: int) -> "Series":
        """Return the same curve under another name."""
        return replace(self, label=label, colour=colour)

    def drawn(self, xs: Sequence[float]) -> dict[str, Any]:
        """Return the curve for the script: a value for each x of the chart, null where it has none."""
        values = [self.points.get(x) for x in xs]
        return {"label": self.label, "colour": self.colour, "kind": "line", "values": values}

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


def evaluations_of(run: RecordedRun, label: str, number: int) -> Series:
    """Return the curve of the loss of each evaluation."""
    return Series(label, number, {each.step: each.loss for each in run.evaluations if each.loss is not None})


def course(run: RecordedRun, label: str, number: int, unit_seconds: int = 1) -> Series:
    """Return the curve of steps over time since the first start, in units; a restart goes back to its checkpoint."""
    records = [*run.steps, *run.starts, *run.history.of("end")]
    timed = sorted((seconds, each.step) for each in records if (seconds := run.since_begin(each)) is not None)
    begins = {run.since_begin(each) for each in run.starts}
    points: Points = {}
    for seconds, step in timed:
        if seconds in begins and points:  # until then it stood still
            points[round(seconds - 0.001, 3) / unit_seconds] = next(reversed(points.values()))
        points[round(seconds, 3) / unit_seconds] = step
    return Series(label, number, thinned(points))


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
