"""Mixtures of modes of activation checkpointing: the fastest is chosen, and most are not looked at."""

from typing import Any

import pytest

from bench.plans import all_mixtures
from frugal.config.schema import understand
from frugal.errors import RequestError
from frugal.planning.memory.profile import largest_near
from frugal.planning.plan import Plan
from frugal.planning.search.candidate import TIE
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.search.mixtures import base_of, mixture
from frugal.planning.search.search import Search
from frugal.planning.strategy import LAYER_MODES, Strategy
from tests.planning.synthetic import SyntheticSource, planned

DEEP: dict[str, Any] = {"num_layers": 24, "drafts": True, "bytes_per_token": 2_000_000, "num_operators": 500}
CASES: list[dict[str, Any]] = [
    {"gpus": 1, "mem": "22G", "global_batch": 16},
    {"gpus": 1, "mem": "20G", "global_batch": 17},
    {"gpus": 2, "mem": "18G", "global_batch": 64},
    {"gpus": 4, "mem": "12G", "global_batch": 64},
    {"gpus": 8, "mem": "8G", "global_batch": 1000, "seq_len": 2048},
    {"gpus": 1, "mem": "16G", "global_batch": 16, "offload": "optimizer"},
    {"gpus": 1, "mem": "24G", "global_batch": 12, "micro_batch": 2},
    {"mem": "24G,16G", "global_batch": 64},
]


def exhaustive_seconds(settings: dict[str, Any], model: dict[str, Any]) -> float:
    """Return the seconds of the fastest of all mixtures that keep more in later layers, under every strategy
    of the plan's level."""
    request, cluster, _ = understand(settings)
    source = SyntheticSource(request, cluster, model)
    search = Search(request, cluster, source)
    evaluation = StrategyEvaluation(request, cluster, source)
    bases = dict.fromkeys(base_of(strategy) for level in search.levels for strategy in search.strategies(level))
    of_level: dict[Any, list[float]] = {}
    for base in bases:
        for layer_modes in all_mixtures(LAYER_MODES, int(model["num_layers"])):
            places = (base.offload_optimizer, base.offload_parameters)
            of_level.setdefault(places, []).append(evaluation.evaluate(mixture(base, layer_modes)).seconds)
    return next(min(seconds) for seconds in of_level.values() if min(seconds) < float("inf"))


@pytest.mark.parametrize(
    "settings", [*CASES[:2], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in CASES[2:])], ids=str
)
def test_it_is_within_two_percent_of_the_fastest_of_all(settings: dict[str, Any]) -> None:
    model = {**DEEP, "num_layers": 8}
    made = planned(model=model, **settings)
    assert made.time.total_seconds <= TIE * exhaustive_seconds(settings, model)


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("num_layers", [2, 24, pytest.param(80, marks=pytest.mark.exhaustive)])
def test_it_is_never_slower_than_one_mode_for_all_layers(num_layers: int, settings: dict[str, Any]) -> None:
    mixed = planned(model={**DEEP, "num_layers": num_layers}, **settings)
    alone = planned(model={**DEEP, "num_layers": 0}, **settings)
    assert alone.strategy.activation_checkpointing != "budget"
    assert mixed.time.total_seconds <= TIE * alone.time.total_seconds
    if mixed.strategy.activation_checkpointing == "budget":
        assert mixed.time.total_seconds < alone.time.total_seconds / TIE
        assert sum(count for _, count in mixed.strategy.layer_modes) == num_layers


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> set[Strategy]:
    """The strategies that are drafted."""
    asked: set[Strategy] = set()
    draft = StrategyEvaluation.draft

    def counted(self: StrategyEvaluation, strategy: Strategy) -> Any:
        asked.add(strategy)
        return draft(self, strategy)

    monkeypatch.setattr(StrategyEvaluation, "draft", counted)
    return asked


def test_few_of_many_mixtures_are_drafted(drafted: set[Strategy]) -> None:
    made = planned(model={**DEEP, "num_layers": 96}, gpus=1, mem="21G", global_batch=16)
    assert made.strategy.activation_checkpointing == "budget"
    assert len([strategy for strategy in drafted if strategy.layer_modes]) < 24


def test_nothing_is_drafted_or_mixed_under_a_stage_whose_weights_alone_are_too_large(drafted: set[Strategy]) -> None:
    made = planned(model={**DEEP, "parameters": 5_000_000_000}, gpus=64, mem="8G", global_batch=640)
    assert made.strategy.zero_stage == 3 and made.strategy.activation_checkpointing == "budget"
    assert {each.zero_stage for each in drafted} == {3}


def mixed() -> Plan:
    return planned(model=DEEP, gpus=1, mem="21.4G", global_batch=16)


def test_layers_that_keep_more_come_last_and_the_plan_says_how_many() -> None:
    made = mixed()
    modes = [mode for mode, _ in made.strategy.layer_modes]
    assert modes == sorted(modes, key=LAYER_MODES.index)
    assert Plan.from_json(made.to_json()) == made
    (first, count), *_ = made.strategy.layer_modes
    assert f"activation checkpointing {first} for {count}" in str(made)


def test_budget_is_what_auto_does() -> None:
    asked = planned(model=DEEP, gpus=1, mem="21.4G", global_batch=16, activation_checkpointing="budget")
    assert asked.strategy == mixed().strategy


def test_a_mixture_that_a_dry_run_refutes_is_replaced_by_one_that_keeps_less() -> None:
    """Dry runs that find activations 4 % larger than profiles do."""
    trusting, refuted = mixed(), planned(error=1.04, model=DEEP, gpus=1, mem="21.4G", global_batch=16)
    assert refuted.memory.fits
    assert refuted.strategy.share("off") < trusting.strategy.share("off") or refuted.batch != trusting.batch


def test_modes_that_cannot_be_mixed_are_not() -> None:
    model = {**DEEP, "why_not_mixed": "a layer runs more than once"}
    assert planned(model=model, gpus=1, mem="21.4G", global_batch=16).strategy.layer_modes == ()


def test_pinned_modes_are_those_of_the_plan_in_any_order() -> None:
    modes = "off:0-7,full:8-19,off:20-23"
    made = planned(model=DEEP, gpus=4, mem="24G", global_batch=16, activation_checkpointing=modes)
    assert made.strategy.activation_checkpointing == "budget"
    assert made.strategy.layer_modes == (("off", 8), ("full", 12), ("off", 4))
    assert {each.strategy.layer_modes for each in made.rejected} == {made.strategy.layer_modes}
    assert f"activation checkpointing is full for 12 of 24 layers, as asked: {modes}" in made.why
    assert Plan.from_json(made.to_json()) == made


def test_one_pinned_mode_is_that_of_all_layers() -> None:
    settings: dict[str, Any] = {"gpus": 4, "mem": "24G", "global_batch": 16}
    made = planned(model=DEEP, **settings, activation_checkpointing=[["full", 24]])
    assert made.strategy == planned(model=DEEP, **settings, activation_checkpointing="full").strategy


@pytest.mark.parametrize(
    ("modes", "model", "what", "because"),
    [
        ("full:0-31", {}, "--activation-checkpointing gives modes to 32 layers", "the model has 24"),
        ("full:0-3,off:4-7", {}, "--activation-checkpointing gives modes to 8 layers", "the model has 24"),
        ("full:0-3,off:4-23", {"why_not_mixed": "a layer runs more than once"},
         "--activation-checkpointing full:0-3,off:4-23 is impossible for this model", "a layer runs more than once"),
        ("full:0", {"num_layers": 0}, "--activation-checkpointing full:0 is impossible for this model",
         "its layers are not known"),
    ],
)  # fmt: skip
def test_pinned_modes_that_the_model_cannot_have_are_refused(
    modes: str, model: dict[str, Any], what: str, because: str
) -> None:
    with pytest.raises(RequestError) as caught:
        planned(model={**DEEP, **model}, gpus=4, mem="24G", activation_checkpointing=modes)
    assert (caught.value.what, tuple(caught.value.because)) == (what, (because,))
    assert caught.value.hint


def test_the_largest_that_holds_is_found_however_few_do() -> None:
    for most in range(40):
        for right in range(most + 1):
            assert largest_near(most, right.__ge__) == right
