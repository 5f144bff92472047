"""Sources with weights: their shares are exact, the order is that of the seed alone, and all of it is drawn."""

import json
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.data.batches import GlobalBatches
from frugal.data.corpus import lengths_of, read_training_data
from frugal.data.mixture import Mixture, shares
from tests.engine.corpora import refusal, write_jsonl


class Part(list[Any]):
    """Samples of as many tokens each."""

    def __init__(self, name: str, number: int, length: int = 10) -> None:
        super().__init__((name, i) for i in range(number))
        self.lengths = np.full(number, length)
        self.counted_tokens = self.lengths


def mixture(*parts: tuple[str, int, str]) -> Mixture:
    made = [Part(name, number, 10 * (i + 1)) for i, (name, number, _) in enumerate(parts)]
    return Mixture(made, [Fraction(weight) for *_, weight in parts], [name for name, *_ in parts])


def drawn(mixed: Mixture, number: int, seed: int = 0) -> list[Any]:
    return [mixed[i] for i in mixed.drawn(np.arange(number), seed).tolist()]


@pytest.mark.parametrize(
    "weights", [("7/10", "3/10"), ("1/3", "2/3"), ("1/3", "1/3", "1/3"), ("12345/99999", "87654/99999")]
)
def test_every_block_has_the_share_of_each_source(weights: tuple[str, ...]) -> None:
    mixed = mixture(*((f"p{i}", 100 + i, weight) for i, weight in enumerate(weights)))
    size = sum(mixed.counts)
    assert size >= 1000
    for block in range(3):
        names = Counter(name for name, _ in drawn(mixed, size * (block + 1))[size * block :])
        for i, weight in enumerate(weights):
            assert names[f"p{i}"] == pytest.approx(size * Fraction(weight), abs=0 if size != 10_000 else 1)


def test_each_source_gives_every_sample_once_before_any_twice() -> None:
    mixed = mixture(("large", 900, "3/4"), ("small", 40, "1/4"))
    of_each: dict[str, list[int]] = {"large": [], "small": []}
    for name, number in drawn(mixed, 2000):
        of_each[name].append(number)
    assert sorted(of_each["large"][:900]) == list(range(900)) and of_each["large"][:900] != list(range(900))
    rounds = [of_each["small"][begin : begin + 40] for begin in range(0, 480, 40)]
    assert all(sorted(each) == list(range(40)) for each in rounds)
    assert rounds[0] != rounds[1], "in another order each time"


def test_what_is_drawn_depends_on_its_number_and_the_seed_alone() -> None:
    mixed = mixture(("a", 50, "7/10"), ("b", 3, "3/10"))
    whole = GlobalBatches(mixed, global_batch=7)
    seen = [index for batch in islice(whole.iterate(), 40) for index in batch.indices.tolist()]
    assert seen == mixed.drawn(np.arange(280), 0).tolist()
    assert GlobalBatches(mixed, global_batch=280).at().indices.tolist() == seen, "batches of another size"
    assert whole.at(whole.after(13)).indices.tolist() == seen[91:98], "resumed there"
    assert GlobalBatches(mixed, global_batch=280, seed=1).at().indices.tolist() != seen


def test_batches_of_tokens_take_the_shares_too() -> None:
    mixed = mixture(("a", 50, "1/2"), ("b", 30, "1/2"))
    batches = GlobalBatches(mixed, global_tokens=100)
    taken = list(islice(batches.iterate(), 200))
    assert all(sum(mixed.counted_tokens[batch.indices]) <= 100 for batch in taken)
    seen = [index for batch in taken for index in batch.indices.tolist()]
    assert seen == mixed.drawn(np.arange(len(seen)), 0).tolist()
    assert batches.steps(1) == pytest.approx(80 * 15 / 100, abs=2)


def test_weights_are_read_off_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b:0.7").write_text("a file")
    named = [(each.source, str(each.part)) for each in shares(["a.jsonl:3", "*.txt:1"])]
    assert named == [("a.jsonl", "3/4"), ("*.txt", "1/4")]
    assert shares(["b:0.7", "c.py:rows", "hub/data:en"]) == ()
    odd = [(each.source, str(each.part)) for each in shares(["b:0.7:.3", "c.py:rows:.6"])]
    assert odd == [("b:0.7", "1/3"), ("c.py:rows", "2/3")]
    said = refusal(lambda: shares(["a:0.5", "b:0.7"]))
    assert said.startswith("--data b:0.7 has no weight\n") and "such as --data b:0.7:1, or none" in said
    assert refusal(lambda: shares(["a:0", "c:1"])).startswith("--data a:0 has the weight 0\n")


def test_sources_with_weights_are_kept_apart_and_read_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 1, "vocab_size": 300}
    Path("model.json").write_text(json.dumps(model))
    write_jsonl(tmp_path / "a.jsonl", [{"text": "aaaa"}] * 60)
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "bbbbbbbb", "completion": "b"}] * 20)
    request = Request(model="model.json", seq_len=32, global_batch=4)
    settings = RunSettings(data=("a.jsonl:0.25", "b.jsonl:0.75"), validation_data=("10%",))
    _, corpus = read_training_data(request, settings)
    assert len(corpus.train) == 54 + 18 and len(corpus.validation or ()) == 6 + 2
    assert corpus.report.documents == 80 and corpus.report.formats == {"text": 60, "prompt-completion": 20}
    indices = GlobalBatches(corpus.train, global_batch=1000).at().indices
    assert sum("labels" in corpus.train[i] for i in indices.tolist()) == 750
    assert corpus.provenance.options["weights"] == "1/4, 3/4"
    lengths, *_ = lengths_of(request, settings)
    assert lengths.num_samples == 72
    assert dict(zip(lengths.tokens, lengths.counts, strict=True))[6] == pytest.approx(18, abs=6)
