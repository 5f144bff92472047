"""The language-model examples of launch/ train and are planned as they say."""

import subprocess
from pathlib import Path

import pytest

from bench.training.language_model import EVENTS, ROOT, summary, table, trained
from frugal.models import factories

LM = ROOT / "launch" / "lm"


@pytest.mark.exhaustive
def test_a_file_of_the_library_is_in_one_part_only_and_none_is_left_out() -> None:
    parts = {
        name: [row["text"] for row in factories.import_callable(f"{LM}/stdlib.py:{name}")()]
        for name in ("training", "validation", "test")
    }
    assert min(map(len, parts.values())) >= 5
    assert len(parts["training"]) > 20 * len(parts["test"])
    files = factories.import_callable(f"{LM}/stdlib.py:files")()
    assert sum(map(len, parts.values())) == len(files)
    texts = {text for part in parts.values() for text in part}
    assert texts == {path.read_text(encoding="utf-8", errors="replace") for path in files}


@pytest.mark.exhaustive  # a minute
def test_the_small_one_trains_the_same_on_one_rank_and_two(tmp_path: Path) -> None:
    short = ("--steps", "4", "--warmup", "1", "--set", "train.validation-samples=8", "--eval-every", "2")
    runs = {ranks: trained(ranks, tmp_path / str(ranks), short) for ranks in (1, 2)}
    found = summary(runs)
    assert all(found["goals"].values()), found
    for run in runs.values():
        assert run["steps"] == 4
        assert all(1 < run["perplexity"][part] < 260 for part in EVENTS.values())
    assert len(table(runs).splitlines()) == 4


@pytest.mark.exhaustive  # half a minute each
@pytest.mark.parametrize(("size", "cards"), [("medium", 2), ("large", 8)])
def test_the_large_ones_fit_the_machines_they_name(size: str, cards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = subprocess.run([ROOT / "launch" / "lm.sh", size], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f" = {cards} GPUs x micro-batch " in done.stdout
