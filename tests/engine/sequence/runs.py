"""Runs on ranks that share samples, beside one process that has them whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bench.plans import plan_by_hand
from frugal.checkpoint import loading, saving
from frugal.checkpoint.progress import Progress
from frugal.config.adapters import Lora
from frugal.engine.engine import Engine, initialize
from frugal.errors import RequestError
from frugal.models.objectives import CausalLM
from frugal.planning.plan import Plan
from tests.engine.engines import running
from tests.engine.gradients import SGD, Gradient, applied, weights
from tests.engine.small_models import VOCABULARY, ragged_samples, tiny_gpt2

ADAM = {"learning_rate": 1e-2}
SAMPLES = 7
"""Of a global batch, so that some group has one more than another."""

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128, "use_cache": False,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": _DECODER, "mistral": {**_DECODER, "sliding_window": 5}}
"""Four heads each; two heads of keys and values; a window that reaches over the borders of parts."""


def model(kind: str) -> nn.Module:
    """A small model without dropout, always the same."""
    import transformers

    if kind == "gpt2":
        return tiny_gpt2(n_head=4)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**KINDS[kind]))


def samples(packed: bool, seed: int = 123) -> list[dict[str, list[int]]]:
    """Ragged ones; packed of two documents each."""
    rows = ragged_samples(SAMPLES, seed=seed)
    if packed:
        for row in rows:
            first = len(row["input_ids"]) // 3
            row["documents"] = [first, len(row["input_ids"]) - first]
    return rows


def plan(world_size: int, sequence_parallel: int, zero_stage: int, request: Any = None, **strategy: Any) -> Plan:
    """In micro-batches of at most two samples."""
    return plan_by_hand(
        world_size=world_size, global_batch=SAMPLES, micro_batch=2, zero_stage=zero_stage, request=request,
        strategy={"sequence_parallel": sequence_parallel, **strategy},
    )  # fmt: skip


def gradient(
    kind: str, world_size: int, sequence_parallel: int, zero_stage: int, *, packed: bool = False
) -> tuple[Gradient, float, float]:
    """Return what one step of SGD applied, its loss, and the loss of an evaluation before. Runs on ranks."""
    before = weights(model(kind))
    with running(plan(world_size, sequence_parallel, zero_stage, SGD), model(kind), CausalLM(packed=packed)) as engine:
        evaluated = engine.evaluate(samples(packed, seed=7)).loss
        loss = engine.train_step(samples(packed)).loss
        return applied(engine, before), loss, evaluated


def plain_gradient(kind: str, dtype: torch.dtype) -> Gradient:
    """The same of ragged samples by PyTorch alone, in one batch."""
    whole, objective = model(kind).to(dtype), CausalLM()
    batch = objective.collate(samples(False))
    (objective.loss_sum(whole, batch) / objective.count(batch)).backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}


def gradients(
    kind: str, world_size: int, sequence_parallel: int, zero_stages: list[int]
) -> list[tuple[Gradient, float, float]]:
    """`gradient` for each stage, ragged and packed."""
    return [
        gradient(kind, world_size, sequence_parallel, stage, packed=packed)
        for stage in zero_stages
        for packed in (False, True)
    ]


def losses(
    world_size: int, sequence_parallel: int, zero_stage: int, *, steps: int, lora: str | None = None, **strategy: Any
) -> list[float]:
    """Return the losses of steps with AdamW, each on another global batch; runs on ranks."""
    request = {**ADAM, "lora": None if lora is None else Lora.of(lora)}
    torch.manual_seed(0)
    with running(plan(world_size, sequence_parallel, zero_stage, request, **strategy), model("llama")) as engine:
        return _steps(engine, 0, steps)


def interrupted(sequence_parallel: int) -> list[float]:
    """The losses of four steps, in the second of which rank 1 finds no memory in a layer. Runs on two ranks."""
    with running(plan(2, sequence_parallel, 2, ADAM), model("llama")) as engine:
        engine._say = lambda *_said: None  # type: ignore[method-assign]
        measured = _steps(engine, 0, 1)
        left = [1 if engine.rank == 1 else 0]

        def fails(_module: nn.Module, _inputs: Any) -> None:
            if left[0]:
                left[0] = 0
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        hook = engine.module.model.layers[1].register_forward_pre_hook(fails)
        measured += _steps(engine, 1, 4)
        hook.remove()
        assert engine.limits.max_samples == (1,) * (2 // sequence_parallel)
        return measured


def resumed(folder: Path, first: int, then: int, zero_stages: tuple[int, int]) -> list[float]:
    """Two steps where `first` ranks share samples, and two where `then` do; also recomputed, with a tiled loss."""
    how = {"activation_checkpointing": "full", "loss": "tiled"}
    with running(plan(2, first, zero_stages[0], ADAM, **how), model("llama")) as engine:
        measured = _steps(engine, 0, 2)
        saving.save(engine, folder, Progress(step=2))
    with running(plan(2, then, zero_stages[1], ADAM), model("llama")) as engine:
        assert loading.load(engine, folder).progress.step == 2
        return measured + _steps(engine, 2, 4)


def _steps(engine: Engine, first: int, last: int) -> list[float]:
    return [engine.train_step(samples(False, seed=step)).loss for step in range(first, last)]


def of_metric(world_size: int, sequence_parallel: int) -> dict[str, float]:
    """A metric that sees each sample's predictions whole and in order. Runs on ranks."""
    with running(plan(world_size, sequence_parallel, 1), model("llama")) as engine:
        return engine.evaluate(samples(False), _weighed).metrics


def _weighed(predictions: list[np.ndarray], labels: list[np.ndarray]) -> dict[str, float]:
    def weigh(arrays: list[np.ndarray]) -> float:
        return float(sum((each * np.arange(1, len(each) + 1)).sum() * place for place, each in enumerate(arrays, 1)))

    return {"predictions": weigh(predictions), "labels": weigh(labels)}


def refusal(kind: str, sequence_parallel: int, **changes: Any) -> str:
    """Return what is said of a plan that cannot be run. Runs on ranks."""
    made = model(kind)
    for name, value in changes.items():
        setattr(made.config, name, value)
    with pytest.raises(RequestError) as error:
        initialize(made, plan(2, sequence_parallel, 1), CausalLM())
    return str(error.value)
