"""A loss summed over any cut of a batch is transformers' own mean loss, and a dummy adds exactly nothing."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bench.ranks import Ranks
from frugal.data.tokenizer import byte_tokenizer
from frugal.models import transformers_internals
from frugal.models.objectives import CausalLM, MaskedLM, Objective, Sample, Seq2Seq, SequenceClassification, SummedLoss
from frugal.units import IGNORED
from tests.engine.engines import plan_here, running
from tests.engine.gradients import ROUNDINGS, SGD, ULP, relative_error, with_bound
from tests.engine.small_models import VOCABULARY, ragged_samples, tiny

CASES = [
    ("causal-lm", "gpt2"),
    ("masked-lm", "bert"),
    ("seq2seq", "t5"),
    ("seq2seq", "marian"),
    ("sequence-classification", "bert"),
    ("sequence-classification", "gpt2"),
]


@pytest.fixture(autouse=True, scope="module")
def masks_as_in_training() -> None:
    transformers_internals.always_use()


def objective_for(task: str, family: str) -> Objective:
    match task:
        case "causal-lm":
            return CausalLM(0)
        case "masked-lm":
            return MaskedLM(pad_id=0, mask_id=3, vocab_size=VOCABULARY, special_ids=(1, 2))
        case "seq2seq":
            return Seq2Seq(0, start_id=0)
    return SequenceClassification(0, bidirectional=family == "bert")


def samples_for(task: str, number: int) -> list[Sample]:
    generator = random.Random(5)
    samples: list[Sample] = list(ragged_samples(number))
    if task == "causal-lm":
        return samples
    texts = [[max(4, token) for token in sample["input_ids"]] for sample in samples]
    if task == "masked-lm":
        return [{"input_ids": text} for text in texts]
    if task == "seq2seq":
        return [{"input_ids": text, "labels": [*text[::-2], 2]} for text in texts]
    return [{"input_ids": text, "label": generator.randrange(3)} for text in texts]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("task", "family"), CASES)
def test_the_loss_of_one_sample_is_transformers_own(task: str, family: str) -> None:
    model, objective = tiny(task, family), objective_for(task, family)
    for sample in samples_for(task, 5):
        batch = objective.collate([sample])
        theirs = model(**{name: tensor for name, tensor in batch.items() if name != "decoder_input_ids"}).loss
        loss = objective.loss_sum(model, batch).item() / objective.count(batch)
        assert loss == pytest.approx(theirs.item(), rel=ROUNDINGS * ULP)  # of the same logits


@pytest.mark.parametrize(("task", "family"), CASES)
def test_the_summed_loss_and_its_gradient_are_the_same_for_any_cut(task: str, family: str) -> None:
    model, objective, samples = tiny(task, family).double(), objective_for(task, family), samples_for(task, 12)

    def total(cut: int) -> tuple[float, int, dict[str, Tensor]]:
        model.zero_grad()
        loss, count = 0.0, 0
        for start in range(0, len(samples), cut):
            batch = objective.collate(samples[start : start + cut])
            part = objective.loss_sum(model, batch)
            part.backward()
            loss, count = loss + part.item(), count + objective.count(batch)
        return loss, count, gradients(model)

    loss, count, whole = total(12)
    for cut in (1, 5):
        other_loss, other_count, parts = total(cut)
        assert other_count == count
        assert other_loss == pytest.approx(loss, rel=2 * ROUNDINGS * ULP)  # the loss is in fp32, all else in fp64
        assert relative_error(parts, whole) < 2 * ROUNDINGS * ULP


@pytest.mark.parametrize(("task", "family"), CASES)
def test_a_dummy_counts_nothing_and_its_zero_gradients_arrive_in_the_order_of_a_real_batch(
    task: str, family: str
) -> None:
    model, objective = tiny(task, family), objective_for(task, family)
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))

    def taken(samples: list[Sample]) -> tuple[list[str], float, int]:
        arrived.clear()
        model.zero_grad(set_to_none=True)
        batch = objective.collate(samples)
        loss = objective.loss_sum(model, batch)
        loss.backward()
        return list(arrived), loss.item(), objective.count(batch)

    order, *_ = taken(samples_for(task, 3))
    assert taken([objective.dummy()]) == (order, 0, 0)
    assert all(not gradient.any() for gradient in gradients(model).values())
    assert taken(samples_for(task, 1))[0] == order


@pytest.mark.parametrize(("task", "family"), CASES)
def test_the_example_is_the_largest_batch(task: str, family: str) -> None:
    batch = objective_for(task, family).example(3, 17)
    assert batch["input_ids"].shape == (3, 17)
    assert set(batch) == set(objective_for(task, family).collate(samples_for(task, 1)))


@pytest.mark.parametrize(("task", "family"), [("masked-lm", "bert"), ("seq2seq", "t5"), ("seq2seq", "marian")])
def test_a_batch_without_padding_takes_the_same_memory_as_a_padded_one(task: str, family: str) -> None:
    model, objective = tiny(task, family), objective_for(task, family)

    def saved_bytes(lengths: list[int]) -> int:
        saved = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.numel() * tensor.element_size()
            return tensor

        samples = [{"input_ids": [5] * length, "labels": [5] * length} for length in lengths]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            objective.loss_sum(model, objective.collate(samples))
        return saved

    assert saved_bytes([32, 32]) == saved_bytes([32, 9])


STEPS, GLOBAL_BATCH = 3, 3


def losses_on_ranks(task: str, family: str, zero_stage: int) -> list[float]:
    """Three SGD steps of three samples on two ranks, one at a time: the last micro-batch is a dummy. Runs on ranks."""
    transformers_internals.always_use()
    samples = samples_for(task, STEPS * GLOBAL_BATCH)
    plan = plan_here(zero_stage, GLOBAL_BATCH, 1, {**SGD, "learning_rate": 0.1})
    with running(plan, tiny(task, family), objective_for(task, family)) as engine:
        return [engine.train_step(samples[i : i + GLOBAL_BATCH]).loss for i in range(0, len(samples), GLOBAL_BATCH)]


def losses_of_plain_pytorch(task: str, family: str, dtype: torch.dtype) -> list[float]:
    """The same steps, each sample by itself."""
    model, objective = tiny(task, family).to(dtype), objective_for(task, family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples, losses = samples_for(task, STEPS * GLOBAL_BATCH), []
    for start in range(0, len(samples), GLOBAL_BATCH):
        batches = [objective.collate([sample]) for sample in samples[start : start + GLOBAL_BATCH]]
        loss = sum(objective.loss_sum(model, batch) for batch in batches) / sum(map(objective.count, batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("zero_stage", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("task", "family"),
    [("masked-lm", "bert"), ("seq2seq", "t5"), ("seq2seq", "marian"), ("sequence-classification", "bert")],
)
def test_training_on_ranks_with_an_empty_cell_is_that_of_plain_pytorch(
    task: str, family: str, zero_stage: int, two_ranks: Ranks
) -> None:
    expected, bound = with_bound(losses_of_plain_pytorch, task, family)
    for losses in two_ranks.run(losses_on_ranks, task, family, zero_stage):
        assert losses == pytest.approx(expected, rel=bound)


# Masked language models.


def masked(sample: Sample, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    shown, labels = MaskedLM(**{"pad_id": 0, "mask_id": 3, "vocab_size": 260, "special_ids": (1, 2), **changes}).mask(
        sample
    )
    return np.asarray(shown), np.asarray(labels)


LONG = {"input_ids": [1, *(4 + i % 256 for i in range(20_000)), 2]}


def test_fifteen_per_cent_of_the_tokens_are_targets_shown_as_mask_random_or_themselves_80_10_10() -> None:
    shown, labels = masked(LONG)
    tokens, targets = np.asarray(LONG["input_ids"]), labels != IGNORED
    assert targets.sum() == 3000
    assert labels[0] == labels[-1] == IGNORED, "special tokens are no targets"
    assert (shown[targets] == 3).mean() == pytest.approx(0.8, abs=0.03)  # four standard deviations of 3000 draws
    unchanged = (shown[targets] == tokens[targets]).mean()
    assert unchanged == pytest.approx(0.1 + 0.1 / 256, abs=0.022)
    assert shown[targets].min() >= 3, "a special token was shown as a random one"
    assert (shown[~targets] == tokens[~targets]).all()


def test_the_shortest_text_has_a_target_and_one_of_special_tokens_alone_has_none() -> None:
    assert (masked({"input_ids": [1, 77, 2]})[1] == [IGNORED, 77, IGNORED]).all()
    assert (masked({"input_ids": [1, 3, 2]})[1] == IGNORED).all()


def test_the_mask_of_a_sample_does_not_depend_on_its_batch() -> None:
    objective, samples = objective_for("masked-lm", "bert"), samples_for("masked-lm", 6)
    together = objective.collate(samples)["labels"]
    for i, sample in enumerate(samples):
        alone = objective.collate([sample])["labels"][0]
        assert torch.equal(together[i, : len(alone)], alone)


def test_another_draw_and_another_seed_mask_anew() -> None:
    first, *others = (masked({**LONG, "draw": draw}, seed=seed)[1] for draw, seed in ((0, 0), (1, 0), (0, 1)))
    assert not any((first == labels).all() for labels in others)


def test_the_byte_tokenizer_has_what_masking_needs() -> None:
    tokenizer = byte_tokenizer()
    special = {"pad_id": tokenizer.pad_token_id, "mask_id": tokenizer.mask_token_id}
    objective = MaskedLM(**special, vocab_size=len(tokenizer), special_ids=tokenizer.all_special_ids)
    assert len(objective.ordinary_ids) == 256


def test_the_example_of_a_loss_of_one_s_own_may_depend_on_the_sequence_length_and_so_may_what_it_counts() -> None:
    objective = SummedLoss(
        lambda model, batch: model(batch["x"]).sum(),
        example=lambda seq_len: {"x": torch.zeros(seq_len)},
        count=lambda batch: batch["x"].numel(),
    )
    assert objective.example(3, 7)["x"].shape == (3, 7)
    assert objective.count(objective.example(3, 7)) == 21
