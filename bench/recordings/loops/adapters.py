"""Steps of Llama 3.2 3B in bf16 with an adapter of peft, as peft's comparison of methods trains it.

4 samples of one length, padded by a mask, the loss of transformers, gradients clipped, AdamW of the trainable
parameters, which are in fp32. Loading takes the memory of all weights at once and gives it back to the cache.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from bench.recordings.loops.course import Peaks, peaks

LLAMA = {
    "vocab_size": 128_256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
    "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
}  # fmt: skip
MLP = ["up_proj", "gate_proj", "down_proj"]

METHODS: dict[str, Callable[[], Any]] = {
    "lora-rank32": lambda: LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"]),
    "lora-rank64": lambda: LoraConfig(r=64, lora_alpha=128, target_modules=["q_proj", "v_proj"]),
    "lora-rank10-target-mlp": lambda: LoraConfig(r=10, lora_alpha=20, target_modules=MLP),
    "lora-rank32-dora": lambda: LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"], use_dora=True),
    "ln_tuning": LNTuningConfig,
    "ia3": lambda: IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "full-finetuning": lambda: None,
}


OTHERS = (430, 380), (520, 460)
"""Tokens of batches before and after the longest; the cache is emptied in between, as every ten steps there. Batches
come longest first out of 80 samples each, so none before is as long and those behind are shorter; their lengths are not
published, and these stand for them."""


def steps(method: str, length: int) -> Peaks:
    """Run steps of 4 samples, the longest of `length` tokens."""
    config = LlamaConfig(**LLAMA)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = sum(parameter.numel() for parameter in model.parameters())
    loading = torch.empty(weights, dtype=torch.bfloat16, device="cuda")
    del loading
    model = model.to("cuda")
    adapter = METHODS[method]()
    if adapter is not None:
        adapter.task_type = "CAUSAL_LM"
        model = get_peft_model(model, adapter)
    model.train()
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-4)
    is_padded = patch.object(masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: False)

    before, after = OTHERS
    for number, tokens in enumerate((*before, length, *after)):
        if number == len(before):
            torch.cuda.empty_cache()
        mask = torch.ones(4, tokens, dtype=torch.int64)
        mask[0, tokens // 2 :] = 0
        batch = {"input_ids": torch.zeros(4, tokens, dtype=torch.int64).to("cuda"), "attention_mask": mask.to("cuda")}
        batch["labels"] = batch["input_ids"].clone()
        optimizer.zero_grad()
        with is_padded:  # a dry run knows no values of the mask, and takes it to be full
            outputs = model(**batch, num_items_in_batch=4 * tokens)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return peaks()
