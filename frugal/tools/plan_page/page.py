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
from frugal.planning.memory_report import assumptions
from frugal.planning.plan import Plan, Rejected
from frugal.planning.report import strategy_table
from frugal.planning.strategy import Strategy, short_name
from frugal.planning.table import Table
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
        *_verdict(plan, helps),
        _memory(plan, bool(answers["answers"])) if any(answers["timelines"]) else _no_arithmetic(plan),
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
        "gpus": len(plan.cluster.nodes[0].devices),
        "seqLen": plan.request.seq_len,
        "memory": device.memory_bytes,
        "noun": plan.cluster.rank_noun,
        "model": plan.request.model,
        "total": plan.memory.total_bytes,
        "context": plan.memory.context,
        "limit": plan.memory.usable_bytes + plan.memory.context,
        "rows": [
            {"name": str(strategy), "microBatch": micro_batch, "says": _says(row)}
            for (strategy, micro_batch), row in weighed
        ],
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


def _verdict(plan: Plan, helps: str) -> list[Html]:
    memory, batch, noun = plan.memory, plan.batch, plan.cluster.rank_noun
    device = memory.device_in(plan.cluster)
    micro = (f"up to {batch.largest_micro_batch}", f"samples in {plural(batch.accumulation_steps, 'micro-step')}")
    if batch.is_uniform and batch.sequence_parallel == 1:
        steps = plural(batch.accumulation_steps, "accumulation step")
        micro = (str(batch.largest_micro_batch), f"x {plural(batch.world_size, noun)} x {steps}")
    facts = [
        ("Memory", format_bytes(memory.total_bytes), f"of {format_bytes(device.memory_bytes)} on each {noun}"),
        ("Headroom", format_bytes(memory.headroom_bytes), "before the margin"),
        ("Micro-batch", *micro),
        ("Step", _seconds(plan), f"estimated, {batch.global_batch} samples"),
    ]
    rows = [(name, words) for name, words in plan.verdict if name in ("runs", "binds")]
    rows += [("helps", helps)] if helps else []
    written = [element("tr", element("th", name, scope="row"), element("td", words)) for name, words in rows]
    numbers = [
        element("div", element("dt", name), element("dd", value, element("small", more))) for name, value, more in facts
    ]
    return [
        element("h1", f"{plan.request.model} fits on {_cards(plan)}: ", *_unbroken(short_name(plan.strategy))),
        element("p", plan.arithmetic, class_="lead"),
        element("dl", *numbers, class_="facts"),
        element("table", element("caption", "The verdict", class_="hidden"), element("tbody", *written), class_="rows"),
        *(element("p", element("strong", "Note: "), note, class_="small") for note in plan.warnings),
    ]


def _unbroken(strategy: str) -> list[Html]:
    """Return the words of a text, none of which is broken at a hyphen."""
    return [joined(element("span", word, class_="nowrap"), " ") for word in strategy.split(" ")]


def _cards(plan: Plan) -> str:
    """Return the devices: `4 GPUs of 12.00 GiB`, `8 x h100-80g`."""
    devices, noun = plan.cluster.devices, plan.cluster.rank_noun
    if len(set(devices)) > 1:
        return plural(len(devices), noun)
    if devices[0].name in CARDS:
        return f"{len(devices)} x {devices[0].name}"
    return f"{plural(len(devices), noun)} of {format_bytes(devices[0].memory_bytes)}"


def _memory(plan: Plan, has_answers: bool) -> Html:
    proven = (
        f"The plan's {format_bytes(plan.memory.total_bytes)} are of a dry run of DeepSpeed's own code. The chart and "
        "the answers are the arithmetic of `frugal plan --draft`, done when this page was made: every storage of the "
        "recorded step grows by a fixed number of bytes with each sample, and torch's allocator is replayed on them. "
        "For another card than the one a setting was computed for, its bytes may differ by about 0.3 %."
    )
    whole = element(
        "label", Html('<input type="checkbox" id="whole">'), " from the start of the run", class_="small nowrap"
    )
    below = joined(
        element("p", element("span", id="shown"), " ", whole, class_="small"),
        *([element("p", role="status", id="answer", aria_live="polite"), _controls(plan)] if has_answers else []),
        details("The same as tables", element("div", id="breakdown"), element("div", id="phases")),
        details("Which number is which", element("p", proven)),
    )
    says = "Memory by category over an optimizer step; the tables below have its peak"
    return figure("memory", f"Memory of a {plan.cluster.rank_noun} over a step", says=says, below=below)


def _controls(plan: Plan) -> Html:
    """Return sliders and the selection of strategies; the script fills them with what the page has answers for."""
    noun = plan.cluster.rank_noun
    node = " of each node" if len(plan.cluster.nodes) > 1 else ""
    labels = {"gpus": f"{noun}s{node}", "card": "Memory", "micro": "Micro-batch", "length": "Sample"}
    sliders = [
        element("div", element("label", label, " ", element("output", id=f"{name}-value", for_=name), for_=name),
                Html(f'<input type="range" id="{name}" min="0" step="1">'))
        for name, label in labels.items()
    ]  # fmt: skip
    strategy = element("div", element("label", "Strategy", for_="strategy"), element("select", id="strategy"),
                       class_="wide")  # fmt: skip
    buttons = [
        element("button", "Back to the plan", id="back", type="button"), " ",
        element("button", "The largest that fits", id="largest", type="button"),
    ]  # fmt: skip
    legend = element("legend", "What would other settings take?")
    return element("form", element("fieldset", legend, *sliders, strategy), element("p", *buttons),
                   class_="controls", id="controls")  # fmt: skip


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
