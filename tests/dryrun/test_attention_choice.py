"""Which attention kernel CUDA takes, against the answers that torch itself gave on every kind of card."""

import lzma
from pathlib import Path

import msgspec
import pytest

from bench.kernels.attention import Choices, arguments
from frugal.config.hardware.cluster import CARDS, kernel_class
from frugal.dryrun.trace.attention_choice import AttentionCall, chosen_kernel

TORCH = msgspec.json.decode(
    lzma.decompress((Path(__file__).parent / "attention_choices.json.xz").read_bytes()), type=Choices
)
CAPABILITIES = {tuple(map(int, name.split("."))): answers for name, answers in TORCH.answers.items()}


@pytest.fixture(scope="module")
def calls() -> list[AttentionCall]:
    """Every case as tensors on meta."""
    made = []
    for case in TORCH.cases:
        query, key, value, mask = arguments(case, "meta")
        made.append(AttentionCall(query, key, value, mask, case.dropout, case.is_causal, case.enable_gqa))
    return made


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_choice_is_torchs_own(calls: list[AttentionCall], capability: tuple[int, int]) -> None:
    """The rule, asked for the class of cards that a dry run is made for, answers as torch on the card."""
    ours = "".join(chosen_kernel(call, kernel_class(capability))[0].upper() for call in calls)
    differing = [case for case, a, b in zip(TORCH.cases, ours, CAPABILITIES[capability], strict=True) if a != b]
    assert not differing, differing[:3]
    assert len(ours) >= 8000


def test_every_card_has_its_answers() -> None:
    """No card of ours is of a capability that torch was not asked on."""
    assert {card.compute_capability for card in CARDS.values()} <= set(CAPABILITIES)
