"""The page of a plan: one file with the verdict, memory over a step, answers for other settings, and the strategies
that were weighed.

Two kinds of numbers are on it, and it says which is which: the plan's memory, proven by a dry run of DeepSpeed's own
code, and those computed when the page is made, which are the arithmetic of `frugal plan --draft`.
"""

from pathlib import Path
from typing import Any

from frugal.config.hardware.cluster import CARDS
from frugal.deepspeed_adapter.json_config import write_files
from frugal.dryrun.cache import Cache, digest, model_key
from frugal.html.document import Html, asset, details, document, element, figure, joined, table
from frugal.planning.plan import Plan
from frugal.planning.report import assumptions, bar, strategy_table
from frugal.planning.strategy import short_name
from frugal.units import format_bytes, format_seconds, plural


def write_page(plan: Plan, path: Path, *, in_full: bool, helps: str = "") -> Path:
    """Write the page of `plan` to `path`, atomically, and return the path. Makes its folder.

    `in_full`: with more answers, also for other lengths, which takes from ten seconds to a minute the first time:
    answers are kept in the user's cache; otherwise with what takes a few seconds. `helps`: the change that would help
    most, in words.

    Raises:
        RequestError: it cannot be written.
        WorkerError: a trace crashed.
    """

    def answer() -> dict[str, Any]:
        from frugal.tools.plan_page.answers import answers_here  # brings the simulation along

        return answers_here(plan, in_full=in_full)

    key = digest("answers of a page", model_key(plan.request), plan.digest, in_full)
    answers = Cache.of_user().read_or_make(key, dict[str, Any], answer)
    (written,) = write_files(path.parent, {path.name: plan_page(plan, answers, helps=helps).encode()})
    return written


WHENCE = (
    "The plan's memory is of a dry run of DeepSpeed's own code. The chart and the answers are the arithmetic of "
    "`frugal plan --draft`, done when this page was made: every storage of the recorded step grows by a fixed number "
    "of bytes with each sample, and torch's allocator is replayed on them; where live tensors alone are too large it "
    "is not, and bytes are the least it takes. For another card than the plan's they may differ by 0.3 %."
)
"""The page says of its numbers which is which."""


def plan_page(plan: Plan, answers: dict[str, Any], *, helps: str = "") -> str:
    """Return the page as HTML. `answers`: of `frugal.tools.plan_page.answers`. `helps`: the change that would help
    most."""
    no_chart = f"Only dry runs can tell what {plan.request.model} takes under this strategy: it has no chart."
    memory = element("section", element("h2", "Memory"), element("p", no_chart, class_="small"))
    if any(answers["timelines"]):
        memory = _memory(plan)
    tables = details("The chart as tables", element("div", id="breakdown"), element("div", id="phases"))
    body = joined(
        _verdict(plan, helps),
        element(
            "div",
            memory,
            _settings(plan, answers["grid"]),
            class_="desk",
        ),
        element("div", tables, details("Which number is which", element("p", WHENCE))),
        _strategies(plan),
        _reasons(plan),
        element(
            "footer",
            element("p", "This page is one file and asks no network. The plan is known by its digest, which plan.json "
                    "has, and every rank checks: ", element("code", plan.digest)),
            element("p", f"frugal {plan.frugal_version}. Charts: uPlot (MIT)."),
        ),
    )  # fmt: skip
    seconds = format_seconds(plan.time.total_seconds)
    return document(
        f"{plan.request.model}: {plan.arithmetic}",
        body,
        header=f"frugal plan {plan.digest[:12]}",
        description=f"{plan.strategy}: {format_bytes(plan.memory.total_bytes)}, {seconds} a step",
        data={"answers": answers, "plan": _chosen(plan)},
        scripts=[asset("assets/plan_page.js")],
    )


def _chosen(plan: Plan) -> dict[str, Any]:
    """Return where the page starts, the rows of the table of strategies, and the points of their chart."""
    device = plan.memory.device_in(plan.cluster)
    rows = []
    strategies = [plan.strategy, *(each.strategy for each in plan.rejected)]
    for strategy, (step, _, batch, peak, headroom, _) in zip(strategies, strategy_table(plan).rows[1:], strict=True):
        named = (("micro-batch x steps", batch), ("peak", peak), ("headroom", headroom))
        says = [f"{name} {value}" for name, value in named if value]
        if step != "-":
            says.insert(0, f"{step} a step")
        rows.append({"name": str(strategy), "says": ", ".join(says)})
    points: list[tuple[Any, ...]] = [(plan.strategy, plan.time.total_seconds, plan.memory.total_bytes, "chosen")]
    for each in plan.rejected:
        kind = "lower bound" if each.is_bound else "fits"
        kind = "does not fit" if each.headroom_bytes is not None and each.headroom_bytes < 0 else kind
        points.append((each.strategy, each.step_seconds, each.peak_bytes, kind))
    return {
        "own": {
            "gpus": len(plan.cluster.nodes[0].devices),
            "length": plan.request.seq_len,
            "card": device.memory_bytes,
            "batch": plan.request.global_tokens or plan.request.batch_samples,
        },
        "flags": {
            "gpus": "--gpus",
            "card": "--mem",
            "length": "--seq-len",
            "batch": "--global-batch" if plan.request.global_tokens is None else "--global-tokens",
        },
        "memory": device.memory_bytes,
        "noun": plan.cluster.rank_noun,
        "total": plan.memory.total_bytes,
        "context": plan.memory.context,
        "limit": plan.memory.usable_bytes + plan.memory.context,
        "rows": rows,
        "points": [
            {
                "number": number,
                "says": f"{number}: {short_name(strategy)}, {kind}, {format_seconds(seconds)}, {format_bytes(total)}",
                "seconds": seconds,
                "bytes": total,
                "kind": kind,
            }
            for number, (strategy, seconds, total, kind) in enumerate(points, 1)
            if seconds is not None and total is not None
        ],
    }


def _verdict(plan: Plan, helps: str) -> Html:
    runs, *others = plan.verdict
    rows = [runs, ("batch", plan.arithmetic), *others, *([("helps", helps)] if helps else [])]
    rows += [("note", note) for note in plan.warnings]
    devices, noun = plan.cluster.devices, plan.cluster.rank_noun
    cards = f"{plural(len(devices), noun)} of {format_bytes(devices[0].memory_bytes)}"
    if len(set(devices)) > 1:
        cards = plural(len(devices), noun)
    elif devices[0].name in CARDS:
        cards = f"{len(devices)} x {devices[0].name}"
    return element(
        "section",
        element("h1", element("strong", "fits", class_="badge good"), f" {plan.request.model} on {cards}"),
        _bar(plan),
        element("dl", *(element("div", element("dt", name), element("dd", words)) for name, words in rows),
                class_="verdict-rows wide"),
        class_="verdict", aria_label="The verdict",
    )  # fmt: skip


SHARE_OF_A_LETTER = 0.04
"""A part of the bar at least so wide has its letter in it."""


def _bar(plan: Plan) -> Html:
    """Return the bar of a device's memory, with its parts in words below."""
    device_bytes = plan.device_bytes
    parts = [part for part, _ in bar(plan.memory, device_bytes, 0) if part.size_bytes]
    spans = [
        element("span", element("b", part.letter) if part.size_bytes >= SHARE_OF_A_LETTER * device_bytes else "",
                class_=part.name, style=f"width: {100 * part.size_bytes / device_bytes:.3f}%")
        for part in parts
    ]  # fmt: skip
    words = [f"{part.letter} {part.name} {format_bytes(part.size_bytes)}" for part in parts]
    return joined(
        element("div", *spans, class_="bar-of-memory", role="img", aria_label=", ".join(words)),
        element("p", *(joined(element("span", each, class_="nowrap"), " ") for each in words), class_="parts"),
    )


VIEWS = {"step": "a step", "peak": "near the peak", "start": "from the start"}
"""The stretches that the chart of memory can show, in words."""


def _memory(plan: Plan) -> Html:
    views = [
        element("label", element("input", type="radio", name="view", value=name, checked=name == "step"), f" {words}")
        for name, words in VIEWS.items()
    ]
    choice = element("div", *views, role="radiogroup", aria_label="What the chart shows", class_="views")
    below = joined(choice, element("p", id="shown", class_="small faint"))
    says = "Memory by category over an optimizer step; the tables below have its peak"
    return figure("memory", f"Memory of a {plan.cluster.rank_noun} over a step", says=says, below=below)


def _settings(plan: Plan, grid: dict[str, Any] | None) -> Html:
    """Return the controls, which the script fills with the axes of the grid, and the place of its answer."""
    heading = element("h2", "What would other settings take?", id="settings-heading")
    if grid is None:
        why = "The devices differ, so there is no number of them and no card to change."
        if len(set(plan.cluster.devices)) == 1:
            why = "Only dry runs can tell: the model's step is no arithmetic of the micro-batch."
        return element("section", heading, element("p", why, class_="small"))
    noun = plan.cluster.rank_noun
    node = " of a node" if len(plan.cluster.nodes) > 1 else ""
    sliders = [
        element("div", element("label", label, " ", element("output", id=f"{name}-value", for_=name), for_=name),
                element("input", type="range", id=name, min=0, step=1, aria_describedby=f"{name}-why"),
                element("p", id=f"{name}-why", class_="why"))
        for name, label in {
            "gpus": f"{noun}s{node}", "card": "Memory", "length": "Sample length", "batch": "Global batch",
        }.items()
    ]  # fmt: skip
    selects = [
        element("div", element("label", label, for_=name), element("select", id=name, aria_describedby=f"{name}-why"),
                element("p", id=f"{name}-why", class_="why"))
        for name, label in {
            "stage": "ZeRO stage", "loss": "Loss", "checkpointing": "Activation checkpointing", "offload": "Offloaded",
        }.items()
    ]  # fmt: skip
    back = element("button", "Back to the plan", id="back", type="button")
    return element(
        "section",
        back,
        heading,
        element("form", *sliders, *selects, id="controls", class_="controls", aria_labelledby="settings-heading"),
        element("div", id="answer"),
        element("p", id="spoken", role="status", class_="hidden"),
        element("p", grid["covers"], class_="small faint"),
        class_="settings",
    )


def _strategies(plan: Plan) -> Html:
    rows = strategy_table(plan).rows[1:]
    body = []
    for number, (step, times, batch, peak, headroom, words) in enumerate(rows, 1):
        name, _, why = words.rpartition(": ")
        body.append((number, name, why, step, times, batch, peak, headroom))
    columns = ("No.", "strategy", "why", "step", "", "micro-batch x steps", "peak", "headroom")
    says = "Seconds of a step against memory of each strategy; the table below has the same numbers"
    note = "> lower bound, < upper bound: it was passed over before it was evaluated in full"
    return figure("strategies", f"{len(rows)} strategies were weighed", says=says, below=joined(
        table("Strategies, the chosen one first", columns, body, numbers=(3, 4, 5, 6, 7)),
        element("p", note, class_="small faint")))  # fmt: skip


def _reasons(plan: Plan) -> Html:
    lists = [
        details("What is assumed", element("ul", *(element("li", line) for line in assumptions(plan)))),
        details("Made with", element("p", ", ".join(f"{name} {number}" for name, number in plan.versions.items()))),
    ]
    why = [element("li", sentence) for sentence in plan.why if sentence]
    return element("section", element("h2", "Why this plan"), element("ul", *why), *lists)
