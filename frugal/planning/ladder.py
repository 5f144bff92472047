"""The strategies that were weighed, as a table: what each would take, and why it was not taken."""

from collections.abc import Sequence

from frugal.planning.plan import Plan, Rejected, StepTime
from frugal.planning.strategy import Strategy
from frugal.units import format_bytes, format_seconds

HEAD = ("step", "", "batch", "peak", "headroom", "")


def ladder(plan: Plan, *, shown: int | None = None) -> list[str]:
    """The chosen strategy, then the others, fastest first; at most `shown` of these.

    A batch is micro-batch x accumulation steps.
    """
    rejected = plan.rejected if shown is None else plan.rejected[:shown]
    lines = table([HEAD, _chosen(plan), *(_row(plan, each) for each in rejected)])
    rest = len(plan.rejected) - len(rejected)
    notes = ["> at least, < at most: known without a closer look"] if any(each.is_bound for each in rejected) else []
    notes += [f"{rest} more: `frugal explain`"] if rest else []
    return ["strategies", *lines, *(["  " + "; ".join(notes)] if notes else [])]


def short(strategy: Strategy) -> str:
    """A strategy without what it does not do."""
    plain = strategy.activation_checkpointing == "off"
    return str(strategy).replace(", activation checkpointing off", "") if plain else str(strategy)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, indented; all columns but the last aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def _chosen(plan: Plan) -> tuple[str, ...]:
    batch, memory = plan.batch, plan.memory
    return (
        format_seconds(plan.time.total_seconds),
        "1.00x",
        f"{batch.largest_cell} x {batch.accumulation_steps}",
        format_bytes(memory.total_bytes),
        format_bytes(memory.headroom_bytes),
        f"{short(plan.strategy)}: chosen",
    )


def _row(plan: Plan, rejected: Rejected) -> tuple[str, ...]:
    bound = ">" * rejected.is_bound
    seconds, headroom = rejected.step_seconds, rejected.headroom_bytes
    fits = seconds is not None and (headroom is None or headroom >= 0)
    steps = f" x {rejected.accumulation_steps}" if rejected.accumulation_steps else ""
    peak = f"{bound}{format_bytes(rejected.peak_bytes)}" if rejected.peak_bytes is not None else ""
    room = format_bytes(headroom) if headroom is not None else ""
    return (
        f"{bound}{format_seconds(seconds)}" if fits and seconds is not None else "-",
        _times(seconds, plan.time.total_seconds) if fits and seconds is not None else "",
        f"{rejected.micro_batch}{steps}",
        peak,
        f"<{room}" if bound and room else room,
        f"{short(rejected.strategy)}: {_verdict(plan.time, rejected)}",
    )


def _times(seconds: float, chosen: float) -> str:
    return f"{seconds / chosen:.2f}x" if chosen else ""


def _verdict(chosen: StepTime, rejected: Rejected) -> str:
    """The reason in few words, and the part of the step that is longer."""
    if rejected.reason.startswith("cannot fit"):
        return "cannot fit"
    if rejected.time is None or not rejected.reason.startswith(("slower", "cannot be faster")):
        return rejected.reason
    parts = {
        name: getattr(rejected.time, f"{name}_seconds") - getattr(chosen, f"{name}_seconds")
        for name in ("compute", "recompute", "communication", "offload", "optimizer")
    }
    longest = max(parts, key=lambda name: parts[name])
    return f"{rejected.reason}, {longest} +{format_seconds(parts[longest])}" if parts[longest] > 0 else rejected.reason
