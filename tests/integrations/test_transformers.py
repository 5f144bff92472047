"""transformers' Trainer under a plan, on real ranks, against frugal's own engine."""

import importlib.util
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.adapters import Lora
from frugal.deepspeed_adapter.export import check
from frugal.errors import PlanMismatchError, RequestError
from frugal.integrations.micro_batches import Packs, PlannedBatches
from frugal.integrations.transformers import training_arguments
from frugal.planning.plan import Plan
from tests.engine.gradients import bounds_of_run, relative_error

TINY = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 260, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
STEPS = 5
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is no dependency of frugal: `make trl` tests with it"
)


def samples() -> list[dict[str, Any]]:
    """Eleven, of different lengths; some begin with tokens that are no targets, one has hardly any target."""
    rows = [random.Random(i).choices(range(260), k=5 * i + 4) for i in range(11)]
    return [
        {"input_ids": row, "labels": [-100] * min(3 * i, len(row) - 1) + row[3 * i :]} for i, row in enumerate(rows)
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    tokens, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad(tokens, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in tokens], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def plan(zero_stage: int, lora: str | None = None, *, pack: bool | None = None, **strategy: Any) -> Plan:
    """Global batches of 5 samples on two ranks: in micro-batches of 2 that is 2 and 1, then 1 and 1."""
    request = {"learning_rate": 1e-2, "gradient_clipping": 0.5, "lora": None if lora is None else Lora.of(lora)}
    request |= {"pack": pack}
    return plan_by_hand(
        world_size=2, global_batch=5, micro_batch=2, zero_stage=zero_stage, request=request, strategy=strategy
    )


def packed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Packs of 64 tokens as `frugal train` reads them from its files."""
    from frugal.data.store.arrow_store import ArrowSamples, ArrowWriter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "packs.arrow")
        with ArrowWriter(path, "causal-lm", packs_of=64) as writer:
            trained = [np.array(row["labels"]) != -100 for row in rows]
            writer.write(
                {"input_ids": np.array(row["input_ids"], np.int32), "trained": mask}
                for row, mask in zip(rows, trained, strict=True)
            )
        return list(ArrowSamples(path))


def ours(folder: str, made: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of frugal's engine, and what it has trained, on a rank."""
    import deepspeed

    import frugal
    from frugal.data.batches import GlobalBatches
    from frugal.models import resolve

    spec = resolve.resolve(folder)
    engine = frugal.initialize(spec.build(dtype=torch.float32), made, spec.objective(pack=bool(made.request.pack)))
    rows = packed(samples()) if made.request.pack else samples()
    batches = GlobalBatches(rows, global_batch=5, lengths=[len(row["input_ids"]) for row in rows], seed=7).iterate()
    losses = [engine.train_step(next(batches)).loss for _ in range(STEPS)]
    trained = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    with deepspeed.zero.GatheredParameters(list(trained.values()), enabled=made.strategy.zero_stage == 3):
        weights = {name.replace(".default.", "."): parameter.detach().clone() for name, parameter in trained.items()}
    engine.destroy()
    return losses, weights


def theirs(folder: str, made: Plan, out: str, resume_at: int = 0, kind: str = "Trainer") -> list[float]:
    """The losses that Trainer logs, on a rank; its model is saved to `out`. With `resume_at` it is stopped there, and
    resumed by another Trainer."""
    from transformers import AutoModelForCausalLM

    trainer_class, arguments_class, others = of_trl() if kind == "SFTTrainer" else of_transformers()

    def run(max_steps: int, resume: bool) -> list[float]:
        args = training_arguments(
            made, out, arguments_class, max_steps=max_steps, seed=7, logging_steps=1, report_to=[], disable_tqdm=True,
            save_strategy="steps" if resume_at else "no", save_steps=resume_at or 500, lr_scheduler_type="constant",
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer = trainer_class(model=model, args=args, plan=made, **others)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(out)
        return [record["loss"] for record in trainer.state.log_history if "loss" in record]

    with nothing_left():
        losses = run(resume_at, resume=False) if resume_at else []
        return run(STEPS, resume=bool(losses))


@contextmanager
def nothing_left() -> Iterator[None]:
    """Forget what transformers keeps of a Trainer: the ranks are shared with other tests."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def refused_in_trainer(folder: str, made: Plan, out: str) -> tuple[str, bool]:
    """Return what a rank is told of which another half of the model's ways is taken, and whether its weights are as
    they were."""
    from transformers import AutoModelForCausalLM, TrainingArguments

    from frugal.integrations.transformers import PlannedTrainer

    args = training_arguments(made, out, TrainingArguments, max_steps=2, seed=7, report_to=[], disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rank = torch.distributed.get_rank()
    model.transformer.h[0].forward = model.transformer.h[1 - rank].forward  # of two layers one, another on each rank
    model.transformer.h[1].forward = lambda hidden, *_, **__: hidden
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = PlannedTrainer(model=model, args=args, plan=made, train_dataset=samples(), data_collator=collate)
    with nothing_left(), pytest.raises(RequestError) as error:
        trainer.train()
    return str(error.value), all(torch.equal(before[name], each) for name, each in model.named_parameters())


def test_ranks_that_use_different_parameters_in_a_trainer_are_refused(
    folder: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    for text, is_as_before in two_ranks.run(refused_in_trainer, folder, plan(2), str(tmp_path)):
        assert text.startswith("in the same micro-step ranks use different parameters, or the same in another order\n")
        assert "rank 0 reduces gradients of transformer.h.1." in text
        assert text.endswith(
            "use frugal train, or --zero-stage 0: Trainer cannot run a global batch again in one order"
        )
        assert is_as_before


def of_transformers() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import TrainingArguments

    from frugal.integrations.transformers import PlannedTrainer

    return PlannedTrainer, TrainingArguments, {"train_dataset": samples(), "data_collator": collate}


def of_trl() -> tuple[Any, Any, dict[str, Any]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]  # the tests that need it are skipped

    from frugal.data.tokenizer import byte_tokenizer
    from frugal.integrations.transformers import PlannedMixin

    class Planned(PlannedMixin, SFTTrainer):  # type: ignore[misc]
        """As the documentation says."""

    return Planned, SFTConfig, {"train_dataset": Dataset.from_list(samples()), "processing_class": byte_tokenizer()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(**{name: value for name, value in TINY.items() if name != "model_type"})
    ).save_pretrained(path)
    return str(path)


def bounds(folder: str) -> tuple[float, float, float]:
    """Return how far losses, norms and weights of such runs may be apart, relative."""
    from transformers import AutoModelForCausalLM

    from frugal.data.batches import GlobalBatches
    from frugal.models import resolve

    rows = samples()
    drawn = GlobalBatches(rows, global_batch=5, lengths=[len(row["input_ids"]) for row in rows], seed=7).iterate()
    return bounds_of_run(
        lambda: AutoModelForCausalLM.from_pretrained(folder), [next(drawn)[:] for _ in range(STEPS)],
        resolve.resolve(folder).objective(), learning_rate=1e-2,
    )  # fmt: skip


ZERO_2, ZERO_3, PACKS = "ZeRO-2", "ZeRO-3, full checkpointing, tiled loss", "packs, tiled loss"
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    ZERO_2: (2, {}),
    ZERO_3: (3, {"activation_checkpointing": "full", "loss": "tiled"}),
    PACKS: (2, {"pack": True, "loss": "tiled"}),
}


@pytest.mark.parametrize(
    ("kind", "strategy", "resume_at"),
    [
        ("Trainer", ZERO_3, 0),
        ("Trainer", PACKS, 0),
        pytest.param("Trainer", ZERO_2, 0, marks=pytest.mark.exhaustive),
        pytest.param("Trainer", ZERO_2, 4, marks=pytest.mark.exhaustive),
        *(pytest.param("SFTTrainer", strategy, 0, marks=needs_trl) for strategy in STRATEGIES),
    ],
)
def test_a_trainer_under_a_plan_has_the_losses_of_frugals_engine_also_where_it_is_resumed(
    folder: str, two_ranks: Ranks, tmp_path: Path, kind: str, strategy: str, resume_at: int
) -> None:
    """Uneven micro-batches, masked labels, lengths that differ, clipping, and a batch over the end of an epoch."""
    stage, others = STRATEGIES[strategy]
    made = plan(stage, **others)
    ((expected, _), _) = two_ranks.run(ours, folder, made)
    (losses, _) = two_ranks.run(theirs, folder, made, str(tmp_path), resume_at, kind)
    assert losses == pytest.approx(expected, rel=bounds(folder)[0])


LORA = "r=4,targets=c_attn"


@pytest.mark.parametrize("strategy", [ZERO_2, pytest.param(ZERO_3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["Trainer", pytest.param("SFTTrainer", marks=needs_trl)])
def test_adapters_of_a_plan_are_trained_and_saved_as_by_frugals_engine(
    folder: str, two_ranks: Ranks, tmp_path: Path, strategy: str, kind: str
) -> None:
    stage, others = STRATEGIES[strategy]
    made = plan(stage, LORA, **others)
    ((expected, weights), _) = two_ranks.run(ours, folder, made)
    (losses, _) = two_ranks.run(theirs, folder, made, str(tmp_path), kind=kind)
    assert losses == pytest.approx(expected, rel=bounds(folder)[0])
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == weights.keys()
    assert relative_error({name: part.double() for name, part in saved.items()}, weights) < bounds(folder)[2]


def test_what_a_trainer_cannot_do_is_refused() -> None:
    made = plan(2)
    with pytest.raises(RequestError, match="cannot fill a global batch of 512 tokens"):
        check(replace(made, batch=replace(made.batch, global_tokens=512)), "hf")
    with pytest.raises(RequestError, match="Accelerate cannot keep packed documents apart as planned\n") as raised:
        check(plan(2, pack=True), "accelerate")
    assert "hint: use --to hf, which can, or plan without --pack" in str(raised.value)
    with pytest.raises(RequestError, match="`per_device_train_batch_size` is 4, and 2 in the plan\n") as raised:
        training_arguments(made, "run", per_device_train_batch_size=4)
    assert "hint: leave it out, or plan for the other value" in str(raised.value)
    with pytest.raises(RequestError, match="`label_smoothing_factor` is"):
        training_arguments(made, "run", label_smoothing_factor=0.1)


@needs_trl
def test_what_would_change_sft_trainers_loss_or_memory_is_refused() -> None:
    from trl import SFTConfig

    for name, value in {"max_length": 1024, "packing": True, "padding_free": True, "loss_type": "dft"}.items():
        with pytest.raises(RequestError, match=f"`{name}` is .*{value}.*, and .* in the plan"):
            training_arguments(plan(2), "run", SFTConfig, **{name: value})


def test_samples_longer_than_planned_are_refused() -> None:
    rows = [{"input_ids": [0] * length} for length in (5, 70, 64)]
    with pytest.raises(RequestError, match="sample 1 of train_dataset has 70 tokens\n") as raised:
        PlannedBatches(plan(2), rows, rank=0, seed=1)
    assert "hint: cut what is longer, or plan with --seq-len 70" in str(raised.value)


@pytest.mark.parametrize("wrong", [[{"pixels": [1.0]}], [{"input_ids": [0] * length} for length in (5, 70)]])
def test_what_cannot_be_packed_is_refused_with_a_way_out(wrong: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match=r"hint: (tokenize them, or plan without --pack|cut what is longer)"):
        Packs(wrong, seq_len=64)


def test_a_plan_for_another_model_is_refused(folder: str) -> None:
    from transformers import AutoModelForCausalLM

    from frugal.engine.train_step import refuse_other_model

    made = plan(2)
    made = replace(made, model=replace(made.model, parameters=1000, trainable_parameters=1000))
    with pytest.raises(PlanMismatchError, match="made for 1,000 parameters, 1,000 trained; the model has"):
        refuse_other_model(made, AutoModelForCausalLM.from_pretrained(folder))


def test_every_sample_is_drawn_once_an_epoch_whatever_the_ranks_and_lengths() -> None:
    made, rows = plan(2), samples()
    drawn: list[int] = []
    for rank in range(2):
        sampler = PlannedBatches(made, rows, rank, seed=1)
        for epoch in range(5):
            sampler.set_epoch(epoch)
            micro_batches = list(sampler)
            assert len(micro_batches) == len(sampler)
            drawn += [index for micro_batch in micro_batches for index in micro_batch if index >= 0]
    assert len(drawn) == 5 * 3 * 5  # epochs of three global batches of five
    counts = [drawn.count(index) for index in range(len(rows))]
    assert max(counts) - min(counts) <= 1
