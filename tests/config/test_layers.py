"""`--activation-checkpointing`: every layer has one mode, however it is written; what does not say that is refused."""

from typing import Any

import pytest

from frugal.config.layers import LayerMode, LayerModes
from frugal.config.request import Request
from frugal.errors import RequestError

SAME: tuple[tuple[LayerMode, int], ...] = (("full", 16), ("selective", 8), ("off", 8))


@pytest.mark.parametrize(
    "written",
    [
        "full:0-15,selective:16-23,off:24-31",
        " off : 24-31 , full:0-15,selective:16 - 23,",
        "full:0-7,full:8-15,selective:16-23,off:24-31",
        [["full", 16], ["selective", 8], ["off", 8]],
        [("full", 10), ("full", 6), ("selective", 8), ("off", 8)],
        LayerModes(SAME),
    ],
    ids=str,
)
def test_text_lists_and_values_say_the_same(written: Any) -> None:
    modes = LayerModes.of(written)
    assert modes.runs == SAME and modes.num_layers == 32
    assert str(modes) == "full:0-15,selective:16-23,off:24-31"
    assert LayerModes.of(str(modes)) == modes


def test_one_layer_needs_one_number() -> None:
    assert LayerModes.of("off:1,full:0").runs == (("full", 1), ("off", 1))


@pytest.mark.parametrize(
    ("written", "because"),
    [
        ("full:0-3,off:6-7", "layer 4 has no mode"),
        ("full:1-3", "layer 0 has no mode"),
        ("full:0-7,off:2-3", "layer 2 has two modes"),
        ("half:0-3", "`half` is no mode: there are off, selective, full, offloaded"),
        ("full:3-0", "`full:3-0` is no mode with the numbers of layers, below 10000"),
        ("full", "`full` is no mode with the numbers of layers, below 10000"),
        ("full:0-9999999999", "`full:0-9999999999` is no mode with the numbers of layers, below 10000"),
        ("full:0-10000", "`full:0-10000` is no mode with the numbers of layers, below 10000"),
        ("", "it names 0 layers; there may be 1 to 10000"),
        ([["", 3]], "`` is no mode: there are off, selective, full, offloaded"),
        ([["full", 0]], "full has no layers, and 1 is the least"),
        ([["full", True]], "runs are pairs of a mode and a whole number of layers"),
        (["full"], "runs are pairs of a mode and a whole number of layers"),
        ([["full", 99_999]], "it names 99999 layers; there may be 1 to 10000"),
    ],
    ids=str,
)
def test_what_does_not_say_it_is_refused(written: Any, because: str) -> None:
    with pytest.raises(RequestError) as caught:
        LayerModes.of(written)
    assert caught.value.what == "--activation-checkpointing does not give each layer one mode"
    assert tuple(caught.value.because) == (because,)
    assert caught.value.hint


def test_a_tiled_mlp_contradicts_it() -> None:
    with pytest.raises(RequestError) as caught:
        Request(layer_modes=LayerModes(SAME), mlp="tiled")
    assert caught.value.what.startswith("--mlp tiled is impossible with --activation-checkpointing full:0-15,")
    assert caught.value.because and caught.value.hint
