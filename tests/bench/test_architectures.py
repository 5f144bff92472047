"""What is trained is the loss that a model's authors have given it, for every text model of transformers."""

import json
from collections import Counter

import pytest

from bench.training import architectures
from frugal.models import transformers_internals
from frugal.models.spec import TASKS

FAMILIES = [
    ("causal-lm", "gpt2", False, "exact"),
    ("causal-lm", "bert", False, "refused"),
    ("causal-lm", "mixtral", True, "exact"),
    ("masked-lm", "bert", False, "exact"),
    ("masked-lm", "bart", False, "refused"),
    ("seq2seq", "t5", False, "exact"),
    ("sequence-classification", "roberta", False, "exact"),
]


@pytest.fixture(autouse=True, scope="module")
def masks_as_in_training() -> None:
    transformers_internals.always_use()


@pytest.mark.parametrize(("task", "model_type", "routers", "verdict"), FAMILIES)
def test_the_loss_of_a_family_is_its_own_or_refused(task: str, model_type: str, routers: bool, verdict: str) -> None:
    record = architectures.measure(task, model_type, routers=routers)
    assert record["verdict"] == verdict, architectures.told(record)


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", TASKS)
def test_every_model_has_its_own_loss_or_is_refused(task: str) -> None:
    pairs = [pair for pair in architectures.pairs() if pair[0] == task]
    records = [architectures.measure(task, model_type, routers=routers) for _, model_type, routers in pairs]
    assert not [architectures.told(each) for each in records if each["verdict"] in ("wrong", "failed")]


def test_the_kept_sweep_reaches_its_goals_and_the_table_is_that_of_it() -> None:
    kept = json.loads(architectures.RESULTS.read_text())
    assert all(kept["goals"].values()) and kept["goals"] == architectures.reached(kept["pairs"])
    assert architectures.TABLE.read_text() == architectures.table(kept["pairs"])
    assert Counter(record["task"] for record in kept["pairs"]).keys() == set(TASKS)
