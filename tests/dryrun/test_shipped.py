"""What is shipped is what would be found here, and is used only where it holds."""

import lzma
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bench.planning.shipped import CLASSES, questions
from frugal.config.hardware import cluster as cards
from frugal.config.request import Request
from frugal.config.schema import understand
from frugal.dryrun import shipped
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.messages import AskCheck, AskFacts, AskTrace
from frugal.dryrun.pool import Pool
from frugal.planning.strategy import ActivationCheckpointing, Strategy


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with closing(Pool(2)) as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh() -> None:
    shipped._shipment.cache_clear()


@pytest.mark.parametrize("damage", ["cut", "turned", "empty", "garbage", "deep"])
def test_a_damaged_trace_is_told_and_the_model_is_traced_here(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "gpt2-off.json.xz"
    data = (shipped.FOLDER / name).read_bytes()
    middle = len(data) // 2
    (tmp_path / name).write_bytes(
        {
            "cut": data[:middle],
            "turned": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "empty": b"",
            "garbage": b"garbage",
            "deep": lzma.compress(b"[" * 200_000),
        }[damage]
    )
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    for _ in range(2):
        assert shipped.facts(Request(model="gpt2")) is None
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path / name} is damaged (")


@pytest.mark.parametrize("model", shipped.presets())
def test_every_preset_is_shipped_for_the_tested_versions(model: str) -> None:
    found = shipped.facts(Request(model=model))
    assert found is not None, "make it with `python -m bench.planning.shipped`"
    assert all(shipped._shipment(model, mode) for mode in shipped.MODES)
    assert found.parameters == shipped.presets()[model]["parameters"]  # type: ignore[index]  # a table


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ("distilgpt2", "selective"),
        *(pytest.param("t5-small", mode, marks=pytest.mark.exhaustive) for mode in shipped.MODES),
    ],
)
def test_a_trace_made_here_is_the_shipped_one(model: str, mode: ActivationCheckpointing, pool: Pool) -> None:
    kept = shipped._shipment(model, mode)
    assert kept is not None
    seq_len = min(Request().seq_len, kept.facts.max_positions or Request().seq_len)
    request = Request(model=model, seq_len=seq_len)
    described, notes = pool.ask([AskFacts(request), AskCheck(request)])
    assert replace(described, notes=notes) == kept.facts
    asked = [each for card in CLASSES for each in questions(request, kept.facts, mode, card)]
    one_of_another = next(each for each in asked if shipped._name(each) in kept.same)
    asked = [each for each in asked if shipped._name(each) in kept.traces] + [one_of_another]
    assert len(asked) == len(kept.traces) + 1
    for each, made in zip(asked, pool.ask(asked), strict=True):
        assert made == shipped.trace(each), "`python -m bench.planning.shipped`"


def test_so_is_one_with_the_attention_of_a_hopper(pool: Pool) -> None:
    kept = shipped._shipment("tinyllama-1.1b", "off")
    assert kept is not None
    asked = next(questions(Request(model="tinyllama-1.1b"), kept.facts, "off", (9, 0)))
    (made,) = pool.ask([asked])
    assert "aten._scaled_dot_product_cudnn_attention.default" in made.trace.stream.names
    assert made == shipped.trace(asked), "`python -m bench.planning.shipped`"


def question(**changes: object) -> AskTrace:
    request = Request(**({"model": "gpt2"} | changes))  # type: ignore[arg-type]  # fields of a request
    return AskTrace(request=request, activation_checkpointing="off", loss="plain", zero_stage=2, kind="cuda")


@pytest.mark.parametrize(
    "changes", [{"seq_len": 1000}, {"precision": "fp32"}, {"task": "causal-lm"}, {"model": "gpt3"}]
)
def test_anything_else_is_not_shipped(changes: dict[str, object]) -> None:
    assert shipped.trace(question()) is not None
    assert shipped.trace(question(**changes)) is None


def test_for_other_versions_nothing_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_versions", lambda: ("2.14.0", "5.23.0"))
    assert shipped.facts(Request(model="gpt2")) is None


def test_a_preset_is_drafted_without_a_worker(tmp_path: Path) -> None:
    request, cluster, _ = understand({"gpus": 4, "mem": "12G"})
    with DryRunSource(request, cluster, tmp_path) as made:
        drafted = made.draft(Strategy(zero_stage=2), True)
        assert drafted is not None and drafted.costs.facts.parameters == 124_439_808
        assert made._pool._processes == []


@pytest.mark.parametrize(
    ("model", "card", "least", "most"),
    [
        ("llama-3.1-8b", "a100-80g", 0.5, 0.65),  # torchtitan, docs/performance.md: 0.58 with compiled layers
        ("llama-3.1-8b", "h100-80g", 0.33, 0.5),  # 0.33 in eager mode, 0.39 compiled
        ("gpt2", "a100-80g", 0.25, 0.45),  # small and in eager mode, where operators between the products weigh more
    ],
)
def test_whole_steps_reach_the_share_of_the_peak_that_is_published(
    model: str, card: str, least: float, most: float
) -> None:
    request, cluster, _ = understand({"model": model, "gpus": 1, "gpu": card})
    traced = shipped.trace(
        AskTrace(request=request, activation_checkpointing="selective", loss="plain", zero_stage=2, kind="cuda")
    )
    assert traced is not None and traced.trace is not None
    work, device = traced.trace.work, cluster.devices[0]
    seconds = (work.flops_per_sample + work.recompute_flops_per_sample) / device.matrix_flops
    seconds += (work.traffic.per_sample + work.recompute_traffic.per_sample) / device.memory_bandwidth
    assert least < work.flops_per_sample / seconds / cards.CARDS[card].half_flops < most
