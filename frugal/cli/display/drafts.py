"""Plans that are about to be dry-run: shown on a terminal while people wait, or taken as they are."""

from collections.abc import Callable
from dataclasses import replace

from frugal.cli.display.verdict import show_row, show_verdict
from frugal.planning.plan import Plan
from frugal.units import format_bytes

UNPROVEN = "a draft: its memory is arithmetic, and no dry run has proven it"


class DraftTaken(Exception):  # noqa: N818 - no error
    """A draft is enough."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class ShownDrafts:
    """Plans that are about to be dry-run: shown at once to people who wait, or taken as they are."""

    def __init__(self, *, is_shown: bool, are_enough: bool) -> None:
        self._is_shown = is_shown
        self._are_enough = are_enough
        self.last: Plan | None = None

    def take(self, plan: Plan, whole: Callable[[], Plan]) -> None:
        """One more draft.

        Raises:
            DraftTaken: it is enough.
        """
        if self._are_enough:
            plan = whole()
            raise DraftTaken(replace(plan, warnings=(UNPROVEN, *plan.warnings)).sealed())
        if not self._is_shown:
            return
        if self.last is not None:
            show_row("draft", "refused, a dry run takes more; the next:")
        show_verdict(plan.verdict)
        self.last = plan

    def conclude(self, plan: Plan) -> str:
        """What proves the last draft; empty where it is not the plan, which is shown then.

        With short samples dry runs also decide how many of them share a micro-batch: what that changes is shown.
        """
        assert self.last is not None
        size, drafted = (format_bytes(each.memory.total_bytes) for each in (plan, self.last))
        proof = "by a dry run of DeepSpeed's own code"
        samples, of_draft = (replace(each.batch, shortest=None) for each in (plan, self.last))
        if (plan.strategy, samples) == (self.last.strategy, of_draft):
            for row in plan.verdict.rows:
                if row[0] != "fits" and row not in self.last.verdict.rows:
                    show_row(*row)
            for note in plan.warnings:  # what only the dry run has shown, and what is computed beside it
                if note not in self.last.warnings:
                    show_row("note", note)
            return proof if size == drafted else f"{size} {proof}"
        show_row("draft", f"refused, and this is the plan, which takes {size} {proof}:")
        show_verdict(plan.verdict)
        return ""
