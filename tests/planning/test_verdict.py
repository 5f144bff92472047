"""A plan in a few lines."""

from html.parser import HTMLParser

import pytest

from frugal.config.schema import understand
from frugal.dryrun.planner import make_plan
from frugal.planning.plan import Plan
from frugal.units import format_bytes
from tests.planning.synthetic import dry_running


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(*understand({"gpus": 4, "mem": "12G", "global_batch": 64}), dry_run=dry_running())


class _Bar(HTMLParser):
    """The widths of the pieces, in percent, and which elements are open at the end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.widths: list[float] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        style = dict(attributes).get("style") or ""
        self.widths += [float(part[6:-1]) for part in style.split(";") if part.startswith("width:")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_printed_plan_is_the_verdict_in_a_few_lines(plan: Plan) -> None:
    lines = str(plan).splitlines()
    assert lines[0] == plan.arithmetic
    assert format_bytes(plan.memory.total_bytes) in str(plan) and str(plan.strategy) in str(plan)
    assert len(lines) == 6 + len(plan.warnings)


def test_the_bar_of_a_notebook_is_as_full_as_the_card(plan: Plan) -> None:
    bar = _Bar(plan._repr_html_())
    assert not bar.open
    device = plan.cluster.devices[0].memory_bytes
    assert sum(bar.widths) == pytest.approx(100 * plan.memory.total_bytes / device, abs=1)
