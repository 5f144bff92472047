"""The page of a plan: one file with the verdict, memory over a step, answers for other settings, the strategies that
were weighed, and what other machines would come to.

Two kinds of numbers are on it, and it says which is which: the plan's memory, proven by a dry run of DeepSpeed's own
code, and those computed when the page is made, which are the arithmetic of `frugal plan --draft`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from frugal.config.hardware.cluster import CARDS
from frugal.html.assets import asset
from frugal.html.document import document
from frugal.html.elements import Html, details, element, figure, joined, table
from frugal.planning.plan import Plan, Rejected
from frugal.planning.report import Table, assumptions, bar, strategy_table
from frugal.planning.strategy import Strategy, short_name
from frugal.units import format_bytes, format_seconds, plural


class PageData(msgspec.Struct, frozen=True):
    """The contents of a page besides its plan, as they are kept.

    `answers`: see `frugal.tools.plan_page.answers`. `tables`: what other machines would come to.
    """

    answers: dict[str, Any]
    tables: tuple[Table, ...] = ()


def plan_page(plan: Plan, answers: dict[str, Any], *, helps: str = "", tables: Sequence[Table] = ()) -> str:
    """Return the page as HTML.

    `answers`: of `frugal.tools.plan_page.answers`. `helps`: the change that would help most. `tables`: predictions for
    other machines.
    """
    body = joined(
        _verdict(plan, helps),
        element(
            "div",
            _memory(plan) if any(answers["timelines"]) else _no_arithmetic(plan),
            _settings(plan, answers["grid"]),
            class_="desk",
        ),
        _tables_of_chart(),
        _strategies(plan),
        *(_what_if(each) for each in tables),
        _reasons(plan),
        _footer(plan),
    )
    return document(
        f"{plan.request.model}: {plan.arithmetic}",
        body,
        header=f"frugal plan {plan.digest[:12]}",
        description=f"{plan.strategy}: {format_bytes(plan.memory.total_bytes)}, {_seconds(plan)} a step",
        data={"answers": answers, "plan": _chosen(plan)},
        scripts=[asset("plan_page.js")],
    )


def chosen_micro_batches(plan: Plan) -> Iterator[tuple[Strategy, int]]:
    """Yield every strategy of the plan with the micro-batch it was weighed at, the chosen one first."""
    own = plan.memory.device_in(plan.cluster)
    sizes = zip(plan.cluster.devices, plan.batch.cap_of_rank, strict=True)
    yield plan.strategy, max(size for device, size in sizes if device == own)
    for each in plan.rejected:
        yield each.strategy, max(1, each.micro_batch)


def _chosen(plan: Plan) -> dict[str, Any]:
    """Return where the page starts, the rows of the table of strategies, and the points of their chart."""
    device = plan.memory.device_in(plan.cluster)
    weighed = zip(chosen_micro_batches(plan), strategy_table(plan).rows[1:], strict=True)
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
        "rows": [{"name": str(strategy), "says": _says(row)} for (strategy, _), row in weighed],
        "points": [_point(1, short_name(plan.strategy), plan.time.total_seconds, plan.memory.total_bytes, "chosen")]
        + [
            _point(number, short_name(each.strategy), each.step_seconds, each.peak_bytes, _kind(each))
            for number, each in enumerate(plan.rejected, 2)
            if each.step_seconds is not None and each.peak_bytes is not None
        ],
    }


def _says(row: Sequence[str]) -> str:
    """Return the numbers of a row of the table of strategies in a sentence."""
    step, _, batch, peak, headroom, _ = row
    parts = [(f"{step} a step", step != "-"), (f"micro-batch x steps {batch}", batch), (f"peak {peak}", peak)]
    parts.append((f"headroom {headroom}", headroom))
    return ", ".join(words for words, known in parts if known)


def _point(number: int, name: str, seconds: float, total: int, kind: str) -> dict[str, Any]:
    says = f"{number}: {name}, {kind}, {format_seconds(seconds)}, {format_bytes(total)}"
    return {"number": number, "says": says, "seconds": seconds, "bytes": total, "kind": kind}


def _kind(rejected: Rejected) -> str:
    if rejected.headroom_bytes is not None and rejected.headroom_bytes < 0:
        return "does not fit"
    return "lower bound" if rejected.is_bound else "fits"


def _seconds(plan: Plan) -> str:
    return format_seconds(plan.time.total_seconds)


def _verdict(plan: Plan, helps: str) -> Html:
    runs, *others = plan.verdict
    rows = [runs, ("batch", plan.arithmetic), *others, *([("helps", helps)] if helps else [])]
    rows += [("note", note) for note in plan.warnings]
    badge = element("strong", "fits", class_="badge good")
    return element(
        "section",
        element("h1", badge, f" {plan.request.model} on {_cards(plan)}"),
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


def _cards(plan: Plan) -> str:
    """Return the devices: `4 GPUs of 12.00 GiB`, `8 x h100-80g`."""
    devices, noun = plan.cluster.devices, plan.cluster.rank_noun
    if len(set(devices)) > 1:
        return plural(len(devices), noun)
    if devices[0].name in CARDS:
        return f"{len(devices)} x {devices[0].name}"
    return f"{plural(len(devices), noun)} of {format_bytes(devices[0].memory_bytes)}"


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


def _tables_of_chart() -> Html:
    whence = (
        "The plan's memory is of a dry run of DeepSpeed's own code. The chart and the answers are the arithmetic of "
        "`frugal plan --draft`, done when this page was made: every storage of the recorded step grows by a fixed "
        "number of bytes with each sample, and torch's allocator is replayed on them; where live tensors alone are too "
        "large it is not, and bytes are the least it takes. For another card than the plan's they may differ by 0.3 %."
    )
    tables = details("The chart as tables", element("div", id="breakdown"), element("div", id="phases"))
    return element("div", tables, details("Which number is which", element("p", whence)))


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


def _no_arithmetic(plan: Plan) -> Html:
    words = f"Only dry runs can tell what {plan.request.model} takes under this strategy: it has no chart."
    return element("section", element("h2", "Memory"), element("p", words, class_="small"))


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


def _what_if(what: Table) -> Html:
    columns = what.rows[0] if what.has_head else [""] * len(what.rows[0])
    rows = what.rows[1:] if what.has_head else what.rows
    note = [element("p", what.note, class_="small faint")] if what.note else []
    title = what.title[:1].upper() + what.title[1:]
    return element("section", element("h2", title), table(title, columns, rows), *note)


def _reasons(plan: Plan) -> Html:
    lists = [
        details("What is assumed", element("ul", *(element("li", line) for line in assumptions(plan)))),
        details("Made with", element("p", ", ".join(f"{name} {number}" for name, number in plan.versions.items()))),
    ]
    why = [element("li", sentence) for sentence in plan.why if sentence]
    return element("section", element("h2", "Why this plan"), element("ul", *why), *lists)


def _footer(plan: Plan) -> Html:
    return element(
        "footer",
        element("p", "This page is one file and asks no network. The plan is known by its digest, which plan.json has, "
                "and every rank checks: ", element("code", plan.digest)),
        element("p", f"frugal {plan.frugal_version}. Charts: uPlot (MIT)."),
    )  # fmt: skip
