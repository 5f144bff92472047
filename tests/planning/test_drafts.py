"""Where profiles can be drafted at once, all strategies are ranked and few are evaluated in full."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from frugal.config.schema import understand
from frugal.planning.search.candidate import SAME, TIE, Infeasible, SearchResult
from frugal.planning.search.search import Search
from frugal.planning.strategy import Strategy
from tests.planning.synthetic import SyntheticSource, last

MODEL = {"parameters": 124_000_000, "flops_per_token": 8e8, "num_operators": 2500, "bytes_per_token": 1_000_000}


@dataclass
class DraftingSource(SyntheticSource):
    """Drafts with `drafted` of the activations; `wrong` are strategies whose profile is that far off the dry run."""

    drafted: float = 0.9
    wrong: dict[Strategy, float] = field(default_factory=dict)

    def draft(self, strategy: Strategy, accumulates: bool) -> Any:
        return self._profile(strategy, error=self.drafted)

    def profile(self, strategy: Strategy, accumulates: bool) -> Any:
        return replace(super().profile(strategy, accumulates), error=self.wrong.get(strategy, 1.0))


def search(
    source: type[SyntheticSource] = DraftingSource, **more: Any
) -> tuple[SyntheticSource, SearchResult | Infeasible]:
    request, cluster, _ = understand({"gpus": 4, "mem": "12G"})
    made = source(request, cluster, MODEL, **more)
    return made, last(Search(request, cluster, made))


def test_drafts_lead_to_the_same_choice() -> None:
    _, drafted = search()
    _, looked_at = search(SyntheticSource)
    assert isinstance(drafted, SearchResult) and isinstance(looked_at, SearchResult)
    assert (drafted.chosen.strategy, drafted.chosen.batch) == (looked_at.chosen.strategy, looked_at.chosen.batch)
    assert drafted.memory == looked_at.memory


def test_only_what_could_win_is_looked_at_closely() -> None:
    source, found = search()
    assert isinstance(found, SearchResult)
    looked_at = {
        candidate.strategy for candidate in found.candidates if candidate.memory is not None and not candidate.is_draft
    }
    assert found.chosen.strategy in looked_at
    assert set(source.profiled) == looked_at < {candidate.strategy for candidate in found.candidates}
    for candidate in found.candidates:
        if candidate.strategy not in looked_at:
            assert candidate.seconds * TIE > found.chosen.seconds, "left alone, although it might be faster"


def test_a_mode_that_has_nothing_to_gain_is_not_even_traced() -> None:
    request, cluster, _ = understand({"gpus": 4, "mem": "80G", "global_batch": 64})
    source = DraftingSource(request, cluster, MODEL)
    prepared: list[str] = []
    source.prepare = lambda strategies: prepared.extend(each.activation_checkpointing for each in strategies)  # type: ignore[method-assign]  # only looks
    found = last(Search(request, cluster, source))
    assert isinstance(found, SearchResult) and found.chosen.strategy.activation_checkpointing == "off"
    assert set(prepared) == {"off"}
    assert {candidate.strategy.activation_checkpointing for candidate in found.candidates} > {"off"}


def test_what_a_dry_run_assumed_is_told() -> None:
    _, found = search(notes=("every token is selected",))
    assert isinstance(found, SearchResult)
    assert found.warnings == ("assumed, because it depends on data: every token is selected",)


@pytest.mark.parametrize("seed", range(20))
def test_of_equally_fast_and_simple_strategies_the_smaller_is_chosen(seed: int) -> None:
    draw = random.Random(seed)
    model = MODEL | {
        "can_tile": True, "logits_bytes_per_token": draw.choice((1_000, 200_000, 1_000_000)),
        "bytes_per_token": draw.choice((100_000, 1_000_000)),
    }  # fmt: skip
    settings = {"gpus": draw.choice((1, 2, 4)), "mem": draw.choice(("12G", "24G", "80G")), "global_batch": 64}
    request, cluster, _ = understand(settings)
    found = last(Search(request, cluster, DraftingSource(request, cluster, model)))
    assert isinstance(found, SearchResult)
    alike = [each for each in found.candidates if each.fits and each.simplicity[:2] == found.chosen.simplicity[:2]]
    fastest = min(each.seconds for each in alike)
    assert found.chosen.seconds <= SAME * fastest
    for other in alike:
        assert other.needed_bytes >= found.chosen.needed_bytes or other.seconds > SAME * fastest
    if settings["mem"] == "80G":  # all of the batch fits either way
        assert found.chosen.strategy.loss == "tiled"
        plain = next(each for each in found.rejected if each.strategy == replace(found.chosen.strategy, loss="plain"))
        assert plain.reason in ("not faster by 1 %, and larger", "cannot be faster")
