"""Steps on a T4 that fitcheck was calibrated with, one to warm up and one measured.

LoRA of rank 32 on all projections of attention, weights in fp16, adapters and states in fp32, layers checkpointed, the
loss of transformers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bench.recordings.loops.course import Peaks, peaks

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49_152, "tie_word_embeddings": True, "max_position_embeddings": 8192, "rope_theta": 130_000,
}  # fmt: skip
DECODERS: dict[str, Callable[..., Any]] = {
    "qwen2.5-1.5b": partial(
        Qwen2Config, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=32_768,
    ),
    "smollm2-1.7b": partial(
        LlamaConfig, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=32, **SMOLLM2,
    ),
    "smollm2-135m": partial(
        LlamaConfig, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, **SMOLLM2,
    ),
    "smollm2-360m": partial(
        LlamaConfig, hidden_size=960, intermediate_size=2560, num_hidden_layers=32, num_attention_heads=15,
        num_key_value_heads=5, **SMOLLM2,
    ),
    "tinyllama-1.1b": partial(
        LlamaConfig, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, vocab_size=32_000, max_position_embeddings=2048,
    ),
}  # fmt: skip


def adapted(name: str, attention: str, samples: int, length: int) -> Peaks:
    """Run two steps of LoRA and return the peaks of the second."""
    config = DECODERS[name](use_cache=False, attn_implementation=attention)
    model: Any = (Qwen2ForCausalLM if name.startswith("qwen") else LlamaForCausalLM)(config).to(torch.float16)
    model = model.cuda()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapters = LoraConfig(
        r=32, lora_alpha=64, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", target_modules=targets
    )
    model = get_peft_model(model, adapters)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    tokens = torch.randint(0, config.vocab_size, (samples, length), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        outputs = model(input_ids=tokens, labels=tokens)
        outputs.loss.backward()
        optimizer.step()

    with _equal_heads():
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
    return peaks()


def _equal_heads() -> Any:
    """Return a patch of attention that repeats keys and values for all heads, as the script does."""
    attend = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if key.size(-3) != query.size(-3):
            groups = query.size(-3) // key.size(-3)
            key = key.repeat_interleave(groups, dim=-3)
            value = value.repeat_interleave(groups, dim=-3)
            kwargs.pop("enable_gqa", None)
        return attend(query, key, value, *args, **kwargs)

    return patch.object(F, "scaled_dot_product_attention", attention)
