"""Contexts that others measured lie in the range that is planned with; docs/facts/cuda.md has the figures from here."""

from collections.abc import Iterator

import pytest

from frugal.config.hardware import context
from frugal.config.hardware.cluster import CARDS
from frugal.config.hardware.context import Range
from frugal.units import MIB

ADA_142 = 142 * 1536  # threads of an RTX 6000 Ada, which is no known card
ROUNDING = 15 * MIB  # figures from out-of-memory messages: three roundings to 0.01 GiB

WITHOUT_NCCL: list[tuple[str | int, int, str]] = [
    ("t4-16g", 140, "FoundationVision/GenerateU#10"),
    ("t4-16g", 135, "Zheng-Chong/CatVTON#133"),
    ("a10-24g", 225, "zai-org/CogVLM#236"),
    ("rtx4090-24g", 398, "hiyouga/LlamaFactory#1936, bare"),
    ("rtx4090-24g", 470, "pinokiofactory/flux-webui#11"),
    ("rtx4090-24g", 503, "3DTopia/Phidias-Diffusion#8"),
    ("rtx4090-24g", 520, "huggingface/lora-fast#1"),
    (ADA_142, 426, "unslothai/unsloth-zoo#1053, bare"),
    (ADA_142, 430, "DINGYANB/MTVCrafter#21"),
    ("l40s-48g", 513, "huggingface/sentence-transformers#3214"),
    ("a100-80g", 409, "HiDream-ai/VAREdit#6"),
    ("h100-80g", 540, "OEvortex/unsloth#20, bare"),
    ("h200-141g", 619, "bench.gpu.context, bare"),
    ("h200-141g", 765, "bench.gpu.context, products and attention"),
]
"""Card or threads, MiB, source. `bare`: processes that did nothing."""

WITH_NCCL = [
    ("rtx3080-10g", 8, 369, "huggingface/trl#3436"),
    ("rtx4090-24g", 8, 625, "meta-pytorch/torchtune#2071"),
    ("a100-80g", 2, 903, "meta-pytorch/torchrec#3580"),
    ("a100-80g", 2, 997, "meta-pytorch/torchrec#3580"),
    ("a100-80g", 8, 1232, "hiyouga/LlamaFactory#9510"),
    ("h100-80g", 8, 1636, "OEvortex/unsloth#20"),
]
"""Card, ranks, MiB, source."""


def ranges() -> Iterator[tuple[str, int, Range]]:
    """Source, measured bytes and the range that is planned with."""
    for card, mib, source in WITHOUT_NCCL:
        if isinstance(card, int):
            yield source, mib * MIB, context.driver_and_kernels(card)
        else:
            yield source, mib * MIB, CARDS[card].context_range(CARDS[card].memory_bytes, 1)
    for name, num_ranks, mib, source in WITH_NCCL:
        yield source, mib * MIB, CARDS[name].context_range(CARDS[name].memory_bytes, num_ranks)


@pytest.mark.parametrize(("source", "measured", "found"), ranges())
def test_a_measured_context_is_in_the_range(source: str, measured: int, found: Range) -> None:
    assert found.least - ROUNDING <= measured <= found.most + ROUNDING, source


def test_what_is_planned_is_no_less_than_what_was_measured_nine_times_in_ten() -> None:
    low = [found.planned < measured for _, measured, found in ranges()]
    assert sum(low) <= len(low) / 10
