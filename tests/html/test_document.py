"""Pages are one file each: nothing is asked of a network, no text becomes a script, light and dark, keyboard."""

import re
import tomllib
from pathlib import Path

import pytest

from frugal.html.document import document, element, figure, joined, json_in_html, table
from tests.browser import Browser

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">'\"&<!--"
"""What a model, a path or a log may be called."""

CHART = """
frugal.chart(document.getElementById("chart"), {
  x: [0, 1, 2], stacked: true, levels: [{label: "limit", value: 5}], marks: [{x: 1, label: "backward"}],
  note: {x: 1, y: 4, lines: ["peak"]}, hover: (i) => `point ${i}`,
  series: [{label: "one", values: [1, 2, 1], colour: 1, letter: "A"}, {label: "two", values: [2, 2, 2], colour: 2}],
});
document.getElementById("said").textContent = frugal.data("words").text;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything that pages have, and hostile texts in it."""
    body = joined(
        element("h1", HOSTILE, title=HOSTILE),
        element("p", id="said"),
        figure(
            "chart", "A chart", says=HOSTILE, below=table("Its numbers", ["name", "n"], [[HOSTILE, 3]], numbers=[1])
        ),
    )
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(document(HOSTILE, body, header=HOSTILE, data={"words": {"text": HOSTILE}}, scripts=[CHART]))
    return path


def test_a_page_asks_for_nothing_but_itself_and_no_text_becomes_a_script(page: Path, browser: Browser) -> None:
    browser.open(page)
    assert browser.driver.title == browser.run("return document.querySelector('h1').textContent") == HOSTILE
    assert browser.run("return document.getElementById('said').textContent") == HOSTILE
    assert browser.run("return document.querySelectorAll('img, h1 *').length") == 0
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_the_policy_refuses_what_would_be_asked_of_a_network_and_scripts_of_others(
    page: Path, browser: Browser
) -> None:
    browser.open(page)
    assert browser.run("return fetch('https://example.com/').then(() => 'answered', () => 'refused')") == "refused"
    browser.run(
        "const script = document.createElement('script');"
        "script.textContent = 'document.title = `taken`'; document.body.append(script)"
    )
    assert browser.driver.title == HOSTILE
    assert [line for line in browser.complaints() if "Content Security Policy" in line]


def test_a_chart_is_drawn_in_the_colours_of_the_theme_that_the_button_changes_by_keyboard(
    page: Path, browser: Browser
) -> None:
    from selenium.webdriver import Keys

    browser.open(page, dark=True)
    shown = (
        "const pixel = document.querySelector('.u-wrap canvas').getContext('2d').getImageData(90, 200, 1, 1).data;"
        "return [getComputedStyle(document.body).backgroundColor, pixel.join(),"
        " document.getElementById('theme').getAttribute('aria-pressed')]"
    )
    dark = browser.run(shown)
    browser.press(Keys.TAB, Keys.ENTER)
    light = browser.run(shown)
    assert (dark[2], light[2]) == ("true", "false")
    assert light[0] == "rgb(255, 255, 255)" != dark[0] and light[1] != dark[1]
    browser.press(Keys.ENTER)
    assert browser.run(shown) == dark
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [400, 1280])
def test_a_page_is_as_wide_as_its_window_and_its_chart_with_it(page: Path, browser: Browser, width: int) -> None:
    browser.open(page, width=width)
    wide, chart = browser.run(
        "return [document.documentElement.scrollWidth, document.querySelector('.uplot').clientWidth]"
    )
    assert wide <= width and width * 0.75 < chart < width


def test_what_is_said_of_a_chart_and_a_table_is_there_for_who_does_not_see_them(page: Path, browser: Browser) -> None:
    browser.open(page)
    assert browser.run("return document.getElementById('chart').getAttribute('aria-label')") == HOSTILE
    assert browser.run("return document.querySelector('tbody th').textContent") == HOSTILE
    assert browser.run("return document.querySelector('.legend').textContent") == "A onetwo"


def test_json_in_a_page_ends_no_element_and_stays_what_it_is() -> None:
    import msgspec

    written = json_in_html({"text": HOSTILE, "numbers": [1.5, None, 2**40]})
    assert not re.search("[<>&]", written)
    assert msgspec.json.decode(written) == {"text": HOSTILE, "numbers": [1.5, None, 2**40]}


def test_the_drawing_library_is_in_a_page_with_its_licence(page: Path) -> None:
    text = page.read_text()
    assert "Copyright (c) 2022 Leon Sorokin" in text and "Permission is hereby granted, free of charge" in text
    assert text.index("Leon Sorokin") < text.index("uPlot=function")


def test_a_wheel_contains_what_pages_are_made_of() -> None:
    root = Path(__file__).parents[2] / "frugal"
    settings = tomllib.loads((root.parent / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["frugal"]
    packaged = {path for pattern in patterns for path in root.glob(pattern)}
    pieces = [path for path in (root / "html").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert len(pieces) >= 6 and set(pieces) <= packaged
