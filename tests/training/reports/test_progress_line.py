"""The line that moves is shortened by rules, and never cut."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from frugal.training.reports.metrics import Log
from frugal.training.reports.progress_line import StepProgress
from frugal.units import GIB, MIB
from tests.training.reports.test_metrics import result

EARLY = StepProgress(
    step=3, total_steps=40, loss=5.3314, learning_rate=2e-4, tokens_per_second=4951.3, seconds_left=64.2,
    measured_bytes=None, planned_bytes=30 * MIB,
)  # fmt: skip
LONG = StepProgress(
    step=120_000, total_steps=1_000_000, loss=12.53142, learning_rate=2.34e-4, tokens_per_second=1_234_567.0,
    seconds_left=1_061_234.0, measured_bytes=103 * GIB, planned_bytes=110 * GIB,
)  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (200, "step 3/40  ━───────────────────  loss 5.3314  lr 2.00e-04  4,951 tokens/s  1 min 04 s left  "
              "memory 30.0 MiB"),
        (90, "step 3/40  loss 5.3314  lr 2.00e-04  4,951 tokens/s  1 min 04 s left  memory 30.0 MiB"),
        (80, "step 3/40  loss 5.3314  lr 2.00e-04  4.95k tokens/s  30.0 MiB  1m04s left"),
        (62, "3/40  loss 5.33  lr 2.0e-04  4.95k tok/s  30.0 MiB  1m04s left"),
        (50, "3/40  loss 5.33  4.95k tok/s  30.0 MiB  1m04s left"),
        (40, "3/40  loss 5.33  30.0 MiB  1m04s left"),
        (30, "3/40  loss 5.33  1m04s left"),
        (20, "3/40  loss 5.33"),
    ],
)  # fmt: skip
def test_a_narrower_terminal_gets_a_shorter_form(columns: int, line: str) -> None:
    assert EARLY.fitted(columns) == line


def test_80_columns_have_room_for_every_number_of_a_long_run() -> None:
    line = LONG.fitted(80)
    assert line == "120000/1000000  loss 12.5  lr 2.3e-04  1.23M tok/s  103.0/110.0 GiB  12d6h left"
    assert len(line) <= 80


@pytest.mark.parametrize("columns", [20, 40, 80, 120])
def test_a_terminal_shows_it_without_an_ellipsis(tmp_path: Path, columns: int) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=columns)
    with Log(tmp_path, rank=0, planned_bytes=400 * MIB, total_steps=40, console=console) as log:
        for step in range(1, 4):
            log.step(step, result(), 0.5)
        log._progress.refresh()
    assert "3/40" in written.getvalue() and "loss 2.5" in written.getvalue()
    assert "…" not in written.getvalue()
