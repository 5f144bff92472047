"""The page in a real browser: what is drawn is what was recorded; keyboard, themes, tables, no network."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.runs import records
from frugal.report import after_run
from frugal.report.page import page
from frugal.report.run import read_run
from tests.browser import Browser
from tests.report.recorded import interrupted, plan, train

CHARTS = ["loss", "speed", "rate", "padding", "norm", "course"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a recovery and a restart, and its page."""
    folder = interrupted(tmp_path_factory.mktemp("page") / "run")
    assert after_run.write_page(folder) is None
    return folder


def drawn(browser: Browser, chart: str) -> dict[str, Any]:
    spec: dict[str, Any] = browser.run("return frugal.data('charts')[arguments[0]]", chart)
    return spec


def test_curves_are_those_of_the_records(folder: Path, browser: Browser) -> None:
    browser.open(folder / "report.html")
    steps = [record for record in records(folder) if record["event"] == "step"]
    evaluations = {record["step"]: record["loss"] for record in records(folder) if record["event"] == "evaluation"}
    loss = drawn(browser, "loss")
    assert loss["x"] == [record["step"] for record in steps]
    assert loss["series"][0]["values"] == [record["loss"] for record in steps]
    assert loss["series"][1]["values"] == [evaluations.get(record["step"]) for record in steps]
    for chart, value in (("speed", "tokens_per_second"), ("rate", "learning_rate"), ("norm", "grad_norm")):
        assert drawn(browser, chart)["series"][0]["values"] == [record[value] for record in steps], chart
    padding = [1 - record["tokens"] / record["positions"] for record in steps]
    assert drawn(browser, "padding")["series"][0]["values"] == padding
    assert [(mark["x"], mark["label"]) for mark in loss["marks"]] == [(6, "out of memory"), (8, "restart")]


def test_all_charts_are_drawn_without_a_complaint_or_a_request(folder: Path, browser: Browser) -> None:
    browser.open(folder / "report.html", dark=True)
    sizes = browser.run("return [...document.querySelectorAll('.chart')].map(each => [each.id,"
                        " each.querySelector('.u-wrap canvas').width, each.getAttribute('aria-label')])")  # fmt: skip
    assert sorted(name for name, _, _ in sizes) == sorted(CHARTS)
    assert all(width > 200 and "lowest" in label for _, width, label in sizes)
    assert browser.requests() == [(folder / "report.html").as_uri()]
    assert browser.complaints() == []


def test_the_course_goes_back_where_the_run_went_back(folder: Path, browser: Browser) -> None:
    browser.open(folder / "report.html")
    values = drawn(browser, "course")["series"][0]["values"]
    assert [fall for fall in pairwise(values) if fall[1] < fall[0]] == [(10, 8)]


def test_the_numbers_are_a_table_that_the_keyboard_opens(folder: Path, browser: Browser) -> None:
    from selenium.webdriver import Keys

    browser.open(folder / "report.html")
    browser.run(
        "[...document.querySelectorAll('summary')].find(each => each.textContent.startsWith('Numbers')).focus()"
    )
    browser.press(Keys.ENTER)
    rows = browser.run(
        "return [...document.querySelectorAll('details[open] tbody tr')]"
        ".map(row => [...row.children].map(each => each.innerText))"
    )
    last = [record for record in records(folder) if record["event"] == "step"][-1]
    assert len(rows) == 12
    assert rows[-1][:3] == ["12", f"{last['loss']:.4f}", f"{3.0 / 12:.4f}"]


def test_runs_side_by_side_share_a_chart_unless_their_units_differ(tmp_path: Path, browser: Browser) -> None:
    runs = [train(tmp_path / name, plan(), range(1, last)) for name, last in (("long", 13), ("short", 7))]
    other = train(tmp_path / "classes", plan("sequence-classification"), range(1, 13))
    path = tmp_path / "page.html"
    path.write_text(page([read_run(run) for run in runs]))
    browser.open(path)
    loss = drawn(browser, "loss")
    assert [series["label"] for series in loss["series"]] == ["long", "short"]
    assert loss["series"][1]["values"][6:] == [None] * 6
    path.write_text(page([read_run(run) for run in (*runs, other)]))
    browser.open(path)
    names = browser.run("return [...document.querySelectorAll('.chart')].map(each => each.id)")
    assert {"loss-0", "loss-1", "loss-2", "speed-2", "rate", "course"} <= set(names)
    assert browser.complaints() == []
