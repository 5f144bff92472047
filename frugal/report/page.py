"""The page of a run, or of several side by side: charts with their numbers as tables, in one file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from frugal.html.document import Html, asset, details, document, element, figure, joined, table
from frugal.report import words
from frugal.report.records import RunRecord
from frugal.report.run import RecordedRun
from frugal.units import plural

MOST_ROWS = 60
"""Rows of the table of steps: a longer run lists every nth step."""


def page(runs: Sequence[RecordedRun]) -> str:
    """Return the HTML of one run, or of several compared."""
    is_one = len(runs) == 1
    title = f"{runs[0].name}: a training run" if is_one else f"{' and '.join(run.name for run in runs)}: compared"
    drawn = charts(runs)
    digests = "; ".join(f"{run.name} is of plan {run.plan.digest[:12]}" for run in runs if run.plan is not None)
    body = [
        *(_opening(runs[0]) if is_one else _comparison(runs)),
        *(element("p", element("strong", "note "), note, class_="small") for note in words.notes(runs)),
        *(chart.html for chart in drawn if chart.is_wide),
        element("div", *(chart.html for chart in drawn if not chart.is_wide), class_="pairs"),
        _memory(runs),
        _events(runs),
        _settings(runs),
        *([_steps_table(runs[0])] if is_one else []),
        element(
            "footer",
            f"Made by `frugal report` from metrics.jsonl and plan.json. {digests}. Of runs of more than "
            f"{MOST_POINTS:,} steps the extremes of each stretch are drawn.",
        ),
    ]
    specs = {chart.name: chart.spec for chart in drawn}
    return document(
        title, joined(*body), header="frugal report", data={"charts": specs}, scripts=[asset("assets/report.js")],
        description=". ".join(f"{run.name}: {run.state_in_words}" for run in runs),
    )  # fmt: skip


def _opening(run: RecordedRun) -> list[Html]:
    """Return how a run ended and its main numbers."""
    model = "a model" if run.plan is None else run.plan.request.model.rpartition("/")[2]
    devices = f" on {run.facts['devices']}" if "devices" in run.facts else ""
    facts = [
        element("div", element("dt", name), element("dd", value, element("small", more)))
        for name, value, more in words.facts(run)
    ]
    return [
        element("h1", f"{run.name}: {model}{devices}"),
        element("p", run.state_in_words[0].upper() + run.state_in_words[1:], class_="lead"),
        *([] if run.plan is None else [element("p", f"{run.plan.strategy}; {run.plan.arithmetic}")]),
        element("dl", *facts, class_="facts"),
    ]


def _comparison(runs: Sequence[RecordedRun]) -> list[Html]:
    head = ["", *(run.name for run in runs)]
    in_short = table("Each run in short", head, words.comparison(runs), numbers=range(1, len(head)))
    return [element("h1", f"{len(runs)} runs compared"), in_short]


def _memory(runs: Sequence[RecordedRun]) -> Html:
    """Return planned against measured memory by phase, as numbers and bars."""
    parts = []
    for run in runs:
        rows = words.phase_rows(run)
        if not rows:
            continue
        columns, sizes = words.memory_columns(run)
        top = max(row.planned or 0 for row in rows), max(row.measured or 0 for row in rows)
        lines = [[row.name, *size, _bars(row, max(*top, 1))] for row, size in zip(rows, sizes, strict=True)]
        head = ["phase", *columns, element("span", "bars", class_="hidden")]
        titles = (f"Peak of live tensors{'' if len(runs) == 1 else f' of {run.name}'}", words.of_which_steps(run))
        parts.append(table(", ".join(filter(None, titles)), head, lines, numbers=range(1, 1 + len(columns))))
    if not parts:
        parts = [element("p", "Memory was not measured by phase.", class_="faint")]
    note = (
        "Planned: what the dry run says, for rank 0's largest micro-batch. Measured: rank 0's. A dash: the plan has "
        "none, it was not measured, or it is of other work. Bars: outlined is planned, filled measured."
    )
    return element("section", element("h2", "Memory by phase"), *parts, element("p", note, class_="small faint"))


def _bars(row: words.PhaseRow, top: int) -> Html:
    """Return two bars under each other; the numbers beside them say the same."""
    bars = [
        element("span", class_=f"bar {kind}", style=f"width:{100 * number / top:.2f}%")
        for number, kind in ((row.planned, "planned"), (row.measured, "measured"))
        if number
    ]
    return element("span", *bars, class_="bars", aria_hidden="true")


def _events(runs: Sequence[RecordedRun]) -> Html:
    rows = [
        [
            *([run.name] if len(runs) > 1 else []), words.shown(event.seconds, "seconds"),
            event.kind.replace("_", " "), f"{event.step:,}", event.words,
        ]
        for run in runs for event in run.events
    ]  # fmt: skip
    head = [*(["run"] if len(runs) > 1 else []), "time", "event", "step", "what"]
    heading = element("h2", "Starts, restarts and recoveries")
    if not rows:
        return element("section", heading, element("p", "None were recorded.", class_="faint"))
    first = min((run.begin for run in runs if run.begin is not None), default=None)
    since = "" if first is None or len(runs) > 1 else f" {datetime.fromtimestamp(first, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return element("section", heading, table(f"Time is since the first start{since}", head, rows))


def _settings(runs: Sequence[RecordedRun]) -> Html:
    """Return versions and settings; of several runs those that differ first."""
    heading = element("h2", "Settings and versions" if len(runs) == 1 else "What differs")
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else ["", "value"]
    rows = words.everything(runs)
    if len(runs) == 1:
        versions = [[name, value] for name, value in runs[0].versions.items()]
        digest = [] if runs[0].plan is None else [["plan", element("code", runs[0].plan.digest)]]
        listed = details(plural(len(rows), "setting"), table("What was asked for and decided", head, rows))
        return element("section", heading, table("Versions", ["", "version"], [*versions, *digest]), listed)
    shown = element("p", "No setting and no version differs.")
    if different := words.differing(runs):
        shown = table("Settings and versions that differ", head, different)
    return element("section", heading, shown, details("All settings", table("All settings and versions", head, rows)))


def _steps_table(run: RecordedRun) -> Html:
    """Return the numbers of the charts as a table."""
    every = -(-len(run.steps) // MOST_ROWS) or 1
    chosen = [step for i, step in enumerate(run.steps) if i % every == 0 or i == len(run.steps) - 1]
    caption = "Every step" if every == 1 else f"Every {every}th step, and the last"
    losses = {each.step: each.loss for each in run.evaluations}
    rows = [
        [
            f"{step.step:,}", words.shown(step.loss, "number"), words.shown(losses.get(step.step), "number"),
            words.shown(step.learning_rate, "small"), words.shown(step.tokens_per_second, "count"),
            words.shown(step.padding_share, "percent"), words.shown(step.memory_bytes, "bytes"),
        ]
        for step in chosen
    ]  # fmt: skip
    head = ["step", "loss", "validation", "learning rate", f"{run.unit}/s", "padding", "memory"]
    listed = details(f"Numbers of {plural(len(rows), 'step')}", table(caption, head, rows, numbers=range(1, 7)))
    return element("section", element("h2", "Numbers"), listed)


# The charts: which there are, what is in them, and what they show in words.

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
            made += [
                Chart(f"loss{which}", f"Training loss{of}", losses, is_wide=True, **how),
                Chart(f"validation{which}", f"Validation loss{of}", validation, **how),
            ]
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
