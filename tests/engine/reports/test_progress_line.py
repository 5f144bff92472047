"""The line that moves leaves out numbers on a narrow terminal, and is never cut."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from frugal.engine.reports.metrics import Log, PlannedMemory, progress_lines
from tests.engine.reports.test_metrics import result

MIB = 1 << 20


def test_its_forms_get_shorter_and_keep_the_loss_and_the_time_left() -> None:
    lines = progress_lines(
        3, 40, replace(result(), loss=5.3314, learning_rate=2e-4), tokens_per_second=4960.4, targets_per_second=4951.3,
        seconds_left=64.2, measured_bytes=None, planned_bytes=30 * MIB,
    )  # fmt: skip
    assert lines[0] == (
        "step 3/40  ━───────────────────  loss 5.3314  1 min 04 s left  4,960 tokens/s, 4,951 target tokens/s  "
        "memory 30.0 MiB  lr 2.00e-04"
    )
    assert lines[-2:] == ["step 3/40  loss 5.3314  1 min 04 s left", "step 3/40  loss 5.3314"]
    assert sorted(lines, key=len, reverse=True) == lines


@pytest.mark.parametrize("columns", [30, 80, 120])
def test_a_terminal_shows_it_without_an_ellipsis(tmp_path: Path, columns: int) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=columns)
    with Log(tmp_path, rank=0, planned=PlannedMemory(400 * MIB), total_steps=40, console=console) as log:
        for step in range(1, 4):
            log.step(step, result(), 0.5)
        log._line.refresh()
        log.say("this stays")
    assert "this stays\n" in written.getvalue()
    assert "step 3/40" in written.getvalue() and "loss 2.5" in written.getvalue()
    assert "…" not in written.getvalue()
