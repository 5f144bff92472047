"""The page of a plan says what Python says: its arithmetic runs in a real browser, and is held to `MemoryProfile`."""

import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from frugal.config.hardware.cluster import Device
from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.planner import _plans
from frugal.plan_page import profiles as profiles_module
from frugal.plan_page.make import write_page
from frugal.plan_page.page import plan_page
from frugal.plan_page.profiles import profiles
from frugal.planning.batch import BatchPlan
from frugal.planning.cost import step_time
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.plan import Plan
from frugal.planning.strategy import Strategy, allowed_strategies, in_part
from frugal.planning.what_if import with_gpus, with_memory
from frugal.units import format_bytes
from tests.browser import Browser
from tests.commands import frugal_plan

MODEL = "distilgpt2"  # its traces are shipped, so no worker is started

ASK = """
const [takers, seqLen, strategy, accumulates, microBatch, devices, samples, cap, gpus] = arguments;
const number = Number.isInteger(gpus) ? gpus : takers;
const profile = await frugalPredict.profile({gpus: number, seqLen, strategy, accumulates});
const cut = frugalPredict.batch(samples, takers, microBatch);
return devices.map((device) => {
  const {rank, ...memory} = frugalPredict.memory(profile, microBatch, device);
  const most = cap ? frugalPredict.largestMicroBatch(profile, device, cap) : null;
  return {...memory, most, steps: cut.steps, largest: cut.largest, seconds: frugalPredict.seconds(profile, cut)};
});
"""

PATIENCE_SECONDS = 60
"""No test says how long it takes; this only ends one that would never."""


def drafted(**settings: Any) -> Plan:
    """The plan before its dry run: nothing is started."""
    return next(_plans(*understand({"model": MODEL} | settings)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache in which nothing is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def plan(cache: None) -> Plan:
    """A plan on 4 cards of 12 GiB, as it is drafted."""
    return drafted(gpus=4, mem="12G")


@pytest.fixture(scope="module")
def computed(plan: Plan) -> dict[str, Any]:
    """What a page of this plan can compute: one length, two numbers of GPUs."""
    with closing(workers()) as pool:
        return profiles(plan, partial(DryRunSource, pool=pool, will_dry_run=False), 350_000, only_known=True)


@pytest.fixture(scope="module")
def page(plan: Plan, computed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(plan_page(plan, computed, helps="5 GPUs: a step of 1.5 s, 16 % less (predicted)"))
    return path


@pytest.fixture
def opened(page: Path, browser: Browser) -> Browser:
    """The page, once it has answered its first question."""
    browser.open(page)
    answer(browser)
    return browser


def answer(browser: Browser, than: str = "") -> str:
    """What the page says as soon as it says something else."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        said = browser.run("return document.getElementById('answer').textContent")
        if said and said != than:
            return said
    raise AssertionError(f"the page still says {than!r}")


# The arithmetic


def profile_of(plan: Plan, gpus: int, seq_len: int, name: str, accumulates: bool, device: Device) -> MemoryProfile:
    """As `frugal plan` makes it on so many of these devices."""
    request = replace(plan.request, seq_len=seq_len)
    cluster = with_memory(with_gpus(plan.cluster, gpus), device.memory_bytes)
    with closing(workers()) as pool, DryRunSource(request, cluster, pool=pool, will_dry_run=False) as source:
        return source.profile(strategy_named(source, name), accumulates)


def strategy_named(source: DryRunSource, name: str) -> Strategy:
    facts = source.facts()
    return next(
        strategy
        for level in ("none", "optimizer", "all")
        for strategy in allowed_strategies(
            replace(source.request, offload="auto"),
            replace(facts, can_tile=True),
            world_size=source.cluster.world_size,
            offload=level,  # type: ignore[arg-type]  # literals, seen as text
        )
        if str(strategy) == name
    )


def test_the_page_says_to_the_byte_what_python_says(plan: Plan, computed: dict[str, Any], opened: Browser) -> None:
    """220 points: 44 of a strategy, a number of GPUs and a micro-batch, each on 5 cards, from 6 to 180 GiB."""
    chance = random.Random(17)
    keys = chance.sample(sorted(computed["profiles"]), 11) * 4
    seen: set[tuple[object, ...]] = set()
    for key in keys:
        gpus, seq_len, number, sums = map(int, key.split("/"))
        micro_batch = chance.randint(1, 40)
        written = chance.sample(computed["devices"][str(gpus)], 5)
        asked = (gpus, seq_len, number, bool(sums), micro_batch, written, plan.batch.global_batch)
        for device, said in zip(written, opened.run(ASK, *asked), strict=True):
            card = with_memory(with_gpus(plan.cluster, gpus), device["memory"]).devices[0]
            assert (card.usable_bytes, card.context_bytes) == (device["usable"], device["context"])
            profile = profile_of(plan, gpus, seq_len, computed["strategies"][number]["name"], bool(sums), card)
            memory = profile.memory(micro_batch, card)
            expected = {name: getattr(memory, name) for name in memory.CATEGORIES}
            expected |= {"total": memory.total_bytes, "phase": memory.phase, "operator": memory.operator}
            expected |= {"headroom": memory.headroom_bytes, "fits": memory.fits}
            assert expected == {name: said[name] for name in expected}, (key, micro_batch, device)
            assert memory.host_bytes_per_node == said["rankHost"] * gpus
            seen.add((key, micro_batch, device["memory"]))
    assert len(seen) >= 200


def test_the_page_cuts_the_batch_and_estimates_the_step_as_python_does(
    plan: Plan, computed: dict[str, Any], opened: Browser
) -> None:
    for key in sorted(computed["profiles"])[::3]:
        gpus, seq_len, number, sums = map(int, key.split("/"))
        device = with_gpus(plan.cluster, gpus).devices[0]
        profile = profile_of(plan, gpus, seq_len, computed["strategies"][number]["name"], bool(sums), device)
        written = next(each for each in computed["devices"][str(gpus)] if each["memory"] == device.memory_bytes)
        for micro_batch in (1, 7, 100):
            (said,) = opened.run(ASK, gpus, seq_len, number, bool(sums), micro_batch, [written], 512, 24)
            batch = BatchPlan.of(512, (micro_batch,) * gpus).tightened()
            assert (said["steps"], said["largest"]) == (batch.accumulation_steps, batch.largest_micro_batch)
            expected = step_time(profile.costs, profile.strategy, batch, with_gpus(plan.cluster, gpus), plan.request)
            for part in ("compute", "recompute", "communication", "offload", "optimizer", "total"):
                seconds = getattr(expected, f"{part}_seconds")
                assert said["seconds"][part] == pytest.approx(seconds, rel=1e-9, abs=1e-12), (key, part)
        assert said["most"] == profile.largest_micro_batch(device, 24)


KINDS: dict[str, dict[str, Any]] = {
    "layers that differ": {"model": "llama-3.1-8b", "gpus": 4, "mem": "80G"},
    "a part of the optimizer on the host": {"gpus": 2, "mem": "4G", "offload_ratio": 0.5},
}
TRACED: dict[str, dict[str, Any]] = {
    "a tiled MLP": {"gpus": 2, "mem": "6G", "mlp": "tiled", "zero_stage": 2},
    "ranks that share samples": {"gpus": 4, "mem": "6G", "sequence_parallel": 2, "zero_stage": 2},
}
"""No traces of these are shipped, so they are made."""


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in TRACED)])
def test_every_strategy_that_was_weighed_is_reached_and_says_what_python_says(
    kind: str, cache: None, tmp_path: Path, browser: Browser
) -> None:
    """By its number in the table of the plan; and the plan's own also on twice as many GPUs."""
    small = {"model": small_llama(tmp_path), "seq_len": 128} if kind in TRACED else {}
    plan = drafted(**small, **(KINDS | TRACED)[kind])
    path = tmp_path / "plan.html"
    with closing(workers()) as pool:
        known = partial(DryRunSource, pool=pool, will_dry_run=False)
        computed = profiles(plan, known, 250_000, only_known=True)
    names = [each["name"] for each in computed["strategies"]]
    assert names[0] == str(plan.strategy) and len(set(names)) == len(names)
    path.write_text(plan_page(plan, computed))
    browser.open(path)
    said = answer(browser)
    num_computed = 0
    for number, each in enumerate((plan, *plan.rejected)):
        if number:
            said, name = browser.run(REACH, number)
            assert name == str(each.strategy)
        if said.startswith("? "):
            assert "The plan says: " in said, "what the page cannot compute it has from the plan's table"
            continue
        num_computed += 1
        total = plan.memory.total_bytes if isinstance(each, Plan) else None if each.is_bound else each.peak_bytes
        assert total is None or format_bytes(total) in said.partition(" of ")[0]
    assert num_computed >= (2 if kind in TRACED else 3)
    assert browser.complaints() == []
    for key in computed["profiles"]:
        if key.split("/")[2] == "0":
            same_as_python(browser, plan, computed, key)


REACH = """
const said = document.getElementById('answer').textContent;
document.querySelectorAll('#strategies ~ .scrolls button')[arguments[0]].click();
while (document.getElementById('answer').textContent === said) await new Promise((done) => setTimeout(done, 5));
return [
  document.getElementById('answer').textContent,
  document.getElementById('strategy').selectedOptions[0].textContent,
];
"""
"""What the page says of a row of the table of strategies, and of which strategy it says so."""


def same_as_python(browser: Browser, plan: Plan, computed: dict[str, Any], key: str) -> None:
    """The page's numbers of the plan's own strategy, on any number of GPUs, are Python's."""
    gpus, seq_len, number, sums = map(int, key.split("/"))
    shared_by = plan.batch.sequence_parallel
    request = replace(plan.request, seq_len=seq_len, sequence_parallel=shared_by if shared_by > 1 else None)
    cluster = with_gpus(plan.cluster, gpus)
    takers = cluster.world_size // shared_by
    device = cluster.devices[0]
    written = next(each for each in computed["devices"][str(gpus)] if each["memory"] == device.memory_bytes)
    strategy = plan.strategy
    with closing(workers()) as pool, DryRunSource(request, cluster, pool=pool, will_dry_run=False) as source:
        if strategy.offload_ratio < 1:
            whole = replace(strategy, offload_ratio=1.0, sub_group_elements=Strategy.sub_group_elements)
            strategy = in_part(whole, strategy.offload_ratio, plan.model.trainable_parameters, cluster.world_size)
        profile = source.profile(strategy, bool(sums))
    for micro_batch in (1, 5):
        (said,) = browser.run(ASK, takers, seq_len, number, bool(sums), micro_batch, [written], 512, 0, gpus)
        memory = profile.memory(micro_batch, device)
        assert {name: said[name] for name in (*memory.CATEGORIES, "total", "phase", "operator")} == {
            **{name: getattr(memory, name) for name in memory.CATEGORIES},
            **{"total": memory.total_bytes, "phase": memory.phase, "operator": memory.operator},
        }, key
        batch = BatchPlan.of(512, (micro_batch,) * takers, sequence_parallel=shared_by).tightened()
        assert (said["steps"], said["largest"]) == (batch.accumulation_steps, batch.largest_micro_batch)
        expected = step_time(profile.costs, strategy, batch, cluster, request)
        for part in ("compute", "recompute", "communication", "offload", "optimizer", "total"):
            seconds = getattr(expected, f"{part}_seconds")
            assert said["seconds"][part] == pytest.approx(seconds, rel=1e-9, abs=1e-12), (key, part)


def small_llama(folder: Path) -> str:
    """The configuration of a model whose trace takes little time."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 512,
        "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_it_says_what_frugal_plan_says_with_the_same_pins(
    plan: Plan, computed: dict[str, Any], opened: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = ["--zero-stage", "3", "--activation-checkpointing", "full", "--loss", "plain", "--micro-batch", "8"]
    code, out, err = frugal_plan(
        capsys, "--model", MODEL, "--gpus", "4", "--mem", "24G", "--draft", "--json", "--offload", "none", *pins
    )
    assert code == 0, err
    said = json.loads(out)
    wanted = "ZeRO-3, activation checkpointing full"
    number = next(i for i, each in enumerate(computed["strategies"]) if each["name"] == wanted)
    device = next(each for each in computed["devices"]["4"] if each["memory"] == 24 << 30)
    (page_says,) = opened.run(ASK, 4, 1024, number, True, 8, [device], 512)
    assert page_says["total"] == said["memory"]["total_bytes"]
    assert page_says["seconds"]["total"] == pytest.approx(said["time"]["total_seconds"])


# The page


def test_it_opens_with_the_plan_without_a_network_and_without_an_error(
    plan: Plan, page: Path, browser: Browser
) -> None:
    browser.open(page)
    said = answer(browser)
    assert said.startswith("fits ") and plan.arithmetic in said
    assert plan.digest in browser.run("return document.querySelector('footer').textContent")
    assert browser.run("return document.querySelector('h1').textContent").startswith(f"{MODEL} fits on 4 GPUs")
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_every_strategy_that_was_weighed_is_in_the_table_with_the_reason(plan: Plan, opened: Browser) -> None:
    rows = opened.run(
        "return [...document.querySelectorAll('#strategies ~ .scrolls tbody tr')].map("
        "row => [...row.children].map(each => each.textContent))"
    )
    assert len(rows) == 1 + len(plan.rejected)
    assert rows[0][2] == "chosen"
    for row, rejected in zip(rows[1:], plan.rejected, strict=True):
        reason = rejected.reason.partition(":")[0]
        is_slower = rejected.step_seconds is not None and rejected.step_seconds > plan.time.total_seconds
        longer = r"(compute|recompute|communication|offload|optimizer) \+\d.*"
        assert (
            re.fullmatch(longer, row[2]) is not None if is_slower and "fit" not in reason else row[2].startswith(reason)
        )


def test_sliders_answer_to_the_keyboard_and_are_read_aloud(opened: Browser) -> None:
    from selenium.webdriver import Keys

    before = answer(opened)
    opened.run("document.getElementById('micro').focus()")
    opened.press(Keys.ARROW_RIGHT)
    after = answer(opened, before)
    assert after != before
    label, spoken, role = opened.run(
        "const slider = document.getElementById('micro');"
        "return [slider.labels[0].textContent, slider.getAttribute('aria-valuetext'),"
        " document.getElementById('answer').getAttribute('role')]"
    )
    assert label.startswith("Micro-batch") and spoken.endswith("samples") and role == "status"
    assert opened.complaints() == []


def test_all_controls_are_reached_by_tab_in_their_order(opened: Browser) -> None:
    from selenium.webdriver import Keys

    opened.run("document.activeElement.blur(); scrollTo(0, 0)")
    reached: list[str] = []
    for _ in range(15):
        opened.press(Keys.TAB)
        reached.append(opened.run("return document.activeElement.id || document.activeElement.tagName"))
    enabled = opened.run(
        "return [...document.querySelectorAll('#controls input, #controls select, #controls button')]"
        ".filter(each => !each.disabled).map(each => each.id)"
    )
    assert [name for name in reached if name in enabled] == enabled


def test_the_tables_say_the_same_as_the_chart(plan: Plan, opened: Browser) -> None:
    opened.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    rows = dict(
        opened.run(
            "return [...document.querySelectorAll('#breakdown tbody tr')].map("
            "row => [row.children[0].textContent, Number(row.children[2].textContent)])"
        )
    )
    memory = plan.memory
    assert rows.pop("total") == memory.total_bytes
    assert rows.pop("may be used") == memory.usable_bytes + memory.context
    assert {name.split(" ")[1]: size for name, size in rows.items()} == {
        name: getattr(memory, name) for name in memory.CATEGORIES if getattr(memory, name)
    }
    assert opened.run("return document.querySelectorAll('#phases tbody tr').length") >= 3


def test_what_was_not_computed_is_said_and_no_number_is_made_up(
    plan: Plan, computed: dict[str, Any], tmp_path: Path, browser: Browser
) -> None:
    first = next(iter(computed["profiles"]))
    number = str(len(computed["strategies"]) - 1)
    two = {key: value for key, value in computed["profiles"].items() if key == first or key.split("/")[2] == number}
    path = tmp_path / "plan.html"
    path.write_text(plan_page(plan, computed | {"profiles": {first: two[first]}}))
    browser.open(path)
    before = answer(browser)
    other = next(each for each in computed["strategies"] if each["stage"] != computed["strategies"][0]["stage"])
    browser.run(
        "const stage = document.getElementById('stage'); stage.value = arguments[0];"
        "stage.dispatchEvent(new Event('change'))",
        str(other["stage"]),
    )
    said = answer(browser, before)
    assert said.startswith("? Not computed in this page")
    assert f"--zero-stage {other['stage']}" in said
    row = browser.run("return [...document.querySelectorAll('#strategies ~ .scrolls tr')].map(row => row.textContent)")
    numbers = re.findall(r"[<>\d.]+ GiB", said)
    assert numbers and all(any(number in text for text in row) for number in numbers), "only the table's"
    assert browser.complaints() == []


def test_the_address_keeps_what_was_asked(page: Path, browser: Browser) -> None:
    browser.open(page)
    before = answer(browser)
    browser.run(
        "document.getElementById('micro').value = 2; document.getElementById('micro').dispatchEvent(new Event('input'))"
    )
    after = answer(browser, before)
    address = browser.run("return location.href")
    assert "microBatch=3" in address
    browser.driver.get("about:blank")
    browser.driver.get(address)
    again = answer(browser)
    assert again.split(" at most")[0].rstrip(".;") == after.split(" at most")[0].rstrip(".;")


@pytest.mark.parametrize("settings", [{"mem": "12G,24G"}, {"gpus": 1, "mem": "8G"}], ids=["two kinds", "one GPU"])
def test_other_clusters_have_a_page_too(
    cache: None, settings: dict[str, Any], tmp_path: Path, browser: Browser
) -> None:
    plan = drafted(**settings)
    path = write_page(plan, tmp_path / "plan.html", in_full=False)
    browser.open(path)
    assert answer(browser).startswith("fits ")
    assert browser.complaints() == []


def test_a_model_that_only_dry_runs_can_tell_of_has_a_page_without_arithmetic(
    plan: Plan, tmp_path: Path, browser: Browser
) -> None:
    nothing = {"profiles": {}, "strategies": [], "devices": {}, "parts": [], "names": []}
    path = tmp_path / "plan.html"
    path.write_text(plan_page(plan, nothing))
    browser.open(path)
    assert "this page computes nothing" in browser.run("return document.body.textContent")
    assert browser.run("return document.querySelector('#strategies canvas') !== null")
    assert browser.complaints() == []


# Its weight


def test_a_page_is_no_heavier_than_it_may_be(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timelines are what grows: they end where they weigh enough, whatever the model."""
    allowed, most = profiles_module.MOST_BYTES, 20_000
    monkeypatch.setattr(profiles_module, "MOST_BYTES", most)
    with closing(workers()) as pool:
        few = profiles(plan, partial(DryRunSource, pool=pool, will_dry_run=False), 10**9, only_known=True)
    weight = sum(map(len, few["parts"]))
    assert most < weight < most + 20_000
    rest = len(plan_page(plan, few)) - weight
    entries = 250 * 1_000  # of as many profiles as a page of a small model has, beside their timelines
    assert rest + allowed + entries < 1_500_000


def test_the_page_beside_the_plan_of_an_8b_model_is_light(cache: None, tmp_path: Path, browser: Browser) -> None:
    plan = drafted(model="llama-3.1-8b", gpus=8, mem="80G")
    path = write_page(plan, tmp_path / "plan.html", in_full=False)
    assert path.stat().st_size < 300_000
    browser.open(path)
    assert answer(browser).startswith("fits ")
