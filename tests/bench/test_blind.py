"""Strangers' loops that were predicted before they were compared: the first predictions stay, what they come to now is
kept beside them."""

import json

import pytest

from bench.recordings import blind

FIRST = json.loads(blind.FIRST.read_text())["rows"]
NOW = json.loads(blind.RESULTS.read_text())["rows"]


@pytest.mark.parametrize("name", ["rtx4090-attention-512x128", "rtx4090-conv-dropout-1000", "rtx4090-conv-bn-1000"])
def test_what_a_card_took_is_predicted(name: str) -> None:
    row = next(each for each in blind.rows() if each.name == name)
    made = blind.compared(blind.predicted(row), FIRST[name])
    assert [made[each] for each in ("allocated_error", "reserved_error") if each in made] in ([0], [0, 0])


def test_every_row_has_a_first_prediction_and_a_published_figure() -> None:
    names = [row.name for row in blind.rows()]
    assert names == list(FIRST) == list(blind.PUBLISHED) == [each["name"] for each in NOW]
    assert len({row.source.partition(" at ")[0] for row in blind.rows()}) >= 5


def test_kept_errors_are_those_of_the_kept_bytes() -> None:
    for each in NOW:
        assert each == blind.compared(dict(each), FIRST[each["name"]])


def test_figures_that_are_printed_alike_count_as_exact() -> None:
    first = {"predicted_allocated_bytes": 2, "predicted_reserved_bytes": 26.26 * 2**30}
    made = {"name": "a100-gpt-from-scratch-1", "predicted_reserved_bytes": round(26.24221 * 2**30)}
    compared = blind.compared(made, first)
    assert compared["reserved_error"] == 0 and compared["first_reserved_error"] == pytest.approx(26.26 / 26.2422 - 1)
    assert "allocated_error" not in compared
