"""Decoder inputs are made as the model's own class makes them, in the engine and in exported scripts."""

import sys
from typing import Any

import pytest
import torch

from frugal.models.losses import decoder_inputs
from frugal.models.resolve import resolve

LABELS = torch.tensor([[11, 12, 13, 2, 9], [14, 2, 9, -100, -100]])  # 9: a language
SHIFTED = {
    "mbart": [[9, 11, 12, 13, 2], [9, 14, 2, 9, 1]],
    "plbart": [[9, 11, 12, 13, 2], [9, 14, 2, 9, 1]],
    "m2m_100": [[2, 11, 12, 13, 2], [2, 14, 2, 9, 1]],
    "bart": [[2, 11, 12, 13, 2], [2, 14, 2, 9, 1]],
    "t5": [[0, 11, 12, 13, 2], [0, 14, 2, 9, 0]],
    "fsmt": [[9, 11, 12, 13, 2], [9, 14, 2, 9, 1]],
}


@pytest.mark.parametrize("model_type", SHIFTED)
def test_a_family_moves_labels_in_its_own_way(model_type: str) -> None:
    objective: Any = resolve(model_type, task="seq2seq").objective()
    samples = [{"input_ids": [5, 2], "labels": row} for row in ([11, 12, 13, 2, 9], [14, 2, 9])]
    assert objective.collate(samples)["decoder_input_ids"].tolist() == SHIFTED[model_type]


@pytest.mark.parametrize("model_type", ["mbart", "m2m_100", "t5"])
def test_the_source_in_an_exported_script_does_the_same(model_type: str) -> None:
    model: Any = resolve(model_type, task="seq2seq").build(dtype=torch.float32, device="meta")
    script: dict[str, Any] = {"sys": sys}
    exec(decoder_inputs.source(), script)
    script["complete"](model.config)
    before = LABELS.clone()
    assert script["decoder_inputs"](model, LABELS).tolist() == SHIFTED[model_type]
    assert torch.equal(LABELS, before)
