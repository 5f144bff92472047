"""Drafts of a plan on a terminal, shown while the user waits for the dry run that proves them."""

from dataclasses import replace

from frugal.cli.display.verdict import show_row, show_verdict
from frugal.planning.plan import UNPROVEN, Plan
from frugal.units import format_bytes


def show_draft(draft: Plan, before: Plan | None) -> None:
    """Print a draft; `before` is the one that a dry run refused, if any."""
    if before is not None:
        show_row("draft", "refused, a dry run takes more; the next:")
    show_verdict(replace(draft, warnings=tuple(note for note in draft.warnings if note != UNPROVEN)))


def conclude(plan: Plan, draft: Plan) -> str:
    """Return the proof of the last draft; empty where it is not the plan, which is printed then.

    With short samples dry runs also decide how many of them share a micro-batch: changes of that are printed.
    """
    size, drafted = (format_bytes(each.memory.total_bytes) for each in (plan, draft))
    proof = "by a dry run of DeepSpeed's own code"
    samples, of_draft = (replace(each.batch, shortest=None) for each in (plan, draft))
    if (plan.strategy, samples) != (draft.strategy, of_draft):
        show_row("draft", f"refused, and this is the plan, which takes {size} {proof}:")
        show_verdict(plan)
        return ""
    for row in plan.verdict:
        if row[0] != "fits" and row not in draft.verdict:
            show_row(*row)
    for note in plan.warnings:
        if note not in draft.warnings:
            show_row("note", note)
    return proof if size == drafted else f"{size} {proof}"
