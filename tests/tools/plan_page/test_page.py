"""The page of a plan has Python's numbers: those embedded in it are `MemoryProfile`'s, and it shows those embedded."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.planner import _plans
from frugal.planning.batch import BatchPlan
from frugal.planning.cost import step_time
from frugal.planning.plan import Plan
from frugal.planning.strategy import Strategy, allowed_strategies
from frugal.planning.what_if import with_gpus, with_memory
from frugal.tools.plan_page.answers import answers
from frugal.tools.plan_page.make import write_page
from frugal.tools.plan_page.page import chosen_micro_batches, plan_page
from frugal.units import format_bytes, format_seconds
from tests.browser import Browser

MODEL = "distilgpt2"  # its traces are shipped, so no worker is started


def drafted(**settings: Any) -> Plan:
    """The plan before its dry run: nothing is started."""
    return next(_plans(*understand({"model": MODEL} | settings)))


def answered(plan: Plan, most_events: int) -> dict[str, Any]:
    """What the page of a plan looks up, as it reads it."""
    with closing(workers()) as pool:
        made = answers(plan, partial(DryRunSource, pool=pool, will_dry_run=False), most_events, only_known=True)
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))
    return read


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """A plan on 4 cards of 12 GiB, as it is drafted, and a cache in which nothing is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield drafted(gpus=4, mem="12G")


@pytest.fixture(scope="module")
def computed(plan: Plan) -> dict[str, Any]:
    return answered(plan, 600_000)


@pytest.fixture(scope="module")
def page(plan: Plan, computed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(plan_page(plan, computed, helps="5 GPUs: a step of 1.5 s, 16 % less (predicted)"))
    return path


@pytest.fixture
def opened(page: Path, browser: Browser) -> Browser:
    browser.open(page)
    return browser


def said(browser: Browser) -> str:
    text: str = browser.run("return document.getElementById('answer').textContent")
    return text


def asked(browser: Browser, page: Path, **choice: int) -> str:
    """What the page says of a choice in its address."""
    browser.driver.get("about:blank")
    browser.driver.get(f"{page.as_uri()}#" + "&".join(f"{name}={value}" for name, value in choice.items()))
    return said(browser)


# Its numbers


def weighed(plan: Plan, source: DryRunSource, name: str) -> Strategy:
    """A strategy by its name: one of the plan's on its own cluster, otherwise as the search makes it."""
    allowed = allowed_strategies(
        source.request, source.facts(), world_size=source.cluster.world_size, offload="none", on_gpus=True
    )
    own = (plan.strategy, *(each.strategy for each in plan.rejected)) if source.cluster == plan.cluster else ()
    return next(each for each in (*own, *allowed) if str(each) == name)


def test_all_answers_are_to_the_byte_those_of_memory_profiles(plan: Plan, computed: dict[str, Any]) -> None:
    """Of several strategies, numbers of GPUs, micro-batches and cards."""
    num_checked = 0
    with closing(workers()) as pool:
        for key, of_point in computed["answers"].items():
            gpus, seq_len, number, threads = map(int, key.split("/"))
            cards = [
                with_memory(with_gpus(plan.cluster, gpus), each["memory"]) for each in computed["devices"][str(gpus)]
            ]
            cards = [each for each in cards if each.devices[0].resident_threads == threads]
            own = plan.cluster.devices[0].memory_bytes
            cluster = min(cards, key=lambda each: abs(each.devices[0].memory_bytes - own))
            device = cluster.devices[0]
            request = replace(plan.request, seq_len=seq_len)
            with DryRunSource(request, cluster, pool=pool, will_dry_run=False) as source:
                strategy = weighed(plan, source, computed["strategies"][number]["name"])
                for micro_batch, answer in ((int(size), answer) for size, answer in of_point.items()):
                    batch = BatchPlan.of(plan.batch.global_batch, (micro_batch,) * gpus).tightened()
                    profile = source.profile(strategy, accumulates=batch.accumulation_steps > 1)
                    memory = profile.memory(micro_batch, device)
                    expected = step_time(profile.costs, strategy, batch, cluster, request).total_seconds
                    assert answer["needed"] == memory.total_bytes - memory.context
                    assert answer["host"] == memory.host_bytes_per_node
                    assert answer["cut"] == batch.arithmetic("GPU", plan.counted, seq_len)
                    assert answer["seconds"] == pytest.approx(expected, rel=1e-12)
                    num_checked += 1
                    other = random.Random(num_checked).choice(cards).devices[0]
                    on_other = profile.memory(micro_batch, other)
                    assert answer["needed"] == pytest.approx(on_other.total_bytes - on_other.context, rel=0.003)
                if device.memory_bytes == own:
                    assert computed["largest"][key] == profile_largest(source, strategy, gpus)
    assert num_checked >= 50
    assert len({key.split("/")[0] for key in computed["answers"]}) >= 2
    assert len({key.split("/")[3] for key in computed["answers"]}) >= 2


def profile_largest(source: DryRunSource, strategy: Strategy, gpus: int) -> int:
    """The largest micro-batch that fits, in several micro-steps or in a single one."""
    share = -(-source.request.batch_samples // gpus)
    device = source.cluster.devices[0]
    fits_at_once = source.profile(strategy, accumulates=False).fits(share, device)
    return share if fits_at_once else source.profile(strategy, accumulates=True).largest_micro_batch(device, share)


def test_timelines_have_the_peaks_of_the_plan_s_strategies(plan: Plan, computed: dict[str, Any]) -> None:
    timelines = computed["timelines"]
    assert len(timelines) == 1 + len(plan.rejected) and all(timelines)
    own = timelines[0]
    assert own["parts"] == {name: getattr(plan.memory, name) for name in plan.memory.CATEGORIES}
    assert (own["total"], own["peak"]["phase"]) == (plan.memory.total_bytes, plan.memory.phase)
    assert [name for name, _ in own["marks"]][-1] == "optimizer step"
    for (strategy, micro_batch), drawn in zip(chosen_micro_batches(plan), timelines, strict=True):
        row = next((each for each in plan.rejected if each.strategy == strategy and not each.is_bound), None)
        if row is not None and row.micro_batch == micro_batch:
            assert drawn["total"] == row.peak_bytes
        assert len(drawn["x"]) <= 400 + len(drawn["marks"]) and drawn["x"] == sorted(drawn["x"])
        at = drawn["x"].index(drawn["peak"]["event"])
        live = [values if isinstance(values, int) else values[at] for values in drawn["live"].values()]
        assert drawn["unit"] * sum(live) == pytest.approx(drawn["peak"]["bytes"], rel=0.005)
        assert max(drawn["phases"].values()) == drawn["peak"]["bytes"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [{"model": "llama-3.1-8b", "gpus": 4, "mem": "80G"}, {"gpus": 2, "mem": "4G", "offload": "optimizer:0.5"}],
)
def test_layers_that_differ_and_an_optimizer_in_part_on_the_host_have_answers(settings: dict[str, Any]) -> None:
    plan = drafted(**settings)
    found = answered(plan, 1)
    (own,) = found["answers"].values()
    size = str(next(chosen_micro_batches(plan))[1])
    assert own[size]["needed"] == plan.memory.total_bytes - plan.memory.context
    assert own[size]["seconds"] == pytest.approx(plan.time.total_seconds)
    assert found["strategies"][0]["name"] == str(plan.strategy)


# The page


def test_it_opens_with_the_plan_without_a_network_and_without_an_error(
    plan: Plan, page: Path, browser: Browser
) -> None:
    browser.open(page)
    text = said(browser)
    assert text.startswith(f"fits {format_bytes(plan.memory.total_bytes)} of 12.00 GiB")
    assert plan.arithmetic in text and format_seconds(plan.time.total_seconds) in text
    assert plan.digest in browser.run("return document.querySelector('footer').textContent")
    assert browser.run("return document.querySelector('h1').textContent").startswith(f"{MODEL} fits on 4 GPUs")
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_it_says_what_is_embedded_for_drawn_choices(
    plan: Plan, computed: dict[str, Any], page: Path, browser: Browser
) -> None:
    chance = random.Random(17)
    for key in chance.sample(sorted(computed["answers"]), 2):
        gpus, seq_len, number, threads = map(int, key.split("/"))
        size = chance.choice(sorted(computed["answers"][key]))
        device = chance.choice([each for each in computed["devices"][str(gpus)] if each["threads"] == threads])
        choice = {"gpus": gpus, "memory": device["memory"], "microBatch": int(size), "seqLen": seq_len}
        text = asked(browser, page, **choice, strategy=number)
        answer = computed["answers"][key][size]
        headroom = device["usable"] - answer["needed"]
        room = f"{format_bytes(abs(headroom))} {'of headroom' if headroom >= 0 else 'too much'}"
        total = f"{format_bytes(answer['needed'] + device['context'])} of {format_bytes(device['memory'])}, {room}"
        assert text.startswith(f"{'fits' if headroom >= 0 else 'does not fit'} {total}; ")
        assert answer["cut"] in text
        assert (f"{format_seconds(answer['seconds'])} a step" in text) == (headroom >= 0)
    assert browser.complaints() == []


def test_a_choice_that_is_not_in_the_page_names_the_command_and_no_number(
    computed: dict[str, Any], page: Path, browser: Browser
) -> None:
    known = {(int(key.split("/")[0]), int(key.split("/")[2])) for key in computed["answers"]}
    number = max(number for _, number in known)
    gpus = next(int(each) for each in computed["devices"] if (int(each), number) not in known)
    text = asked(browser, page, gpus=gpus, strategy=number)
    assert text.startswith("? Not in this page") and " of headroom" not in text
    assert f"--gpus {gpus} --mem 12.00GiB --seq-len 1024 --zero-stage " in text
    assert browser.run("return [...document.querySelectorAll('#strategy option')].some((each) => each.disabled)")
    assert browser.complaints() == []


def test_every_strategy_that_was_weighed_is_in_the_table_and_shows_its_timeline(plan: Plan, opened: Browser) -> None:
    rows = opened.run(
        "return [...document.querySelectorAll('#strategies ~ .scrolls tbody tr')].map("
        "row => [...row.children].map(each => each.textContent))"
    )
    assert len(rows) == 1 + len(plan.rejected)
    assert rows[0][2] == "chosen" and all(row[2] for row in rows)
    opened.run("document.querySelectorAll('#strategies ~ .scrolls button')[3].click()")
    shown = opened.run("return document.getElementById('shown').textContent")
    assert f"{plan.rejected[2].strategy}, micro-batch {plan.rejected[2].micro_batch}" in shown


def test_controls_answer_to_the_keyboard_in_their_order_and_are_read_aloud(opened: Browser) -> None:
    from selenium.webdriver import Keys

    opened.run("document.activeElement.blur(); scrollTo(0, 0)")
    reached: list[str] = []
    for _ in range(12):
        opened.press(Keys.TAB)
        reached.append(opened.run("return document.activeElement.id || document.activeElement.tagName"))
    enabled = opened.run(
        "return [...document.querySelectorAll('#controls input, #controls select, #controls button')]"
        ".filter(each => !each.disabled).map(each => each.id)"
    )
    assert [name for name in reached if name in enabled] == enabled
    before = said(opened)
    opened.run("document.getElementById('micro').focus()")
    opened.press(Keys.ARROW_RIGHT)
    label, spoken, role, address = opened.run(
        "const slider = document.getElementById('micro');"
        "return [slider.labels[0].textContent, slider.getAttribute('aria-valuetext'),"
        " document.getElementById('answer').getAttribute('role'), location.href]"
    )
    after = said(opened)
    assert after != before
    assert label.startswith("Micro-batch") and spoken.endswith("samples") and role == "status"
    opened.driver.get("about:blank")
    opened.driver.get(address)
    assert said(opened) == after, "the address keeps what was asked"
    assert opened.complaints() == []


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
    assert browser.complaints() == []
    path.write_text(
        plan_page(plan, {"answers": {}, "largest": {}, "strategies": [], "devices": {}, "timelines": [None]})
    )
    browser.open(path)
    assert "Only dry runs can tell" in browser.run("return document.body.textContent")
    assert browser.run("return document.querySelector('#strategies canvas') !== null")
    assert browser.complaints() == []


@pytest.mark.exhaustive
def test_the_page_beside_the_plan_of_an_8b_model_is_light(plan: Plan, tmp_path: Path, browser: Browser) -> None:
    path = write_page(drafted(model="llama-3.1-8b", gpus=8, mem="80G"), tmp_path / "plan.html", in_full=False)
    assert path.stat().st_size < 300_000
    browser.open(path)
    assert said(browser).startswith("fits ")
