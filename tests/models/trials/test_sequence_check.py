"""Whether samples of a model can be split over ranks is found by running a small one of their kind."""

import pytest
import transformers

from frugal.config.request import Request
from frugal.errors import RequestError
from frugal.models import transformers_internals
from frugal.models.resolve import resolve_request
from frugal.models.trials.model_check import check_sequence_parallel, on_parts
from tests.engine.gradients import with_bound
from tests.engine.sequence.runs import model, plain_gradient


def reason(kind: str, size: int = 2, pack: bool = False, **request: str) -> str:
    """Return why samples of this kind of model cannot be split; empty where they can."""
    try:
        check_sequence_parallel(resolve_request(Request(model=kind, **request)), size, pack=pack)
    except RequestError as error:
        return error.because[0]
    return ""


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "gemma3_text"])
def test_models_whose_positions_meet_in_attention_alone_can_be_split(kind: str, pack: bool) -> None:
    assert not reason(kind, pack=pack)


@pytest.mark.parametrize(
    ("kind", "size", "why"),
    [
        ("jamba", 2, "not only its attention mixes positions"),
        ("llama4_text", 2, "it counts the positions of a part from 0"),
        ("gpt2", 8, "its 12 attention heads do not divide by 8"),
        ("bloom", 2, "its attention is 'eager'"),
        ("t5", 2, "it trains seq2seq"),
        ("bert", 2, "it trains masked-lm"),
    ],
)
def test_others_are_refused_with_the_reason(kind: str, size: int, why: str) -> None:
    assert why in reason(kind, size)


def test_a_convolution_is_seen(tmp_path: str) -> None:
    layers = ["conv", "full_attention"] * 2
    config = transformers.AutoConfig.for_model(
        "lfm2", num_hidden_layers=4, layer_types=layers, architectures=["Lfm2ForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    assert "not only its attention mixes positions" in reason(str(tmp_path))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_parts_in_one_process_have_the_gradient_of_the_whole(kind: str, size: int) -> None:
    transformers_internals.always_use()
    for pack in (False, True):
        dependence, num_calls = on_parts(model(kind), 256, pack=pack, size=size)
        assert dependence.difference < 2 * with_bound(plain_gradient, kind)[1]
        assert num_calls == 2
