"""Where profiles can be drafted at once, all strategies are ranked and few are looked at closely."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from frugal.config.schema import understand
from frugal.planning.search.candidate import TIE, Choice, Nothing
from frugal.planning.search.search import Search
from frugal.planning.strategy import Strategy
from tests.planning.synthetic import SyntheticProfile, SyntheticSource

MODEL = {"parameters": 124_000_000, "flops_per_token": 8e8, "num_operators": 2500, "bytes_per_token": 1_000_000}


@dataclass
class DraftingSource(SyntheticSource):
    """Drafts with `drafted` of the activations; `wrong` are strategies whose profile is that far off the dry run."""

    drafted: float = 0.9
    wrong: dict[Strategy, float] = field(default_factory=dict)
    distrusted: list[Strategy] = field(default_factory=list)

    def draft(self, strategy: Strategy, accumulates: bool) -> SyntheticProfile | None:
        return None if strategy in self.distrusted else self._profile(strategy, error=self.drafted)

    def profile(self, strategy: Strategy, accumulates: bool) -> SyntheticProfile:
        found = super().profile(strategy, accumulates)
        return found if strategy in self.distrusted else replace(found, error=self.wrong.get(strategy, 1.0))

    def distrust(self, strategy: Strategy) -> bool:
        if strategy in self.distrusted:
            return False
        self.distrusted.append(strategy)
        return True


def search(source: type[SyntheticSource] = DraftingSource, **more: Any) -> tuple[SyntheticSource, Choice | Nothing]:
    request, cluster, _ = understand({"gpus": 4, "mem": "12G"})
    made = source(request, cluster, MODEL, **more)
    return made, Search(request, cluster, made).run()


def test_drafts_lead_to_the_same_choice() -> None:
    _, drafted = search()
    _, looked_at = search(SyntheticSource)
    assert isinstance(drafted, Choice) and isinstance(looked_at, Choice)
    assert (drafted.option.strategy, drafted.option.batch) == (looked_at.option.strategy, looked_at.option.batch)
    assert drafted.memory == looked_at.memory


def test_only_what_could_win_is_looked_at_closely() -> None:
    source, found = search()
    assert isinstance(found, Choice)
    looked_at = {option.strategy for option in found.options if option.memory is not None and not option.is_draft}
    assert found.option.strategy in looked_at
    assert set(source.profiled) == looked_at < {option.strategy for option in found.options}
    for option in found.options:
        if option.strategy not in looked_at:
            assert option.seconds * TIE > found.option.seconds, "left alone, although it might be faster"


def test_a_mode_that_has_nothing_to_gain_is_not_even_traced() -> None:
    request, cluster, _ = understand({"gpus": 4, "mem": "80G", "global_batch": 64})
    source = DraftingSource(request, cluster, MODEL)
    prepared: list[str] = []
    source.prepare = lambda strategies: prepared.extend(each.activation_checkpointing for each in strategies)  # type: ignore[method-assign]  # only looks
    found = Search(request, cluster, source).run()
    assert isinstance(found, Choice) and found.option.strategy.activation_checkpointing == "off"
    assert set(prepared) == {"off"}
    assert {option.strategy.activation_checkpointing for option in found.options} > {"off"}


def test_a_wrong_profile_is_found_out_and_dry_run_ones_take_its_place() -> None:
    _, first = search()
    assert isinstance(first, Choice)
    source, found = search(wrong={first.option.strategy: 0.5})
    assert isinstance(found, Choice) and isinstance(source, DraftingSource)
    assert source.distrusted == [first.option.strategy]
    assert (found.option.strategy, found.option.batch) == (first.option.strategy, first.option.batch)
    (warning,) = found.warnings
    assert "off the dry run; it was profiled by dry runs instead" in warning


@pytest.mark.parametrize("memory", ["2G", "3G"])
def test_where_nothing_fits_the_nearest_is_known_exactly(memory: str) -> None:
    request, cluster, _ = understand({"gpus": 1, "mem": memory, "offload": "none"})
    source = DraftingSource(request, cluster, MODEL | {"parameters": 1_000_000_000})
    found = Search(request, cluster, source).run()
    assert isinstance(found, Nothing)
    assert not found.nearest.is_draft
    assert found.nearest.strategy in source.profiled


def test_what_a_dry_run_assumed_is_told() -> None:
    _, found = search(notes=("every token is selected",))
    assert isinstance(found, Choice)
    assert found.warnings == ("assumed, because it depends on data: every token is selected",)
