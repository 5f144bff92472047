"""The line of a training run that moves: as long as there is room, shortened by rules where there is not.

Nothing is cut off: each rule takes a shorter word for the same, or leaves out the number that is missed least, and the
first form that fits is shown. Step, loss and the time that is left stay to the last.
"""

from dataclasses import dataclass

from frugal.units import GIB, MIB, format_bytes, format_seconds

BAR_WIDTH = 20
_FULL, _EMPTY = "━", "─"


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """After `step` of `total_steps` steps.

    Attributes:
        loss: of the last step, mean over its targets.
        learning_rate: of the last step.
        tokens_per_second: target tokens of all ranks, over the last steps.
        seconds_left: at the speed of the last steps.
        measured_bytes: rank 0's peak so far; None: not measured yet.
        planned_bytes: what the plan says.
    """

    step: int
    total_steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    seconds_left: float
    measured_bytes: int | None
    planned_bytes: int

    @property
    def plain(self) -> str:
        """All but the step, in full words; the same wherever there is no terminal."""
        memory = "" if self.measured_bytes is None else f"{format_bytes(self.measured_bytes)} of "
        return (
            f"loss {self.loss:.4f}  lr {self.learning_rate:.2e}  {self.tokens_per_second:,.0f} tokens/s"
            f"  {format_seconds(self.seconds_left)} left  memory {memory}{format_bytes(self.planned_bytes)}"
        )

    def fitted(self, columns: int) -> str:
        """The line for a terminal of so many columns; the shortest form where even that is too long."""
        forms = self._forms()
        return next((form for form in forms if len(form) <= columns), forms[-1])

    def _forms(self) -> list[str]:
        """Longest first."""
        count = f"{self.step}/{self.total_steps}"
        loss, short_loss = f"loss {self.loss:.4f}", f"loss {self.loss:.3g}"
        rate, left = _thousands(self.tokens_per_second), _short_seconds(self.seconds_left)
        memory = self._memory()
        full = f"step {count}  {self.plain}"
        middle = [f"step {count}", loss, f"lr {self.learning_rate:.2e}", f"{rate} tokens/s", memory, f"{left} left"]
        short = [count, short_loss, f"lr {self.learning_rate:.1e}", f"{rate} tok/s", memory, f"{left} left"]
        without = [short[:2] + short[3:], [*short[:2], *short[4:]], [*short[:2], short[5]], short[:2]]
        rows = [middle, short, *without]
        return [f"step {count}  {self._bar()}  {self.plain}", full, *("  ".join(row) for row in rows)]

    def _bar(self) -> str:
        done = BAR_WIDTH * self.step // max(self.total_steps, 1)
        return _FULL * done + _EMPTY * (BAR_WIDTH - done)

    def _memory(self) -> str:
        """Measured and planned, with one unit for both."""
        unit, name = (GIB, "GiB") if self.planned_bytes >= GIB else (MIB, "MiB")
        digits = (2 if unit == GIB else 1) - (self.planned_bytes >= 100 * unit)
        sizes = [self.planned_bytes] if self.measured_bytes is None else [self.measured_bytes, self.planned_bytes]
        return f"{'/'.join(f'{size / unit:.{digits}f}' for size in sizes)} {name}"


def _thousands(number: float) -> str:
    """`987`, `12.3k`, `1.23M`."""
    for scale, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}{suffix}" if number < 1000 * scale else f"{number / scale:.0f}{suffix}"
    return f"{number:.0f}"


def _short_seconds(seconds: float) -> str:
    """`45s`, `4m05s`, `3h20m`, `12d3h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"
