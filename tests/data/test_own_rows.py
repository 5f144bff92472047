"""Rows of numbers are the samples of a module with a loss of its own, as they are; texts become tokens as before."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.data import corpus
from frugal.data.corpus import lengths_of
from frugal.data.sources import find_sources, rows_of
from frugal.errors import RequestError

pytestmark = pytest.mark.usefixtures("offline")

MINE = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layer(x), y)

def model():
    return Mine(), {"x": torch.zeros(2), "y": 0}

class Rows(torch.utils.data.Dataset):
    read = []

    def __len__(self):
        return 3

    def __getitem__(self, i):
        self.read.append(i)
        if i == 3:
            raise IndexError
        return {"x": [i, 0.5], "y": i % 2}

def generated():
    for i in range(3):
        yield {"x": [i, 0.5], "y": i % 2}

def tuples():
    return [([i, 0.5], i % 2) for i in range(3)]

def texts():
    return [{"text": "some words", "y": 1}] * 3

def fails():
    raise KeyError("wav")
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"x": [{i}, 0.5], "y": {i % 2}}}\n' for i in range(3)))


def lengths(data: str) -> Any:
    return lengths_of(Request(model="mine.py:model", seq_len=64), RunSettings(data=(data,)))[0]


@pytest.mark.parametrize("data", ["mine.py:Rows", "mine.py:generated", "rows.jsonl"])
def test_rows_of_numbers_have_no_lengths_and_stay_as_they_are(data: str) -> None:
    assert lengths(data) is None
    rows = rows_of(*find_sources([data]))
    assert [rows[i] for i in range(len(rows))] == [{"x": [i, 0.5], "y": i % 2} for i in range(3)]


def test_a_datasets_rows_are_read_when_they_are_asked_for() -> None:
    rows = rows_of(*find_sources(["mine.py:Rows"]))
    assert rows.read == []
    assert rows[2]["x"] == [2, 0.5] and rows.read == [2]


def test_tuples_are_rows_and_texts_become_tokens() -> None:
    assert lengths("mine.py:tuples") is None
    assert lengths("mine.py:texts") is not None


def test_a_function_that_fails_is_named() -> None:
    with pytest.raises(RequestError, match=r"mine.py:fails failed\n  because KeyError: 'wav'"):
        lengths("mine.py:fails")


@pytest.mark.parametrize("percent", [0, 1, 5, 34, 50, 67, 70, 99])
def test_a_part_of_rows_is_kept_for_validation_if_one_is_asked_for(
    percent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_refuse_different_data", lambda own: None)  # there are no other ranks
    settings = RunSettings(data=("mine.py:Rows",), validation_data=(f"{percent}%",))
    plan: Any = SimpleNamespace(request=Request(model="mine.py:model", seq_len=64))
    data = corpus.read_samples(plan, settings)
    assert (len(data.validation) > 0) == (percent > 0)
    assert len(data.training) + len(data.validation) == 3 and len(data.training) > 0
