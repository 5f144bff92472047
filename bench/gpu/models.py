"""Models that are measured and are no presets of frugal's, by name.

Sizes are those of published models or a few of their layers, so that tensors are as large as in practice and two steps
take seconds.
"""

from pathlib import Path
from typing import Any

_DECODER = {"bos_token_id": 0, "eos_token_id": 1, "use_cache": False}
_LLAMA = {**_DECODER, "model_type": "llama"}
_T5 = {"model_type": "t5", "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama-3b": {
        "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
    },
    "t5-large": {**_T5, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16,
                 "vocab_size": 32128},
    "mixtral-0.4b": {
        **_DECODER, "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6,
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "mistral-0.4b": {
        **_DECODER, "model_type": "mistral", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 10,
        "num_attention_heads": 16, "num_key_value_heads": 4, "sliding_window": 2048, "vocab_size": 32000,
    },
    "qwen3_moe-0.3b": {
        **_DECODER, "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024, "vocab_size": 32000,
    },
    "gemma2-0.4b": {
        **_DECODER, "model_type": "gemma2", "hidden_size": 1152, "intermediate_size": 4608, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "pad_token_id": 0, "vocab_size": 64000,
    },
    "phi3-0.4b": {
        **_DECODER, "model_type": "phi3", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 10,
        "num_attention_heads": 16, "num_key_value_heads": 16, "pad_token_id": 0, "vocab_size": 32064,
    },
    "olmo2-0.4b": {
        **_DECODER, "model_type": "olmo2", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 16, "pad_token_id": 0, "vocab_size": 50304,
    },
    "granite-0.4b": {
        **_DECODER, "model_type": "granite", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 10,
        "num_attention_heads": 24, "num_key_value_heads": 8, "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "vocab_size": 49155,
    },
    "stablelm-0.4b": {
        **_DECODER, "model_type": "stablelm", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 10,
        "num_attention_heads": 24, "num_key_value_heads": 24, "partial_rotary_factor": 0.25, "vocab_size": 50304,
    },
    "falcon-0.3b": {
        **_DECODER, "model_type": "falcon", "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
        "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "bias": False,
        "vocab_size": 65024,
    },
    "llama-0.6b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 11, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "tiny-gpt2": {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 4, "vocab_size": 512, "n_positions": 256,
                  "bos_token_id": 0, "eos_token_id": 1},
    "tiny-llama": {"model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "bos_token_id": 0,
                   "eos_token_id": 1},
    "tiny-t5": {**_T5, "d_model": 96, "d_kv": 24, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 512},
}  # fmt: skip
"""Of transformers."""

FAMILIES = {
    "gpt2": "gpt2", "distilgpt2": "gpt2", "tinyllama": "llama", "llama": "llama", "qwen3": "qwen3", "bert": "bert",
    "roberta": "bert", "t5": "t5", "mistral": "mistral", "mixtral": "mixtral", "falcon": "falcon", "vit": "vit",
    "resnet": "resnet",
}  # fmt: skip
"""By the beginning of a model's name."""

FACTORIES = Path(__file__).parents[1] / "emulated_gpu" / "factories.py"
TASKS: dict[str, Any] = {"vit_base": None, "resnet50": None}
"""Of the models made there; None: they bring a loss of their own."""


def family(model: str) -> str:
    """Return the family of a model's name; a model type of transformers that is in no table is its own."""
    name = model.removeprefix("tiny-")
    return next((family for start, family in FAMILIES.items() if name.startswith(start)), model)


def reference(model: str) -> str | None:
    """Return what `--model` calls a factory; None where there is none of this name."""
    return f"{FACTORIES}:{model}" if model in TASKS else None
