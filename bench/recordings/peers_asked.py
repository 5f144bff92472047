"""Run by `bench.recordings.peers` in an environment with other estimators: questions on standard input, answers out.

Each answers with bytes of torch's allocator: what it counts for CUDA's context is taken off. What it cannot express is
an answer in words. Nothing of frugal is imported.
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

MIB = 1 << 20
ZERO = "no ZeRO"
LOW_STATES = "no states in bf16 under ZeRO"


def fitcheck(asked: dict[str, Any]) -> int | str:
    """Ask fitcheck-llm for a training step."""
    from fitcheck import ModelConfig, TrainingConfig, estimate, get_gpu
    from fitcheck.config_parser import _count_params, _ParsedFields
    from fitcheck.overhead_db import DEFAULT_OVERHEAD_PROFILE, list_overhead_profiles

    if asked["mode"] != "step":
        return "no forward alone, but to serve with a cache"
    if asked["precision"] == "autocast":
        return "no weights in fp32 under autocast"
    if asked["trained_elements"] is not None and not asked["rank"]:
        return "no adapter but LoRA"
    if asked["zero_gpus"]:
        return ZERO
    fields = {
        "hidden_size": asked["width"], "num_layers": asked["layers"], "num_attention_heads": asked["heads"],
        "num_kv_heads": asked["kv_heads"], "intermediate_size": asked["hidden"], "vocab_size": asked["vocabulary"],
        "head_dim": asked["width"] // asked["heads"], "tie_word_embeddings": asked["tied"],
    }  # fmt: skip
    model = ModelConfig(name="asked", num_params=_count_params(_ParsedFields(**fields)), **fields)
    adapter = {"lora_rank": asked["rank"], "lora_targets": list(asked["targets"])}
    training = TrainingConfig(
        precision=asked["precision"], batch_size=asked["samples"], seq_len=asked["length"],
        flash_attn=asked["has_flash_attention"], grad_checkpoint=asked["is_checkpointed"],
        optimizer_dtype="bf16" if asked["precision"] == "bf16" and not asked["rank"] else "fp32",
        **(adapter if asked["rank"] else {"lora_rank": None}),
    )  # fmt: skip
    card = asked["card"].partition("-")[0]
    of_card = [profile for (gpu, _, kind), profile in list_overhead_profiles() if (gpu, kind) == (card, "none")]
    context = of_card[0].base_context_mib if of_card else DEFAULT_OVERHEAD_PROFILE.base_context_mib
    return int((estimate(model, training, get_gpu(card if of_card else "h100")).total_mib - context) * MIB)


def torch_preflight(asked: dict[str, Any]) -> int | str:
    """Ask torch-preflight for a training step or a forward without gradients."""
    from torch_preflight import vram
    from torch_preflight.vram.costmodel import params_from_transformer_shape
    from torch_preflight.vram.types import ModelKind

    if asked["mode"] == "graph":
        return "no forward that keeps what backward needs, without the backward"
    if asked["has_bf16_states"]:
        return LOW_STATES
    shape = vram.TransformerShape(
        layers=asked["layers"], hidden=asked["width"], heads=asked["heads"], vocab=asked["vocabulary"],
        intermediate=asked["hidden"], kv_heads=asked["kv_heads"], tied_embeddings=asked["tied"],
        gated_mlp=asked["has_gates"], learned_positions=not asked["has_gates"], max_position=asked["length"],
        has_lm_head=True,
    )  # fmt: skip
    elements = params_from_transformer_shape(shape)
    trained = elements if asked["trained_elements"] is None else asked["trained_elements"]
    profile = vram.ModelProfile(
        name="asked", param_count=elements, trainable_params=trained, source="formula",
        confidence=vram.Confidence.HIGH, kind=ModelKind.TRANSFORMER, shape=shape,
    )  # fmt: skip
    precision = {"fp32": "fp32", "autocast": "amp", "bf16": "pure-bf16", "fp16": "pure-fp16"}[asked["precision"]]
    under_zero = {"world_size": asked["zero_gpus"], "sharding": vram.Sharding.ZERO3}
    config = vram.RunConfig(
        batch_size=asked["samples"], seq_len=asked["length"],
        precision=vram.PrecisionMode("fp16-master" if asked["zero_gpus"] else precision),
        gradient_checkpointing=asked["is_checkpointed"],
        optimizer=vram.OptimizerKind.ADAMW, flash_attention=asked["has_flash_attention"],
        inference_only=asked["mode"] == "forward", frozen_fraction=1 - trained / elements,
        **(under_zero if asked["zero_gpus"] else {}),
    )  # fmt: skip
    report = vram.estimate_config(profile, config, gpu="h100-80gb", with_remediations=False)
    return int(report.breakdown.total - report.breakdown.cuda_context)


def accelerate(asked: dict[str, Any]) -> int | str:
    """Ask accelerate's `estimate-memory` for training with Adam. It takes a model from a hub; here its sum is taken of
    the same number of bytes."""
    from accelerate.commands.estimate import estimate_training_usage

    if asked["mode"] != "step":
        return "no forward, only the weights at rest"
    if asked["trained_elements"] is not None:
        return "no adapter"
    if asked["zero_gpus"]:
        return ZERO
    if asked["precision"] == "autocast":
        return "no autocast: its half precision is of weights and gradients"
    kv = asked["kv_heads"] / asked["heads"]
    layer = (2 + 2 * kv) * asked["width"] ** 2 + 3 * asked["width"] * asked["hidden"] + 2 * asked["width"]
    embeddings = asked["vocabulary"] * asked["width"] * (1 if asked["tied"] else 2)
    elements = int(asked["layers"] * layer + embeddings + asked["width"])
    sizes = estimate_training_usage(4 * elements, "float32" if asked["precision"] == "fp32" else "float16")
    return max(sizes.values())


def deepspeed(asked: dict[str, Any]) -> int | str:
    """Ask DeepSpeed's estimator for the states under ZeRO-3."""
    if not asked["zero_gpus"]:
        return "states under ZeRO alone"
    if asked["has_bf16_states"]:
        return LOW_STATES
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    layer = 4 * asked["width"] ** 2 + 2 * asked["width"] * asked["hidden"]
    embedding = asked["vocabulary"] * asked["width"]
    elements = asked["layers"] * layer + 2 * embedding + asked["length"] * asked["width"]
    _, on_gpu, _ = estimate_zero3_model_states_mem_needs(
        elements, embedding, num_gpus_per_node=asked["zero_gpus"], cpu_offload=False, cpu_offload_params=False
    )
    return int(on_gpu)


PEERS: dict[str, Callable[[dict[str, Any]], int | str]] = {
    "fitcheck-llm": fitcheck, "torch-preflight": torch_preflight, "accelerate": accelerate, "deepspeed": deepspeed,
}  # fmt: skip


def main() -> None:
    """Answer all questions."""
    asked = json.load(sys.stdin)
    answers = {peer: {name: ask(question) for name, question in asked.items()} for peer, ask in PEERS.items()}
    json.dump({"versions": {peer: version(peer) for peer in PEERS}, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
