"""Adapters around a base in 4 bits: trained as by transformers, peft and bitsandbytes alone, on any split."""

import gc
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
from frugal.deepspeed_adapter import checkpoint_files
from frugal.engine import training
from frugal.engine.engine import Engine, initialize
from frugal.errors import FrugalError, PlanMismatchError
from frugal.models.loading import placed
from frugal.models.objectives import CausalLM
from frugal.models.resolve import resolve
from tests.engine.gradients import LEARNING_RATE, SGD, Gradient, bound_by, relative_error, weights
from tests.engine.small_models import TINY, ragged_samples

LORA = "r=4,alpha=8"
ADAM = {"learning_rate": 1e-2}
ASKED = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pretrained models of a few kinds, fp32."""
    folder = tmp_path_factory.mktemp("bases")
    for family in ("llama", "gpt2"):
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[family].from_dict(TINY[family])
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    config = transformers.CONFIG_MAPPING["llama"].from_dict(TINY["llama"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "other")
    return folder


def begin_anywhere(model: torch.nn.Module) -> None:
    """Adapters that already do something: peft's own begin with nothing, and half of their gradient."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def of_one_process(model: Path) -> Any:
    """By transformers, peft and bitsandbytes, with the same adapters."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, quantization_config=ASKED)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    made = peft.get_peft_model(base, config)
    begin_anywhere(made)
    return made.train()


def reference_gradient(model: Path, global_batch: int, micro_batch: int = 1) -> Gradient:
    """In fp32, sample by sample unless asked."""
    made, objective = of_one_process(model), CausalLM()
    samples = ragged_samples(global_batch)
    batches = [objective.collate(samples[at : at + micro_batch]) for at in range(0, global_batch, micro_batch)]
    targets = sum(map(objective.count, batches))
    for batch in batches:
        logits = made(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
        )
        (loss / targets).backward()
    return {name: p.grad for name, p in made.named_parameters() if p.requires_grad}


def with_bound(model: Path, global_batch: int) -> tuple[Gradient, float]:
    """As `gradients.with_bound`, of libraries that know no fp64: by how far two orders of their sums are apart."""
    exact, other = (reference_gradient(model, global_batch, size) for size in (1, global_batch))
    return exact, 2 * bound_by(other, exact)


def start(
    model: Path, zero_stage: int, *, global_batch: int = 4, micro_batch: Any = 1,
    request: dict[str, Any], strategy: dict[str, Any] | None = None,
) -> Engine:  # fmt: skip
    """An engine, its weights read and quantised as in a run; of ZeRO-3 some parameters stay whole."""
    plan = plan_by_hand(
        world_size=torch.distributed.get_world_size(), global_batch=global_batch, micro_batch=micro_batch,
        zero_stage=zero_stage, request={"quantize": "nf4", **request, "lora": Lora.parse(LORA)},
        strategy={"persistence_threshold_elements": 100, **(strategy or {})},
    )  # fmt: skip
    spec = replace(resolve(str(model)), lora=plan.request.lora, quantize=plan.request.quantize)
    module = placed.build(spec, plan, torch.device("cpu"), seed=0)
    begin_anywhere(module)
    return initialize(module, plan, CausalLM())


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
    model: Path, zero_stage: int, global_batch: int, micro_batch: Any, strategy: dict[str, Any]
) -> tuple[Gradient, list[str]]:
    """What one SGD step has taken off of adapters, by its gradient; and what else has changed. Runs on ranks."""
    engine = start(
        model, zero_stage, global_batch=global_batch, micro_batch=micro_batch, request=SGD, strategy=strategy,
    )  # fmt: skip
    before = whole(engine)
    engine.evaluate(ragged_samples(global_batch))
    engine.train_step(ragged_samples(global_batch))
    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    after = whole(engine)
    stop(engine)
    gradient = {name: (before[name] - after[name]) / LEARNING_RATE for name in trained}
    return gradient, [name for name in before if name not in trained and not torch.equal(before[name], after[name])]


exhaustive = pytest.mark.exhaustive
OFFLOADED = {"offload_optimizer": "cpu", "offload_parameters": "cpu", "loss": "tiled"}
EXACT = [
    *(pytest.param("two_ranks", stage, 4, 2, {}, marks=exhaustive) for stage in (0, 2)),
    ("three_ranks", 3, 10, (3, 2, 1), {}),
    pytest.param("two_ranks", 3, 4, 1, {"activation_checkpointing": "full"}, marks=exhaustive),
    ("two_ranks", 2, 4, 1, {"activation_checkpointing": "selective", "loss": "tiled", "offload_optimizer": "cpu"}),
    *(pytest.param("one_rank", stage, 4, 2, {}, marks=exhaustive) for stage in (0, 3)),
    pytest.param("two_ranks", 1, 4, 2, {}, marks=exhaustive),
    *(
        pytest.param("two_ranks", 3, 4, 1, strategy, marks=exhaustive)
        for strategy in ({"activation_checkpointing": "selective"}, OFFLOADED)
    ),
]


@pytest.mark.parametrize(("fixture", "zero_stage", "global_batch", "micro_batch", "strategy"), EXACT)
def test_the_gradient_is_that_of_the_libraries_alone_also_after_an_evaluation(
    fixture: str, zero_stage: int, global_batch: int, micro_batch: Any, strategy: dict[str, Any], folders: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    ranks: Ranks = request.getfixturevalue(fixture)
    reference, bound = with_bound(folders / "llama", global_batch)
    for gradient, others in ranks.run(
        measured_gradient, folders / "llama", zero_stage, global_batch, micro_batch, strategy
    ):
        assert others == []
        assert gradient.keys() == reference.keys()
        assert relative_error(gradient, reference) < bound


def test_conv1d_is_exact_too(folders: Path, two_ranks: Ranks) -> None:
    reference, bound = with_bound(folders / "gpt2", 4)
    ((gradient, others), _) = two_ranks.run(measured_gradient, folders / "gpt2", 3, 4, 1, {})
    assert others == []
    assert relative_error(gradient, reference) < bound


# Checkpoints hold adapters and their states; the base is read and quantised again.

DATA = ragged_samples(4, longest=24)


def interrupted(model: Path, folder: Path, zero_stage: int) -> list[float]:
    """Losses of five steps, with a checkpoint after the third; runs on ranks."""
    engine = start(model, zero_stage, request=ADAM)
    losses = [engine.train_step(DATA).loss for _ in range(3)]
    saving.save(engine, folder, Progress(step=3))
    losses += [engine.train_step(DATA).loss for _ in range(2)]
    stop(engine)
    return losses


def continued(model: Path, folder: Path, zero_stage: int) -> list[float]:
    """Losses of the fourth step and the fifth, from the checkpoint; runs on ranks."""
    engine = start(model, zero_stage, request=ADAM)
    loading.load(engine, folder)
    losses = [engine.train_step(DATA).loss for _ in range(2)]
    stop(engine)
    return losses


@pytest.mark.parametrize(
    ("zero_stage", "others"),
    [
        pytest.param(0, [("one_rank", 3), ("two_ranks", 2)], marks=exhaustive),
        (3, [("one_rank", 0), ("two_ranks", 1), ("three_ranks", 3)]),
    ],
)
@pytest.mark.exhaustive
def test_a_run_goes_on_from_a_checkpoint_of_adapters_on_any_layout(
    zero_stage: int, others: list[tuple[str, int]], folders: Path, tmp_path: Path, two_ranks: Ranks,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    losses = two_ranks.run(interrupted, folders / "llama", tmp_path, zero_stage)[0]
    assert losses == sorted(losses, reverse=True)
    assert two_ranks.run(continued, folders / "llama", tmp_path, zero_stage)[0] == losses[3:]  # bit for bit
    bound = 5 * with_bound(folders / "llama", 4)[1]  # as many steps
    for fixture, other in others:
        ranks: Ranks = request.getfixturevalue(fixture)
        found = ranks.run(continued, folders / "llama", tmp_path, other)[0]
        assert found == pytest.approx(losses[3:], rel=bound)
    for file in (tmp_path / "step-000003").glob("*model_states.pt"):
        states = checkpoint_files.read(file)
        assert all("lora_" in name for name in states["module"])
        assert not states["frozen_param_fragments"]


def on_other_bases(model: Path, folder: Path) -> list[str]:
    """What loading says of a base that is not quantised, and of another one; runs on ranks."""
    messages = []
    for path, quantize in ((model, None), (model.parent / "other", "nf4")):
        engine = start(path, 2, request={**ADAM, "quantize": quantize})
        try:
            loading.load(engine, folder)
        except FrugalError as error:
            messages.append(f"{error.exit_code} {error}".replace(str(folder), "DIR"))
        stop(engine)
    return messages


def test_adapters_of_a_base_in_other_bits_and_of_another_are_refused(
    folders: Path, tmp_path: Path, two_ranks: Ranks
) -> None:
    two_ranks.run(interrupted, folders / "llama", tmp_path, 2)
    unquantised, other = two_ranks.run(on_other_bases, folders / "llama", tmp_path)[0]
    assert unquantised.startswith("4 DIR/step-000003 was made with quantised weights nf4, this run has no quantised")
    assert other.startswith("4 DIR/step-000003 holds adapters of another base model")


def test_a_run_takes_the_model_that_its_plan_is_for_whose_weights_are_counted_as_they_were(folders: Path) -> None:
    plain = replace(resolve(str(folders / "llama")), lora=Lora.parse(LORA))
    number = sum(parameter.numel() for parameter in plain.build(dtype=torch.float32).parameters())
    model = replace(plain, quantize="nf4").build(dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) < number
    made = plan_by_hand(world_size=1, global_batch=4, micro_batch=4, zero_stage=0, request={"lora": Lora.parse(LORA)})
    training._refuse_other_model(replace(made, model=replace(made.model, parameters=number)), model)
    with pytest.raises(PlanMismatchError, match="the plan is for another model"):
        training._refuse_other_model(replace(made, model=replace(made.model, parameters=number + 1)), model)
