"""The page of a run, or of several side by side: charts with their numbers as tables, in one file."""

from collections.abc import Sequence
from datetime import UTC, datetime

from frugal.html.document import asset, document
from frugal.html.elements import Html, details, element, joined, table
from frugal.report import words
from frugal.report.charts import MOST_POINTS, charts
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
    heading = element("h2", "Starts, tuning, restarts and recoveries")
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
