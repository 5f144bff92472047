"""Counts at the end: how many faults there were, and what became of the runs."""

from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line, where faults were survived."""
    passed = terminalreporter.stats.get("passed", [])
    survived = [int(value) for report in passed for name, value in report.user_properties if name == "faults survived"]
    if survived:
        failed = len(terminalreporter.stats.get("failed", []))
        terminalreporter.write_line(
            f"{sum(survived)} faults in {len(survived)} strategies: no hang, weights equal bit for bit; {failed} failed"
        )


@pytest.fixture
def survived(record_property: Any) -> Any:
    """Call it with a number of faults."""
    return lambda number: record_property("faults survived", number)
