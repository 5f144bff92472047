"""The page of a plan has Python's numbers: what is embedded is what a search finds, and it shows what is embedded."""

import random
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.planner import _plans
from frugal.planning.plan import Plan
from frugal.planning.search.candidate import Candidate
from frugal.planning.search.search import Search
from frugal.tools.plan_page.answers import GridAnswer, answers, chosen_micro_batches
from frugal.tools.plan_page.page import plan_page, write_page
from frugal.units import GIB, MIB, format_bytes, format_seconds
from tests.browser import Browser

MODEL = "distilgpt2"  # its traces are shipped, so no worker is started
FLAGS = {"gpus": "gpus", "card": "mem", "length": "seq_len", "batch": "global_batch"}
"""The setting of each axis."""


def drafted(**settings: Any) -> Plan:
    """The plan before its dry run: nothing is started."""
    return next(_plans(*understand({"model": MODEL} | settings)))


def answered(plan: Plan, *, in_full: bool = False) -> dict[str, Any]:
    """Return what the page of a plan looks up, as it reads it."""
    with closing(workers()) as pool:
        made = answers(plan, partial(DryRunSource, pool=pool, will_dry_run=False), in_full=in_full)
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))
    return read


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """A plan on 4 cards of 2 GiB, where not all fits, as it is drafted, and a cache in which nothing is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield drafted(gpus=4, mem="2G", loss="tiled")


@pytest.fixture(scope="module")
def computed(plan: Plan) -> dict[str, Any]:
    return answered(plan)


@pytest.fixture(scope="module")
def page(plan: Plan, computed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(plan_page(plan, computed, helps="5 GPUs: a step of 1.5 s, 16 % less (predicted)"))
    return path


def settings_of(grid: dict[str, Any]) -> list[tuple[dict[str, int], int]]:
    """All settings of a grid, in the order of its entries: a value of each axis, and the number of the strategy."""
    names = list(grid["axes"])
    settings = product(*(grid["axes"][name]["values"] for name in names), range(len(grid["strategies"])))
    return [(dict(zip(names, values, strict=True)), number) for *values, number in settings]


def answer_of(grid: dict[str, Any], entry: int) -> GridAnswer:
    """The answer in an entry."""
    return msgspec.convert(grid["answers"][grid["entries"][entry]], GridAnswer)


@pytest.fixture
def opened(page: Path, browser: Browser) -> Browser:
    browser.open(page)
    return browser


def said(browser: Browser) -> str:
    text: str = browser.run("return document.getElementById('answer').textContent")
    return text


def asked(browser: Browser, page: Path, **choice: int) -> str:
    """Return what the page says of a choice in its address."""
    browser.driver.get("about:blank")
    browser.driver.get(f"{page.as_uri()}#" + "&".join(f"{name}={value}" for name, value in choice.items()))
    return said(browser)


# Its numbers


def test_the_grid_has_every_strategy_of_the_table_and_no_hole(plan: Plan, computed: dict[str, Any]) -> None:
    grid = computed["grid"]
    names = [each["name"] for each in grid["strategies"]]
    assert {str(strategy) for strategy, _ in chosen_micro_batches(plan)} == set(names)
    traits = ("stage", "checkpointing", "loss", "offload")
    assert len(set(names)) == len({tuple(map(each.get, traits)) for each in grid["strategies"]}) == len(names)
    assert len(grid["entries"]) == prod(len(axis["values"]) for axis in grid["axes"].values()) * len(names)
    for entry in range(len(grid["entries"])):
        answer = answer_of(grid, entry)
        assert answer.total > answer.context and (answer.headroom >= 0) == answer.fits
        assert all(map(bool, (answer.seconds, answer.batch, answer.step, answer.binds))) == answer.fits
    assert all(len(grid["axes"][name]["values"]) >= 3 for name in ("gpus", "card", "batch"))
    assert all(axis["why"] for axis in grid["axes"].values() if len(axis["values"]) == 1)


def searched(**settings: Any) -> Candidate:
    """Return what a search finds: the fastest that fits, or the smallest shortfall."""
    request, cluster, *_ = understand({"model": MODEL} | settings)
    with closing(workers()) as pool, DryRunSource(request, cluster, pool=pool, will_dry_run=False) as source:
        found = Search(request, cluster, source).predicted()
    assert found is not None
    return found


def is_found_by_a_search(plan: Plan, grid: dict[str, Any], entry: int) -> bool:
    """Compare an entry with what a search for its setting finds, pinned to its strategy; False: it found another, with
    small buckets, which no flag pins."""
    values, number = settings_of(grid)[entry]
    flags = grid["strategies"][number]["flags"].split()
    pins: dict[str, Any] = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)
    }
    pins["zero_stage"] = int(pins["zero_stage"])
    settings = {FLAGS[name]: value for name, value in values.items()} | {
        "mem": f"{values['card'] / GIB:g}G",
        "mlp": "plain",
    }
    answer, found, texts = answer_of(grid, entry), searched(**settings | pins), grid["texts"]
    if str(found.strategy) != grid["strategies"][number]["name"]:
        assert found.strategy.small_buckets or "small buckets" in grid["strategies"][number]["name"]
        return False
    memory = found.memory
    assert memory is not None and answer.fits == found.fits
    if answer.is_bound:  # a search may have looked further
        assert answer.total <= memory.total_bytes
        return True
    assert answer.total == pytest.approx(memory.total_bytes, rel=0 if values["card"] == plan.device_bytes else 0.003)
    assert answer.headroom == memory.usable_bytes + memory.context - answer.total
    if found.batch is not None and values["card"] == plan.device_bytes:
        assert texts[answer.batch] == found.batch.arithmetic("GPU", "tokens", values["length"])
        assert texts[answer.step].startswith(f"{format_seconds(found.seconds)} estimated")
        assert answer.seconds == pytest.approx(found.seconds, rel=1e-3)
        parts = [getattr(memory, name) / MIB for name in memory.CATEGORIES[:-2]]
        assert grid["parts"][answer.parts] == pytest.approx(parts, abs=0.5)
    return True


def test_answers_are_what_a_search_finds_under_the_strategy(plan: Plan, computed: dict[str, Any]) -> None:
    """Compare answers for several strategies, numbers of GPUs, cards and global batches."""
    grid, chance = computed["grid"], random.Random(20)
    own_card = [entry for entry, (values, _) in enumerate(settings_of(grid)) if values["card"] == plan.device_bytes]
    entries = (*chance.sample(own_card, 10), *chance.sample(range(len(grid["entries"])), 4))
    assert sum(is_found_by_a_search(plan, grid, entry) for entry in entries) >= 5


@pytest.mark.exhaustive
def test_answers_in_full_are_what_a_search_finds() -> None:
    """With other lengths, and all that may be offloaded, under the buckets that a search begins with."""
    plan = drafted(gpus=2, mem="2G")
    grid, chance = answered(plan, in_full=True)["grid"], random.Random(21)
    assert len(grid["axes"]["length"]["values"]) >= 2
    assert {each["offload"] for each in grid["strategies"]} >= {"nothing", "optimizer in host memory"}
    names = [grid["strategies"][number]["name"] for _, number in settings_of(grid)]
    usual = [entry for entry, name in enumerate(names) if "small buckets" not in name]
    assert sum(is_found_by_a_search(plan, grid, entry) for entry in chance.sample(usual, 20)) >= 15
    assert {answer_of(grid, entry).fits for entry in range(len(grid["entries"]))} == {False, True}


def test_the_plan_s_own_setting_has_its_verdict(plan: Plan, computed: dict[str, Any]) -> None:
    grid = computed["grid"]
    own = {"gpus": 4, "card": plan.device_bytes, "length": plan.request.seq_len, "batch": plan.batch.global_batch}
    number = [each["name"] for each in grid["strategies"]].index(str(plan.strategy))
    answer, rows = answer_of(grid, settings_of(grid).index((own, number))), dict(plan.verdict)
    assert (answer.total, answer.headroom) == (plan.memory.total_bytes, plan.memory.headroom_bytes)
    assert [grid["texts"][each] for each in (answer.batch, answer.step, answer.binds)] == [
        plan.arithmetic, rows["step"], rows["binds"],
    ]  # fmt: skip


def test_what_contradicts_a_pin_of_the_plan_says_so() -> None:
    plan = drafted(gpus=4, mem="12G", micro_batch=4, accumulation_steps=32)
    grid = answered(plan)["grid"]
    impossible = [answer_of(grid, entry) for entry in range(len(grid["entries"])) if not answer_of(grid, entry).total]
    assert {grid["texts"][each.batch].split(" is ")[0] for each in impossible} >= {
        "--micro-batch 4 --accumulation-steps 32 on 2 GPUs"
    }


def test_timelines_have_the_peaks_of_the_plan_s_strategies(plan: Plan, computed: dict[str, Any]) -> None:
    timelines = computed["timelines"]
    assert len(timelines) == 1 + len(plan.rejected) and all(timelines)
    own = timelines[0]
    assert own["parts"] == {name: getattr(plan.memory, name) for name in plan.memory.CATEGORIES}
    assert (own["total"], own["peak"]["phase"]) == (plan.memory.total_bytes, plan.memory.phase)
    assert [name for name, _ in own["marks"]][-1] == "optimizer step"
    grid = computed["grid"]
    names = [each["name"] for each in grid["strategies"]]
    own = {"gpus": 4, "card": plan.device_bytes, "length": plan.request.seq_len, "batch": plan.batch.global_batch}
    for (strategy, _), drawn in zip(chosen_micro_batches(plan), timelines, strict=True):
        answer = answer_of(grid, settings_of(grid).index((own, names.index(str(strategy)))))
        assert drawn["total"] == answer.total, "the chart is of the answer for the plan's settings"
        assert f" {drawn['microBatch']} " in grid["texts"][answer.batch] or not answer.fits
        assert len(drawn["step"]["x"]) <= 400 + len(drawn["marks"])
        for part in (drawn["step"], drawn["zoom"]):
            assert part["x"] == sorted(part["x"]) and max(part["modules"]) < len(drawn["names"])
            at = part["x"].index(drawn["peak"]["event"])
            live = [values if isinstance(values, int) else values[at] for values in part["live"].values()]
            assert drawn["unit"] * sum(live) == pytest.approx(drawn["peak"]["bytes"], rel=0.005)
        zoom = drawn["zoom"]["x"]
        assert len(zoom) == zoom[-1] - zoom[0] + 1 > 40, "every event near the peak"
        assert max(drawn["phases"].values()) == drawn["peak"]["bytes"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [{"model": "llama-3.1-8b", "gpus": 4, "mem": "80G"}, {"gpus": 2, "mem": "4G", "offload": "optimizer:0.5"}],
)
def test_layers_that_differ_and_an_optimizer_in_part_on_the_host_have_answers(settings: dict[str, Any]) -> None:
    plan = drafted(**settings)
    grid = answered(plan)["grid"]
    own = {"gpus": settings["gpus"], "card": plan.device_bytes, "length": plan.request.seq_len, "batch": 512}
    number = [each["name"] for each in grid["strategies"]].index(str(plan.strategy))
    answer = answer_of(grid, settings_of(grid).index((own, number)))
    assert answer.total == plan.memory.total_bytes
    assert answer.seconds == pytest.approx(plan.time.total_seconds, rel=1e-3)
    assert len(grid["strategies"]) == 1 + len(plan.rejected)


# The page


def test_it_opens_with_the_plan_without_a_network_and_without_an_error(
    plan: Plan, page: Path, browser: Browser
) -> None:
    browser.open(page)
    text = said(browser)
    assert text.startswith("fits The plan's own settings")
    assert f"{format_bytes(plan.memory.total_bytes)} of 2.00 GiB on each GPU" in text
    for name, words in plan.verdict:
        assert words in browser.run("return document.querySelector('.verdict').textContent")
        assert words in text or name in ("runs", "rate"), "the answer has the form of the verdict"
    assert plan.arithmetic in text
    assert plan.digest in browser.run("return document.querySelector('footer').textContent")
    assert browser.run("return document.querySelector('h1').textContent") == f"fits {MODEL} on 4 GPUs of 2.00 GiB"
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_it_says_what_is_embedded_for_drawn_choices(computed: dict[str, Any], page: Path, browser: Browser) -> None:
    grid, chance = computed["grid"], random.Random(17)
    fitting = [entry for entry in range(len(grid["entries"])) if answer_of(grid, entry).fits]
    others = sorted(set(range(len(grid["entries"]))) - set(fitting))
    for entry in (*chance.sample(fitting, 2), *chance.sample(others, 2)):
        values, number = settings_of(grid)[entry]
        text, answer = asked(browser, page, **values, strategy=number), answer_of(grid, entry)
        least = "at least " if answer.is_bound else ""
        room = (
            f"{format_bytes(answer.headroom)} of headroom"
            if answer.fits
            else f"{least}{format_bytes(-answer.headroom)} short"
        )
        assert text.startswith("fits " if answer.fits else "does not fit ")
        assert f"{least}{format_bytes(answer.total)} of {format_bytes(values['card'])} on each GPU, {room}" in text
        for words in (answer.batch, answer.step, answer.binds):
            assert grid["texts"][words] in text
        assert (f"{format_seconds(answer.seconds)} estimated" in text) == answer.fits
        assert grid["strategies"][number]["flags"] in text
        spoken = browser.run("return document.getElementById('spoken').textContent")
        assert format_bytes(answer.total) in spoken
    assert browser.complaints() == []


def test_what_cannot_be_chosen_says_why_and_what_computes_it(
    computed: dict[str, Any], page: Path, browser: Browser
) -> None:
    grid = computed["grid"]
    browser.open(page)
    states = browser.run(
        "return [...document.querySelectorAll('#controls input, #controls select')].map(each =>"
        " [each.id, each.disabled, document.getElementById(each.getAttribute('aria-describedby')).innerText])"
    )
    disabled = {name: why for name, is_disabled, why in states if is_disabled}
    assert set(disabled) == {"length", "offload"} and all("--html FILE" in why for why in disabled.values())
    assert not any(why for name, is_disabled, why in states if not is_disabled)
    covers = browser.run("return document.querySelector('.settings').textContent")
    assert f"{len(grid['entries'])} answers" in covers and "--html FILE" in covers


def without(grid: dict[str, Any], stage: str, checkpointing: str) -> dict[str, Any]:
    """The grid less the strategies of a stage and a mode."""
    number = len(grid["strategies"])
    kept = [
        i
        for i, each in enumerate(grid["strategies"])
        if (each["stage"], each["checkpointing"]) != (stage, checkpointing)
    ]
    entries = [entry for place, entry in enumerate(grid["entries"]) if place % number in kept]
    return grid | {"entries": entries, "strategies": [grid["strategies"][i] for i in kept]}


def test_a_selection_that_no_strategy_has_is_disabled_and_says_what_it_needs(
    plan: Plan, computed: dict[str, Any], tmp_path: Path, browser: Browser
) -> None:
    path = tmp_path / "plan.html"
    path.write_text(plan_page(plan, computed | {"grid": without(computed["grid"], "ZeRO-3", "full")}))
    options = (
        "return Object.fromEntries(['stage', 'checkpointing'].flatMap(name =>"
        " [...document.getElementById(name).options].map(each => [each.value, [each.disabled, each.textContent]])))"
    )
    select = (
        "const select = document.getElementById(arguments[0]); select.value = arguments[1];"
        "select.dispatchEvent(new Event('change'))"
    )
    browser.open(path)
    assert browser.run(options)["ZeRO-3"] == [True, "ZeRO-3 (only with activation checkpointing off)"]
    browser.run(select, "checkpointing", "off")
    assert browser.run(options)["ZeRO-3"] == [False, "ZeRO-3"]
    browser.run(select, "stage", "ZeRO-3")
    assert browser.run(options)["full"] == [True, "full (only with ZeRO-2)"]
    assert "ZeRO-3, activation checkpointing off" in said(browser)
    assert browser.complaints() == []


def test_every_strategy_that_was_weighed_is_in_the_table_and_shows_its_timeline(
    plan: Plan, computed: dict[str, Any], opened: Browser
) -> None:
    rows = opened.run(
        "return [...document.querySelectorAll('#strategies ~ .scrolls tbody tr')].map("
        "row => [...row.children].map(each => each.textContent))"
    )
    assert len(rows) == 1 + len(plan.rejected)
    assert rows[0][2] == "chosen" and all(row[2] for row in rows)
    opened.run("document.querySelectorAll('#strategies ~ .scrolls button')[3].click()")
    shown = opened.run("return document.getElementById('shown').textContent")
    assert f"{plan.rejected[2].strategy}, micro-batch {computed['timelines'][3]['microBatch']}" in shown


def test_controls_answer_to_the_keyboard_in_their_order_and_are_read_aloud(opened: Browser) -> None:
    from selenium.webdriver import Keys

    opened.run("document.activeElement.blur(); scrollTo(0, 0)")
    reached: list[str] = []
    for _ in range(12):
        opened.press(Keys.TAB)
        name, outline = opened.run(
            "const each = document.activeElement; return [each.id || each.value || each.tagName,"
            " parseFloat(getComputedStyle(each).outlineWidth)]"
        )
        reached.append(name)
        assert outline >= 2, f"the focus is seen on {name}"
    enabled = opened.run(
        "return [...document.querySelectorAll('#controls input, #controls select')]"
        ".filter(each => !each.disabled).map(each => each.id)"
    )
    assert [name for name in reached if name in enabled] == enabled
    assert reached.index("theme") < reached.index("step") < reached.index("back") < reached.index(enabled[0])
    before, labels = said(opened), {}
    for name in ("gpus", "card", "batch"):
        opened.run("document.getElementById(arguments[0]).focus()", name)
        opened.press(Keys.ARROW_RIGHT)
        labels[name] = opened.run(
            "const slider = document.getElementById(arguments[0]);"
            "return [slider.labels[0].textContent, slider.getAttribute('aria-valuetext')]",
            name,
        )
        after = said(opened)
        assert after != before
        before = after
    assert labels["gpus"] == ["GPUs 8 GPUs", "8 GPUs"] and labels["batch"] == [
        "Global batch 1024 samples",
        "1024 samples",
    ]
    assert labels["card"][0] == f"Memory {labels['card'][1]}"
    role, address = opened.run("return [document.getElementById('spoken').getAttribute('role'), location.href]")
    assert role == "status"
    opened.driver.get("about:blank")
    opened.driver.get(address)
    assert said(opened) == after, "the address keeps what was asked"
    assert opened.complaints() == []


def test_the_chart_shows_the_step_the_peak_and_the_start(opened: Browser) -> None:
    pictures = set()
    for view in ("step", "peak", "start"):
        opened.run("document.querySelector(`input[value=${arguments[0]}]`).click()", view)
        pictures.add(opened.run("return document.querySelector('#memory canvas').toDataURL()"))
    assert len(pictures) == 3
    assert opened.complaints() == []


MEASURES = """
const seen = (each) => each.checkVisibility() && each.getBoundingClientRect().width > 1;
const name = (each) => each.id || each.textContent.trim().slice(0, 30) || each.value || each.tagName;
const box = (each) => {
  const range = document.createRange();
  range.selectNodeContents(each);
  const { left, top, right, bottom } = (each.matches('h1, h2') ? range : each).getBoundingClientRect();
  return [name(each), [left, top, right, bottom]];
};
const boxes = (selector) => [...document.querySelectorAll(selector)].filter(seen).map(box);
"""
"""What a script of the layout tests begins with."""


@pytest.mark.parametrize("dark", [False, True])
def test_verdict_chart_controls_and_answer_are_on_one_screen(page: Path, browser: Browser, dark: bool) -> None:
    browser.open(page, width=1280, height=800, dark=dark)
    places = "return boxes('.verdict, #memory .uplot, .views, #controls, #answer')"
    assert len(browser.run(MEASURES + places)) == 5
    for name, (left, top, right, bottom) in browser.run(MEASURES + places):
        assert 0 <= left < right <= 1280 and 0 <= top < bottom <= 800, name
    assert browser.run("return document.documentElement.scrollWidth") <= 1280


@pytest.mark.parametrize("width", [390, 1000, 1232])
def test_nothing_overlaps_or_scrolls_sideways_and_targets_are_24_pixels(
    page: Path, browser: Browser, width: int
) -> None:
    browser.open(page, width=width, height=844)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    targets = browser.run(
        MEASURES + "return boxes('button, input:not([type=radio]), .views label, select, summary, a')"
    )
    assert len(targets) > 15
    for name, (left, top, right, bottom) in targets:
        assert right - left >= 24 and bottom - top >= 24, name
    texts = "header > *, h1, h2, .parts span, .verdict-rows dt, .verdict-rows dd, .views label, .controls label, .why"
    others = "#back, #shown, .bar-of-memory, .controls input, .controls select, #memory .uplot, .legend li"
    leaves = browser.run(MEASURES + "return boxes(arguments[0])", f"{texts}, {others}")
    overlaps = [
        (one, other)
        for i, (one, (a, b, c, d)) in enumerate(leaves)
        for other, (e, f, g, h) in leaves[:i]
        if min(c, g) - max(a, e) > 1 and min(d, h) - max(b, f) > 1
    ]
    assert overlaps == [] and len(leaves) > 40


CONTRASTS = """
const pen = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const luminance = (colours) => {
  for (const each of colours) {
    pen.fillStyle = each;
    pen.fillRect(0, 0, 1, 1);
  }
  const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((value) => linear(value / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const each = walker.currentNode.parentElement, behind = [];
  if (!walker.currentNode.data.trim() || each.closest('script, :disabled') || !seen(each)) continue;
  for (let at = each; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
  const both = [luminance(['#fff', ...behind]), luminance(['#fff', ...behind, getComputedStyle(each).color])];
  found.push([name(each), (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05)]);
}
return found;
"""
"""The contrast of each text with what is behind it, by WCAG's formula."""


@pytest.mark.parametrize("dark", [False, True])
def test_texts_have_a_contrast_of_four_and_a_half(page: Path, browser: Browser, dark: bool) -> None:
    browser.open(page, dark=dark)
    contrasts = browser.run(MEASURES + CONTRASTS)
    assert len(contrasts) > 100 and [(name, ratio) for name, ratio in contrasts if ratio < 4.5] == []


def test_the_tables_say_the_same_as_the_chart(plan: Plan, opened: Browser) -> None:
    rows = opened.run(
        "return [...document.querySelectorAll('#breakdown tbody tr')].map("
        "row => [row.children[0].textContent, Number(row.children[2].textContent)])"
    )
    sizes, memory = dict(rows), plan.memory
    assert sizes.pop("total") == memory.total_bytes
    assert sizes.pop("may be used") == memory.usable_bytes + memory.context
    expected = {name: getattr(memory, name) for name in memory.CATEGORIES}
    assert {name.split(" ")[1]: size for name, size in sizes.items()} == {
        k: size for k, size in expected.items() if size
    }
    assert opened.run("return document.querySelectorAll('#phases tbody tr').length") >= 3


def test_without_answers_or_one_kind_of_card_there_are_charts_but_no_sliders(
    plan: Plan, tmp_path: Path, browser: Browser
) -> None:
    path = write_page(drafted(mem="12G,24G"), tmp_path / "plan.html", in_full=False)
    browser.open(path)
    assert browser.run("return document.querySelector('#memory canvas') && !document.getElementById('controls')")
    assert "The devices differ" in browser.run("return document.querySelector('.desk').textContent")
    assert browser.complaints() == []
    path.write_text(plan_page(plan, {"grid": None, "timelines": [None]}))
    browser.open(path)
    assert "Only dry runs can tell" in browser.run("return document.querySelector('.desk').textContent")
    assert browser.run("return document.querySelector('#strategies canvas') !== null")
    assert browser.complaints() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{"gpus": 8, "mem": "80G"}, {"gpus": 4, "mem": "24G"}])
def test_the_page_beside_the_plan_of_an_8b_model_is_light_and_has_all_its_strategies(
    settings: dict[str, Any], tmp_path: Path, browser: Browser
) -> None:
    plan = drafted(model="llama-3.1-8b", **settings)
    path = write_page(plan, tmp_path / "plan.html", in_full=False)
    assert path.stat().st_size < 600_000
    browser.open(path)
    assert said(browser).startswith("fits ")
    names = browser.run(
        "return JSON.parse(document.getElementById('data-answers').textContent).grid.strategies.map(({name}) => name)"
    )
    assert set(names) == {str(strategy) for strategy, _ in chosen_micro_batches(plan)}
