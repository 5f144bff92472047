"""A mixture put together from traces of single modes is the trace of the mixture."""

from itertools import pairwise
from typing import Any

import pytest

from frugal.config.request import Request
from frugal.dryrun.messages import AskTrace
from frugal.dryrun.trace.trace import trace
from frugal.planning.memory.layer_mixture import LayerMixtures, NotMixableError
from frugal.planning.memory.timeline import MarkKind, ModelTrace
from frugal.planning.strategy import LAYER_MODES, LayerMode
from tests.dryrun.test_trace import FAMILIES, SEQ_LEN, build, objective


def traced(family: str, mode: str, layer_modes: Any = (), **asked: Any) -> ModelTrace:
    usual = {"request": Request(seq_len=SEQ_LEN), "kind": "cuda", "loss": "plain", "zero_stage": 2}
    question = AskTrace(activation_checkpointing=mode, **(usual | asked))
    return trace(build(family), objective(family), question, layer_modes=layer_modes)


def mixtures_of(family: str, *modes: LayerMode, **asked: Any) -> LayerMixtures:
    mixtures = LayerMixtures(traced(family, "off", **asked))
    for mode in modes:
        mixtures.add(mode, traced(family, mode, **asked))
    return mixtures


def says(made: ModelTrace) -> tuple[object, ...]:
    """The stream, and the marks that a ZeRO optimizer acts on."""
    stream = made.stream
    marks = [[(m.event, m.kind, m.number) for m in phase if m.kind < MarkKind.LAYER] for phase in made.marks]
    return stream.fixed, stream.per_sample, stream.events, stream.phases, marks


@pytest.mark.parametrize(
    ("family", "kind", "stage", "modes"),
    [
        ("gpt2", "cpu", 2, ("full", "off")),
        ("llama", "cuda", 3, ("full", "selective", "off")),
        pytest.param("llama", "cuda", 2, ("offloaded", "off"), marks=pytest.mark.exhaustive),
        pytest.param("llama", "cpu", 3, ("selective", "off"), marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", "cuda", 2, ("full", "off"), marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", "cuda", 2, ("offloaded", "full", "selective", "off"), marks=pytest.mark.exhaustive),
        pytest.param("bert", "cuda", 3, ("full", "selective"), marks=pytest.mark.exhaustive),
    ],
)
def test_event_by_event(family: str, kind: Any, stage: int, modes: tuple[LayerMode, ...]) -> None:
    """Whichever layer the mode changes at, where those that keep more come later."""
    mixtures = mixtures_of(family, *modes, kind=kind, zero_stage=stage)
    first = mixtures.num_layers - 2 * len(modes) + 2
    layer_modes = tuple((mode, 2 if i else first) for i, mode in enumerate(modes))
    ours, real = mixtures.trace(layer_modes), traced(family, "budget", layer_modes, kind=kind, zero_stage=stage)
    assert says(ours) == says(real)
    assert (ours.work.num_operators, ours.work.num_recomputed) == (real.work.num_operators, real.work.num_recomputed)
    assert ours.work.recompute_flops_per_sample == pytest.approx(real.work.recompute_flops_per_sample)
    assert ours.work.recompute_traffic.per_sample == pytest.approx(real.work.recompute_traffic.per_sample)
    assert ours.work.moved_per_sample == pytest.approx(real.work.moved_per_sample)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_peaks_of_every_pair_of_modes(family: str) -> None:
    mixtures = mixtures_of(family, "selective", "full", "offloaded")
    for number, mode in enumerate(LAYER_MODES):
        for other in LAYER_MODES[number + 1 :]:
            layer_modes = ((mode, mixtures.num_layers - 3), (other, 3))
            ours, real = mixtures.trace(layer_modes).stream, traced(family, "budget", layer_modes).stream
            for micro_batch in (1, 2, 7):
                assert ours.peak_bytes(micro_batch) == pytest.approx(real.peak_bytes(micro_batch), rel=1e-4)


def test_more_layers_that_keep_everything_never_take_less_memory() -> None:
    mixtures = mixtures_of("gpt2", "full")
    peaks = [
        mixtures.trace(
            tuple((mode, count) for mode, count in (("full", 8 - kept), ("off", kept)) if count)
        ).stream.peak_bytes(4)  # type: ignore[arg-type]
        for kept in range(9)
    ]
    assert all(less <= more for less, more in pairwise(peaks))
    assert peaks[0] == traced("gpt2", "full").stream.peak_bytes(4)
    assert peaks[8] == traced("gpt2", "off").stream.peak_bytes(4)


def test_an_encoder_and_its_decoder_are_layers_in_the_order_in_which_they_run() -> None:
    mixtures = mixtures_of("t5", "full")
    assert mixtures.num_layers == 14
    layer_modes: tuple[tuple[LayerMode, int], ...] = (("full", 9), ("off", 5))
    ours, real = mixtures.trace(layer_modes), traced("t5", "budget", layer_modes)
    assert ours.stream.peak_bytes(5) == real.stream.peak_bytes(5)
    assert ours.work.recompute_flops_per_sample == pytest.approx(real.work.recompute_flops_per_sample, rel=0.1)


def test_traces_of_two_models_are_not_mixed() -> None:
    with pytest.raises(NotMixableError):
        LayerMixtures(traced("gpt2", "off")).add("full", traced("llama", "full"))
