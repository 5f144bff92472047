"""Global batches in the forms in which people have them, on the objectives that collate them again."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.data.given_batch import as_samples
from frugal.errors import RequestError
from frugal.models.objectives import CausalLM, MaskedLM, Objective, Seq2Seq, SequenceClassification, SummedLoss

pad = torch.nn.utils.rnn.pad_sequence
TOKENS = [random.Random(i).choices(range(2, 50), k=3 * i + 2) for i in range(4)]


def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
    return pad([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


MASK = padded([[1] * len(row) for row in TOKENS], 0)
TOKENS_AND_LABELS = {"input_ids": padded(TOKENS, 0), "attention_mask": MASK, "labels": padded(TOKENS, -100)}
TARGETS = [row[::2] for row in TOKENS]
OF: dict[str, tuple[Objective, Any, list[dict[str, Any]]]] = {
    "causal-lm": (CausalLM(), TOKENS_AND_LABELS, [{"input_ids": row, "labels": row} for row in TOKENS]),
    "causal-lm, padded on the left": (
        CausalLM(),
        {name: column.flip(1) for name, column in TOKENS_AND_LABELS.items()},
        [{"input_ids": row[::-1], "labels": row[::-1]} for row in TOKENS],
    ),
    "masked-lm": (
        MaskedLM(pad_id=0, mask_id=1, vocab_size=50),
        TOKENS_AND_LABELS,
        [{"input_ids": row, "labels": row} for row in TOKENS],
    ),
    "seq2seq": (
        Seq2Seq(start_id=1),
        {"input_ids": padded(TOKENS, 0), "attention_mask": MASK, "labels": padded(TARGETS, -100)},
        [{"input_ids": row, "labels": target} for row, target in zip(TOKENS, TARGETS, strict=True)],
    ),
    "sequence-classification": (
        SequenceClassification(0, bidirectional=True),
        {"input_ids": padded(TOKENS, 0), "attention_mask": MASK, "labels": torch.tensor([0, 2, 1, 0])},
        [{"input_ids": row, "label": label} for row, label in zip(TOKENS, [0, 2, 1, 0], strict=True)],
    ),
}


@pytest.mark.parametrize("task", OF)
def test_a_padded_batch_is_its_samples(task: str) -> None:
    objective, batch, samples = OF[task]
    rows = as_samples(batch, objective)
    theirs, ours = objective.collate(rows), objective.collate(samples)
    assert {name: column.tolist() for name, column in theirs.items()} == {
        name: column.tolist() for name, column in ours.items()
    }
    assert rows.lengths.tolist() == [len(row) for row in TOKENS]  # type: ignore[attr-defined]


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


OWN = SummedLoss(_loss, example={"x": torch.zeros(3), "y": torch.tensor(0)})
DATA = TensorDataset(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1]))


def test_tuples_take_the_names_of_the_example() -> None:
    whole = next(iter(DataLoader(DATA, batch_size=5)))
    ours = OWN.collate([{"x": x, "y": y} for x, y in DATA])
    for form in (whole, tuple(whole), [DATA[i] for i in range(5)], {"x": whole[0], "y": whole[1]}):
        theirs = OWN.collate(as_samples(form, OWN))
        assert all(torch.equal(theirs[name], ours[name]) for name in ("x", "y"))


def losses() -> list[float]:
    """Return the losses of one batch in three forms, on a rank."""
    import frugal

    torch.manual_seed(0)
    plan = plan_by_hand(world_size=2, global_batch=5, micro_batch=2, zero_stage=2, request={"learning_rate": 0.0})
    engine = frugal.initialize(nn.Linear(3, 2), plan, OWN)
    whole = next(iter(DataLoader(DATA, batch_size=5)))
    forms: list[Any] = [[{"x": x, "y": y} for x, y in DATA], whole, {"x": whole[0], "y": whole[1]}]
    made = [engine.train_step(form).loss for form in forms] + [engine.evaluate(whole).loss]
    engine.destroy()
    return made


def test_the_engine_takes_every_form(two_ranks: Ranks) -> None:
    (made, _) = two_ranks.run(losses)
    assert made == pytest.approx([made[0]] * 4, rel=5 * 2**-23)  # five sums of fp32


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(RequestError, match="differ in their number of samples\n  because x has 5, y has 4"):
        as_samples({"x": torch.zeros(5, 3), "y": torch.zeros(4)}, OWN)
    with pytest.raises(RequestError, match="a sample has 3 values, and the objective names for 2: x, y"):
        as_samples((torch.zeros(2), torch.zeros(2), torch.zeros(2)), OWN)
    with pytest.raises(RequestError, match="is given as Tensor"):
        as_samples(torch.zeros(3), OWN)
