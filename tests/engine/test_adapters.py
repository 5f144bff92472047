"""Adapters in training: exact for any split, checkpoints without the frozen base, and a folder that peft loads."""

import gc
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
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.engine.engine import Engine, initialize
from frugal.errors import FrugalError, RequestError
from frugal.models import adapters
from frugal.models.objectives import CausalLM
from frugal.models.resolve import resolve
from tests.engine.gradients import (
    LEARNING_RATE,
    SGD,
    Gradient,
    bound_by,
    bound_of_losses,
    relative_error,
    weights,
    with_bound,
)
from tests.engine.small_models import TINY, ragged_samples

LORA = "r=4,alpha=8"


def base(family: str = "llama", seed: int = 0) -> Any:
    """A small model with random weights, fp32."""
    torch.manual_seed(seed)
    config = transformers.CONFIG_MAPPING[family].from_dict(TINY[family])
    return transformers.AutoModelForCausalLM.from_config(config)


def adapted(family: str = "llama", lora: str = LORA) -> Any:
    """The same with adapters that already do something: peft's own begin with nothing, and half of their gradient."""
    device = torch.device("cpu")
    model = adapters.add(base(family), Lora.parse(lora), "causal-lm", dtype=torch.float32, device=device)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def reference_gradient(family: str, lora: str, global_batch: int, dtype: torch.dtype) -> Gradient:
    """Plain PyTorch and peft, one process, every sample by itself."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", use_dora="dora" in lora
    )
    model = peft.get_peft_model(base(family), config)
    model.load_state_dict(adapted(family, lora).state_dict())
    model, objective = model.to(dtype), CausalLM()
    batches = [objective.collate([sample]) for sample in ragged_samples(global_batch)]
    targets = sum(map(objective.count, batches))
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
        )
        (loss / targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def start(world_size: int, zero_stage: int, *, model: Any = None, lora: str = LORA, **how: Any) -> Engine:
    """An engine of a model with adapters, and of parameters some of which stay whole under ZeRO-3."""
    plan = plan_by_hand(
        world_size=world_size, global_batch=how.get("global_batch", 4), micro_batch=how.get("micro_batch", 1),
        zero_stage=zero_stage, request={**how.get("request", {}), "lora": Lora.parse(lora)},
        strategy={"persistence_threshold_elements": 100, **how.get("strategy", {})},
    )  # fmt: skip
    return initialize(adapted(lora=lora) if model is None else model, plan, CausalLM())


def stop(engine: Engine) -> None:
    engine.destroy()
    gc.collect()


def whole(engine: Engine) -> Gradient:
    """A copy of all parameters, trained or not; runs on ranks."""
    import deepspeed

    zero_3 = engine.plan.strategy.zero_stage == 3
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=zero_3):
        return weights(engine.module)


def measured_gradient(
    family: str,
    lora: str,
    zero_stage: int,
    global_batch: int,
    micro_batch: int | tuple[int, ...],
    strategy: dict[str, Any],
) -> tuple[Gradient, list[str]]:
    """What one SGD step has taken off of adapters, by its gradient; and what else has changed. Runs on ranks."""
    before = weights(adapted(family, lora))
    engine = start(
        torch.distributed.get_world_size(), zero_stage, model=adapted(family, lora), lora=lora, request=SGD,
        global_batch=global_batch, micro_batch=micro_batch, strategy=strategy,
    )  # fmt: skip
    engine.train_step(ragged_samples(global_batch))
    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    after = whole(engine)
    stop(engine)
    gradient = {name: (before[name] - after[name]) / LEARNING_RATE for name in trained}
    return gradient, [name for name in before if name not in trained and not torch.equal(before[name], after[name])]


exhaustive = pytest.mark.exhaustive
OFFLOADED = {"offload_optimizer": "cpu", "offload_parameters": "cpu", "loss": "tiled"}
EXACT = [
    ("three_ranks", 3, 10, (3, 2, 1), {}),
    ("two_ranks", 3, 4, 1, {"activation_checkpointing": "full"}),
    ("two_ranks", 2, 4, 1, {"activation_checkpointing": "selective", "loss": "tiled", "offload_optimizer": "cpu"}),
    *(pytest.param("one_rank", stage, 4, 2, {}, marks=exhaustive) for stage in (0, 3)),
    *(pytest.param("two_ranks", stage, 4, 2, {}, marks=exhaustive) for stage in (1, 2)),
    *(pytest.param("three_ranks", stage, 10, (3, 2, 1), {}, marks=exhaustive) for stage in (0, 1, 2)),
    *(
        pytest.param("two_ranks", 3, 4, 1, strategy, marks=exhaustive)
        for strategy in ({"activation_checkpointing": "offloaded"}, OFFLOADED)
    ),
]


@pytest.mark.parametrize(("fixture", "zero_stage", "global_batch", "micro_batch", "strategy"), EXACT)
def test_the_gradient_is_that_of_plain_pytorch_and_peft_and_the_base_stays(
    fixture: str, zero_stage: int, global_batch: int, micro_batch: Any, strategy: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    ranks: Ranks = request.getfixturevalue(fixture)
    reference, bound = with_bound(reference_gradient, "llama", LORA, global_batch)
    for gradient, others in ranks.run(
        measured_gradient, "llama", LORA, zero_stage, global_batch, micro_batch, strategy
    ):
        assert others == []
        assert gradient.keys() == reference.keys()
        assert relative_error(gradient, reference) < bound


@pytest.mark.parametrize(("family", "lora"), [("gpt2", LORA), ("llama", f"{LORA},dora")])
@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=exhaustive), 3])
def test_conv1d_and_dora_are_exact_too(family: str, lora: str, zero_stage: int, two_ranks: Ranks) -> None:
    reference, bound = with_bound(reference_gradient, family, lora, 4)
    ((gradient, others), _) = two_ranks.run(measured_gradient, family, lora, zero_stage, 4, 1, {})
    assert others == []
    assert relative_error(gradient, reference) < bound


# Checkpoints hold adapters and their states, not the base.

DATA = ragged_samples(4, longest=24)
ADAM = {"learning_rate": 1e-2}
RECOMPUTING = {"activation_checkpointing": "full"}


def interrupted(folder: Path, zero_stage: int, precision: str) -> list[float]:
    """Losses of five steps, with a checkpoint after the third; runs on ranks."""
    engine = begun(zero_stage, precision)
    losses = [engine.train_step(DATA).loss for _ in range(3)]
    saving.save(engine, folder, Progress(step=3))
    losses += [engine.train_step(DATA).loss for _ in range(2)]
    stop(engine)
    return losses


def begun(zero_stage: int, precision: str = "fp32", lora: str = LORA, seed: int = 0) -> Engine:
    device, dtype = torch.device("cpu"), DTYPES[precision]
    model = adapters.add(
        base(seed=seed).to(dtype), Lora.parse(lora), "causal-lm", dtype=dtype, device=device, seed=seed
    )
    return start(
        torch.distributed.get_world_size(), zero_stage, model=model, lora=lora, strategy=RECOMPUTING,
        request={**ADAM, "precision": precision},
    )  # fmt: skip


def continued(folder: Path, zero_stage: int, precision: str) -> list[float]:
    """Losses of the fourth step and the fifth, from the checkpoint; runs on ranks."""
    engine = begun(zero_stage, precision)
    loading.load(engine, folder)
    losses = [engine.train_step(DATA).loss for _ in range(2)]
    stop(engine)
    return losses


@pytest.mark.parametrize(
    ("zero_stage", "precision", "others"),
    [
        pytest.param(0, "fp32", [("one_rank", 3), ("two_ranks", 2)], marks=exhaustive),
        pytest.param(2, "bf16", [("one_rank", 2), ("two_ranks", 3)], marks=exhaustive),
        (3, "fp32", [("one_rank", 0), ("two_ranks", 1)]),
    ],
)
def test_a_run_goes_on_from_a_checkpoint_without_the_base_on_any_layout(
    zero_stage: int, precision: str, others: list[tuple[str, int]], tmp_path: Path, two_ranks: Ranks,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    losses = two_ranks.run(interrupted, tmp_path, zero_stage, precision)[0]
    assert losses == sorted(losses, reverse=True)
    assert two_ranks.run(continued, tmp_path, zero_stage, precision)[0] == losses[3:]  # bit for bit
    bound = bound_of_losses(adapted, [DATA] * 5, learning_rate=ADAM["learning_rate"])
    for fixture, other in others:
        ranks: Ranks = request.getfixturevalue(fixture)
        tolerance = bound if precision == "fp32" else 2**-8  # bf16 keeps 8 bits of each sum
        assert ranks.run(continued, tmp_path, other, precision)[0] == pytest.approx(losses[3:], rel=tolerance)
    for file in (tmp_path / "step-000003").glob("*model_states.pt"):
        states = checkpoint_files.read(file)
        assert all("lora_" in name for name in states["module"])
        assert not states["frozen_param_fragments"]


def on_other_models(folder: Path) -> list[str]:
    """What loading says of another base, and of other adapters; runs on ranks."""
    messages = []
    for other in ({"seed": 1}, {"lora": "r=4,alpha=9"}, {"lora": "r=5"}):
        engine = begun(3, **other)
        try:
            loading.load(engine, folder)
        except FrugalError as error:
            messages.append(f"{error.exit_code} {error}".replace(str(folder), "DIR"))
        stop(engine)
    return messages


def test_adapters_of_another_base_and_other_adapters_are_refused(tmp_path: Path, two_ranks: Ranks) -> None:
    two_ranks.run(interrupted, tmp_path, 2, "fp32")
    base_message, alpha_message, rank_message = two_ranks.run(on_other_models, tmp_path)[0]
    assert base_message.startswith("4 DIR/step-000003 holds adapters of another base model")
    assert alpha_message.startswith(
        "4 DIR/step-000003 was made with adapters r=4,alpha=8,targets=all-linear, this run has adapters r=4,alpha=9"
    )
    assert rank_message.startswith("4 DIR/step-000003 is of another model")


def trained_and_saved(folder: Path, base_folder: Path, zero_stage: int) -> torch.Tensor:
    """The logits of a trained model, which is saved; runs on ranks."""
    spec = replace(resolve(str(base_folder)), lora=Lora.parse("r=4"))
    engine = start(2, zero_stage, model=spec.build(dtype=torch.float32), lora="r=4", request=ADAM)
    for _ in range(3):
        engine.train_step(DATA)
    saving.save_model(engine, folder, byte_tokenizer(), uses_cache=spec.uses_cache)
    with torch.no_grad():
        logits = engine.module.eval()(input_ids=torch.arange(16)[None]).logits
    stop(engine)
    return logits


@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=exhaustive), 3])
def test_peft_loads_the_final_folder_and_says_the_same(zero_stage: int, tmp_path: Path, two_ranks: Ranks) -> None:
    base().save_pretrained(tmp_path / "base")
    logits = two_ranks.run(trained_and_saved, tmp_path / "model", tmp_path / "base", zero_stage)[0]
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    of_hub = transformers.AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    loaded = peft.PeftModel.from_pretrained(of_hub, tmp_path / "model").eval()
    with torch.no_grad():
        theirs = loaded(input_ids=torch.arange(16)[None]).logits
        before = base().eval()(input_ids=torch.arange(16)[None]).logits
        exact = {"logits": loaded.double()(input_ids=torch.arange(16)[None]).logits}
    assert relative_error({"logits": logits}, exact) < bound_by({"logits": theirs}, exact)
    assert not torch.allclose(before, logits, atol=1e-3)


def test_adapters_of_random_weights_are_not_trained() -> None:
    with pytest.raises(RequestError, match="--lora would freeze random weights"):
        replace(resolve("gpt2"), lora=Lora.parse("r=4")).refuse_random_base()
