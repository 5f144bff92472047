"""Adapters in training, also around a base in 4 bits: exact for any split, checkpoints without the base."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.checkpoint import loading, saving
from frugal.checkpoint.progress import Progress
from frugal.config.adapters import Lora
from frugal.data.tokenizer import byte_tokenizer
from frugal.deepspeed_adapter import checkpoint_files
from frugal.engine import train_step
from frugal.errors import FrugalError, PlanMismatchError, RequestError
from frugal.models.loading import placed
from frugal.models.resolve import resolve
from frugal.planning.plan import Plan
from tests.engine.engines import plan_here, running
from tests.engine.gradients import (
    LEARNING_RATE,
    SGD,
    Gradient,
    bound_by,
    bound_of_losses,
    plain_gradient,
    relative_error,
    whole,
    with_bound,
)
from tests.engine.small_models import TINY, ragged_samples

LORA = "r=4,alpha=8"
KINDS: dict[str, tuple[str, str, str | None]] = {  # base, adapters, quantisation
    "LoRA": ("llama", LORA, None),
    "DoRA": ("llama", f"{LORA},dora", None),
    "conv1d": ("gpt2", LORA, None),
    "nf4": ("llama", LORA, "nf4"),
    "nf4, conv1d": ("gpt2", LORA, "nf4"),
}
ASKED = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pretrained models of a few kinds, fp32."""
    folder = tmp_path_factory.mktemp("bases")
    for seed, (name, family) in enumerate({"llama": "llama", "gpt2": "gpt2", "other": "llama"}.items()):
        torch.manual_seed(seed)
        config = transformers.CONFIG_MAPPING[family].from_dict(TINY[family])
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder


def begin_anywhere(model: torch.nn.Module) -> None:
    """Adapters that already do something: peft's own begin with nothing, and half of their gradient."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def of_one_process(kind: str, bases: Path, dtype: torch.dtype = torch.float32) -> Any:
    """By transformers, peft and bitsandbytes, with the same adapters."""
    base, lora, quantize = KINDS[kind]
    how = {"quantization_config": ASKED} if quantize else {}
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", use_dora="dora" in lora
    )
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(bases / base, dtype=torch.float32, **how), config
    )
    begin_anywhere(model)
    return (model if quantize else model.to(dtype)).train()


def reference_gradient(kind: str, bases: Path, global_batch: int) -> tuple[Gradient, float]:
    """With how far off a right one may be; bitsandbytes knows no fp64: by how far two orders of its sums are apart."""
    samples = ragged_samples(global_batch)
    if KINDS[kind][2] is None:
        return with_bound(lambda dtype: plain_gradient(of_one_process(kind, bases, dtype), samples))
    exact, other = (plain_gradient(of_one_process(kind, bases), samples, size) for size in (1, global_batch))
    return exact, 2 * bound_by(other, exact)


def plan_for(kind: str, zero_stage: int, split: Any = (4, 1), request: Any = None, **strategy: Any) -> Plan:
    """Of ZeRO-3 some parameters stay whole."""
    _, lora, quantize = KINDS[kind]
    return plan_here(
        zero_stage, *split, {"lora": Lora.of(lora), "quantize": quantize, **(request or {})},
        **{"persistence_threshold_elements": 100, **strategy},
    )  # fmt: skip


def build(plan: Plan, base: Path, seed: int = 0) -> torch.nn.Module:
    """A model as a run reads and quantises it. Runs on ranks."""
    spec = replace(resolve(str(base)), lora=plan.request.lora, quantize=plan.request.quantize)
    return placed.build(spec, plan, torch.device("cpu"), seed=seed)


def measured_gradient(
    kind: str, bases: Path, zero_stage: int, split: Any, strategy: dict[str, Any]
) -> tuple[Gradient, list[str]]:
    """Return what one SGD step has taken off of adapters, by its gradient; and what else has changed. Runs on ranks."""
    plan, samples = plan_for(kind, zero_stage, split, SGD, **strategy), ragged_samples(split[0])
    model = build(plan, bases / KINDS[kind][0])
    begin_anywhere(model)
    with running(plan, model) as engine:
        before = whole(engine)
        engine.evaluate(samples)
        engine.train_step(samples)
        trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
        after = whole(engine)
    gradient = {name: (before[name] - after[name]) / LEARNING_RATE for name in trained}
    return gradient, [name for name in before if name not in trained and not torch.equal(before[name], after[name])]


UNEVEN, MIXED = (10, (3, 2, 1)), {"activation_checkpointing": "selective", "loss": "tiled", "offload_optimizer": "cpu"}
OFFLOADED = {"offload_optimizer": "cpu", "offload_parameters": "cpu", "loss": "tiled"}
IN_EVERY_RUN = [
    ("LoRA", "three_ranks", 3, UNEVEN, {}),
    ("LoRA", "two_ranks", 2, (4, 1), MIXED),
    ("DoRA", "two_ranks", 3, (4, 1), {}),
    ("conv1d", "two_ranks", 3, (4, 1), {}),
    ("nf4", "two_ranks", 3, (4, 1), {"activation_checkpointing": "selective"}),
]
MORE = [
    ("nf4", "three_ranks", 3, UNEVEN, {}),
    ("nf4", "two_ranks", 2, (4, 1), MIXED),
    *((kind, "one_rank", stage, (4, 2), {}) for kind in ("LoRA", "nf4") for stage in (0, 3)),
    *((kind, "two_ranks", stage, (4, 2), {}) for kind in KINDS for stage in (0, 1, 2)),
    *(("LoRA", "three_ranks", stage, UNEVEN, {}) for stage in (0, 1, 2)),
    ("nf4, conv1d", "two_ranks", 3, (4, 1), {}),
    ("LoRA", "two_ranks", 3, (4, 1), {"activation_checkpointing": "offloaded"}),
    ("LoRA", "two_ranks", 3, (4, 1), {"activation_checkpointing": "selective"}),
    *(
        (kind, "two_ranks", 3, (4, 1), strategy)
        for kind in ("LoRA", "nf4")
        for strategy in (OFFLOADED, {"activation_checkpointing": "full"})
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fixture", "zero_stage", "split", "strategy"),
    [*IN_EVERY_RUN, *(pytest.param(*row, marks=EXHAUSTIVE) for row in MORE)],
)
def test_the_gradient_is_that_of_the_libraries_alone_also_after_an_evaluation_and_the_base_stays(
    kind: str, fixture: str, zero_stage: int, split: Any, strategy: dict[str, Any], bases: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    ranks: Ranks = request.getfixturevalue(fixture)
    reference, bound = reference_gradient(kind, bases, split[0])
    for gradient, others in ranks.run(measured_gradient, kind, bases, zero_stage, split, strategy):
        assert others == []
        assert gradient.keys() == reference.keys()
        assert relative_error(gradient, reference) < bound


# Checkpoints hold adapters and their states; the base is read, and quantised, again.

DATA = ragged_samples(4, longest=24)


def losses(
    kind: str, bases: Path, zero_stage: int, precision: str, save: Path | None = None, load: Path | None = None
) -> list[float]:
    """Losses of five steps, with a checkpoint after the third, or of two from there; runs on ranks."""
    request = {"learning_rate": 1e-2, "precision": precision}
    plan = plan_for(kind, zero_stage, request=request, activation_checkpointing="full")
    model = build(plan, bases / KINDS[kind][0])
    begin_anywhere(model)
    with running(plan, model) as engine:
        found = []
        if load:
            loading.load(engine, load)
        else:
            found = [engine.train_step(DATA).loss for _ in range(3)]
        if save:
            saving.save(engine, save, Progress(step=3))
        return found + [engine.train_step(DATA).loss for _ in range(2)]


@pytest.mark.parametrize(
    ("kind", "zero_stage", "precision", "others"),
    [
        ("LoRA", 2, "bf16", [("one_rank", 2), ("two_ranks", 3)]),
        *(
            pytest.param(*row, marks=EXHAUSTIVE)
            for row in (
                ("LoRA", 0, "fp32", [("one_rank", 3), ("two_ranks", 2)]),
                ("LoRA", 3, "fp32", [("one_rank", 0), ("two_ranks", 1)]),
                ("nf4", 0, "fp32", [("one_rank", 3), ("two_ranks", 2)]),
                ("nf4", 3, "fp32", [("one_rank", 0), ("two_ranks", 1), ("three_ranks", 3)]),
            )
        ),
    ],
)
def test_a_run_goes_on_from_a_checkpoint_without_the_base_on_any_layout(
    kind: str, zero_stage: int, precision: str, others: list[tuple[str, int]], bases: Path, tmp_path: Path,
    two_ranks: Ranks, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    whole_run = two_ranks.run(losses, kind, bases, zero_stage, precision, tmp_path)[0]
    assert whole_run == sorted(whole_run, reverse=True)
    again = two_ranks.run(losses, kind, bases, zero_stage, precision, None, tmp_path)[0]
    assert again == whole_run[3:]  # bit for bit
    if precision == "bf16":
        bound = 2**-8  # it keeps 8 bits of each sum
    elif kind == "nf4":
        bound = 5 * reference_gradient(kind, bases, 4)[1]  # as many steps
    else:
        bound = bound_of_losses(lambda: of_one_process(kind, bases), [DATA] * 5, learning_rate=1e-2)
    for fixture, other in others:
        ranks: Ranks = request.getfixturevalue(fixture)
        found = ranks.run(losses, kind, bases, other, precision, None, tmp_path)[0]
        assert found == pytest.approx(whole_run[3:], rel=bound)
    for file in (tmp_path / "step-000003").glob("*model_states.pt"):
        states = checkpoint_files.read(file)
        assert all("lora_" in name for name in states["module"])
        assert not states["frozen_param_fragments"]


def on_other_models(kind: str, folder: Path, bases: Path, changes: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return what loading says to each base and request; runs on ranks."""
    messages = []
    for base, request in changes:
        plan = plan_for(kind, 3, request=request)
        with running(plan, build(plan, bases / base)) as engine:
            try:
                loading.load(engine, folder)
            except FrugalError as error:
                messages.append(f"{error.exit_code} {error}".replace(f"{folder}/step-000003", "IT"))
    return messages


OTHERS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "LoRA": {
        "4 IT holds adapters of another base model": ("other", {}),
        "4 IT was made with adapters r=4,alpha=8,targets=all-linear, this run has adapters r=4,alpha=9": (
            "llama", {"lora": Lora.of("r=4,alpha=9")}
        ),
        "4 IT was made with adapters r=4,alpha=8,targets=all-linear, this run has adapters r=5": (
            "llama", {"lora": Lora.of("r=5")}
        ),
    },
    "nf4": {
        "4 IT was made with quantised weights nf4, this run has no quantised": ("llama", {"quantize": None}),
        "4 IT holds adapters of another base model": ("other", {}),
    },
}  # fmt: skip
"""What is said of the checkpoint of a kind, by the base and the request of the run that is to go on from it."""


@pytest.mark.parametrize("kind", ["LoRA", pytest.param("nf4", marks=EXHAUSTIVE)])
def test_adapters_of_another_base_and_other_adapters_are_refused(
    kind: str, bases: Path, tmp_path: Path, one_rank: Ranks
) -> None:
    one_rank.run(losses, kind, bases, 2, "fp32", tmp_path)
    said = one_rank.run(on_other_models, kind, tmp_path, bases, list(OTHERS[kind].values()))[0]
    assert all(each.startswith(expected) for each, expected in zip(said, OTHERS[kind], strict=True)), said


def trained_and_saved(folder: Path, base: Path, zero_stage: int) -> torch.Tensor:
    """The logits of a trained model, which is saved; runs on ranks."""
    plan = plan_for("LoRA", zero_stage, request={"learning_rate": 1e-2})
    spec = resolve(str(base))
    with running(plan, build(plan, base)) as engine:
        for _ in range(3):
            engine.train_step(DATA)
        saving.save_model(engine, folder, byte_tokenizer(), uses_cache=spec.uses_cache)
        with torch.no_grad():
            return engine.module.eval()(input_ids=torch.arange(16)[None]).logits


@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=EXHAUSTIVE), 3])
def test_peft_loads_the_final_folder_and_says_the_same(
    zero_stage: int, bases: Path, tmp_path: Path, two_ranks: Ranks
) -> None:
    logits = two_ranks.run(trained_and_saved, tmp_path, bases / "llama", zero_stage)[0]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(bases / "llama")
    base = transformers.AutoModelForCausalLM.from_pretrained(bases / "llama").eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        before = base(input_ids=tokens).logits
        loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
        theirs = loaded(input_ids=tokens).logits
        exact = {"logits": loaded.double()(input_ids=tokens).logits}
    assert relative_error({"logits": logits}, exact) < bound_by({"logits": theirs}, exact)
    assert not torch.allclose(before, logits, atol=1e-3)


def test_adapters_of_random_weights_are_not_trained() -> None:
    with pytest.raises(RequestError, match="--lora would freeze random weights"):
        replace(resolve("gpt2"), lora=Lora.of("r=4")).refuse_random_base()


def test_a_run_takes_the_model_that_its_plan_is_for_whose_weights_are_counted_as_they_were(bases: Path) -> None:
    plain = replace(resolve(str(bases / "llama")), lora=Lora.of(LORA))
    number = sum(parameter.numel() for parameter in plain.build(dtype=torch.float32).parameters())
    model = replace(plain, quantize="nf4").build(dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) < number
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    made = plan_by_hand(world_size=1, global_batch=4, micro_batch=4, zero_stage=0, request={"lora": Lora.of(LORA)})
    right = replace(made.model, parameters=number, trainable_parameters=trained)
    train_step.refuse_other_model(replace(made, model=right), model)
    for other in (replace(right, parameters=number + 1), replace(right, trainable_parameters=trained - 1)):
        with pytest.raises(PlanMismatchError, match="the plan is for another model"):
            train_step.refuse_other_model(replace(made, model=other), model)
