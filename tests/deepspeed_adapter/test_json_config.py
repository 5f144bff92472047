"""DeepSpeed's JSON: complete, without "auto", and taken as it is by DeepSpeed and by transformers."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.optimizers import Optimizer
from frugal.deepspeed_adapter.json_config import deepspeed_config
from frugal.planning.plan import Plan

BATCH_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}


def cases() -> dict[str, Plan]:
    """Every stage, precision, place of the optimizer and optimizer that frugal may plan."""
    made = {}
    for precision, zero_stage, offload, optimizer in product(
        ("fp32", "bf16", "fp16"), (0, 1, 2, 3), ("none", "optimizer", "all"), ("adamw", "sgd")
    ):
        if precision != "fp32" and zero_stage < 2:
            continue
        if (offload == "optimizer" and zero_stage < 1) or (offload == "all" and zero_stage < 3):
            continue
        strategy = {
            "offload_optimizer": "none" if offload == "none" else "cpu",
            "offload_parameters": "cpu" if offload == "all" else "none",
        }
        made[f"{precision}-zero{zero_stage}-offload-{offload}-{optimizer}"] = plan_by_hand(
            world_size=2, global_batch=32, micro_batch=4, zero_stage=zero_stage,
            request={"precision": precision, "optimizer": Optimizer.of(optimizer)}, strategy=strategy,
        )  # fmt: skip
    return made


CASES = cases()


def values(config: Any) -> list[Any]:
    """Every value in a nested config."""
    if isinstance(config, dict):
        return [value for child in config.values() for value in values(child)]
    return [config]


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[Ranks]:
    """Two ranks of this file's own: transformers leaves settings behind that other tests must not see."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def test_it_has_all_three_batch_keys_and_nothing_is_left_open() -> None:
    for config in map(deepspeed_config, CASES.values()):
        assert config.keys() >= BATCH_KEYS
        assert "auto" not in values(config)
        assert json.loads(json.dumps(config)) == config


def parse_with_deepspeed() -> dict[str, tuple[int, int, int]]:
    """Batch, accumulation steps and stage of every case, as DeepSpeed understands them. Runs on ranks."""
    from deepspeed import DeepSpeedConfig

    parsed = {name: DeepSpeedConfig(json.loads(json.dumps(deepspeed_config(plan)))) for name, plan in CASES.items()}
    return {
        name: (config.train_batch_size, config.gradient_accumulation_steps, config.zero_config.stage)
        for name, config in parsed.items()
    }


def test_deepspeed_takes_it_unmodified(own_ranks: Ranks) -> None:
    expected = {name: (32, 4, plan.strategy.zero_stage) for name, plan in CASES.items()}
    assert own_ranks.run(parse_with_deepspeed) == [expected] * 2


def finalize_with_transformers(folder: Path) -> dict[str, bool]:
    """For every case, whether `TrainingArguments` with the same values leaves the config as it is. Runs on ranks."""
    from transformers import TrainingArguments

    unchanged = {}
    for name, plan in CASES.items():
        path = folder / f"{name}.json"
        request = plan.request
        if request.optimizer.name != "adamw":
            continue  # transformers compares an optimizer's arguments with its own Adam's
        arguments = TrainingArguments(
            output_dir=str(folder), deepspeed=str(path), use_cpu=True, per_device_train_batch_size=4,
            gradient_accumulation_steps=4, learning_rate=request.learning_rate, weight_decay=request.weight_decay,
            max_grad_norm=request.gradient_clipping, adam_beta2=0.95, bf16=request.precision == "bf16",
            fp16=request.precision == "fp16",
        )  # fmt: skip
        arguments.hf_deepspeed_config.trainer_config_finalize(arguments, None, num_training_steps=10)
        taken = dict(arguments.hf_deepspeed_config.config, steps_per_print=1_000_000_000)  # it silences DeepSpeed's log
        unchanged[name] = taken == json.loads(path.read_text())
    return unchanged


def test_transformers_takes_it_unmodified(own_ranks: Ranks, tmp_path: Path) -> None:
    for name, plan in CASES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(deepspeed_config(plan)))
    for unchanged in own_ranks.run(finalize_with_transformers, tmp_path):
        assert unchanged and [name for name, same in unchanged.items() if not same] == []


def test_an_uneven_batch_states_its_capacity() -> None:
    config = deepspeed_config(plan_by_hand(world_size=4, global_batch=500, micro_batch=8, zero_stage=2))
    assert [config[key] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")] == [8, 16]
    assert config["train_batch_size"] == 512
