"""docs/kernels.md shows what the kept account of kernels says, and Inductor, Liger and frugal are all in it."""

import json

import pytest

from bench.kernels import roofline
from bench.kernels.layers import FAMILIES

ACCOUNT = json.loads(roofline.RESULTS.read_text())


def test_the_page_shows_the_tables_that_the_command_prints() -> None:
    page = roofline.PAGE.read_text()
    tables = roofline.tables(ACCOUNT)
    speeds = {way: speeds for name, way, *speeds in roofline.rows(ACCOUNT) if name == "Llama-3.1-8B"}
    assert [name for name in ("layers", "losses") if tables[name] not in page] == []
    assert "{} on an RTX 3090, {} on an A100, {} on an H100".format(*speeds["frugal, fused layers"]) in page
    assert ", ".join(speeds["TRL + Liger"]) in page
    assert ", ".join(speeds["compiled layers"]) in page


def test_every_family_has_its_ways_and_its_losses() -> None:
    assert ACCOUNT["layers"].keys() == ACCOUNT["losses"].keys() == FAMILIES.keys()
    for name, ways in ACCOUNT["layers"].items():
        assert ways.keys() == {"plain", "frugal", "compile"} | ({"liger"} if FAMILIES[name].liger else set())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tiled_loss_moves_fewer_bytes_than_before_at_no_higher_peak(name: str) -> None:
    of_loss = ACCOUNT["losses"][name]
    logits = FAMILIES[name].samples * FAMILIES[name].positions * FAMILIES[name].vocabulary
    for way in ("tiled now, plain", "tiled now, liger"):
        assert of_loss[way]["bytes_beside_products"] < 45 * logits < of_loss["tiled before"]["bytes_beside_products"]
        assert of_loss[way]["forward_peak_bytes"] <= of_loss["tiled before"]["forward_peak_bytes"]
