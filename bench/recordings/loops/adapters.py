"""Steps of Llama 3.2 3B in bf16 with an adapter of peft, as peft's comparison of methods trains it.

4 samples, padded by a mask to the longest, the loss of transformers, gradients clipped, AdamW of the trainable
parameters, which are in fp32. Loading takes the memory of all weights at once and gives it back to the cache.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from peft import (
    BOFTConfig,
    DeftConfig,
    DeloraConfig,
    FourierFTConfig,
    GraloraConfig,
    IA3Config,
    LilyConfig,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    PrefixTuningConfig,
    PveraConfig,
    WaveFTConfig,
    get_peft_model,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from bench.recordings.loops.course import Peaks, peaks

LLAMA = {
    "vocab_size": 128_256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
    "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
}  # fmt: skip
QUERIES_AND_VALUES: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
MLP = ["up_proj", "gate_proj", "down_proj"]

METHODS: dict[str, Callable[[], Any]] = {
    "lora-rank32": lambda: LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"]),
    "lora-rank64": lambda: LoraConfig(r=64, lora_alpha=128, target_modules=["q_proj", "v_proj"]),
    "lora-rank10-target-mlp": lambda: LoraConfig(r=10, lora_alpha=20, target_modules=MLP),
    "lora-rank32-dora": lambda: LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"], use_dora=True),
    "ln_tuning": LNTuningConfig,
    "ia3": lambda: IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "full-finetuning": lambda: None,
    "delora": lambda: DeloraConfig(r=32, delora_lambda=15, **QUERIES_AND_VALUES),
    "fourierft": lambda: FourierFTConfig(n_frequency=1000, scaling=300, **QUERIES_AND_VALUES),
    "gralora": lambda: GraloraConfig(r=32, alpha=64, gralora_k=2, **QUERIES_AND_VALUES),
    "waveft": lambda: WaveFTConfig(n_frequency=5000, **QUERIES_AND_VALUES),
    "boft": lambda: BOFTConfig(boft_block_size=4, **QUERIES_AND_VALUES),
    "prefixtuning": lambda: PrefixTuningConfig(num_virtual_tokens=200),
    "loha": lambda: LoHaConfig(r=32, alpha=64, **QUERIES_AND_VALUES),
    "pvera": lambda: PveraConfig(r=256, **QUERIES_AND_VALUES),
    "lily": lambda: LilyConfig(r=140, stride_A=14, num_B=2, scaling=8.0, target_modules=MLP),
    "deft": lambda: DeftConfig(r=32, alpha=128, **QUERIES_AND_VALUES),
}
"""Those from `delora` on were drawn with `random.Random(28)` out of the other kinds, and each kind's first result."""


MEAN = 4_198_051 / 20_000
"""Tokens of a sample on average, as published: of 5000 steps of 4."""


def longest_of(longest: int, rank: float) -> int:
    """Return the tokens of the sample with the fraction `rank` of all above it.

    Logarithms of lengths are taken to be normal, with the published mean, and half a sample of 20,000 above `longest`.
    """
    normal = NormalDist()
    far = normal.inv_cdf(1 - 0.5 / 20_000)
    deviation = far - math.sqrt(far**2 - 2 * math.log(longest / MEAN))
    median = MEAN * math.exp(-(deviation**2) / 2)
    return round(median * math.exp(deviation * normal.inv_cdf(1 - rank)))


def bucket(longest: int) -> list[int]:
    """Return the tokens of the batches of a usual bucket: 80 samples, sorted, the longest of each 4 first."""
    return [longest_of(longest, (4 * number + 0.5) / 80) for number in range(20)]


def steps(method: str, longest: int) -> Peaks:
    """Run what the comparison does up to its longest batch, of `longest` tokens: the loss of 4 texts before training,
    a usual bucket, and the beginning of that with the longest batch. Of ten steps, after which the cache is emptied,
    these are four.

    The cache is emptied after an evaluation, not before it: what continues 50 samples lies beside the segments of ten
    steps. Half of the 20 evaluations follow a bucket's longest batch, so the longest of 10 buckets is taken. Of the
    methods here only prefixes of 200 tokens, looked up in fp32 for all 50 samples, are taken to need more in an
    evaluation than in the longest batch; LoRA's does not."""
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
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-4)
    # a dry run knows no values of the mask, and takes it to be full
    is_padded = patch.object(masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: False)

    model.eval()
    with torch.inference_mode(), is_padded:
        for _ in range(2):
            batch = padded(768)
            outputs = model(**batch)
            logits = outputs.logits
            F.cross_entropy(logits[0][:-1], batch["input_ids"][0][1:], reduction="none")
    del outputs, logits, batch
    model.train()
    usual = bucket(longest)
    groups = [(usual[:10:3], False), (usual[10::3], False), ((longest, *usual[1:10:3]), False)]
    if isinstance(adapter, PrefixTuningConfig):
        groups.append(((longest_of(longest, 0.5 / (10 * 80)), *usual[1:10:3]), True))
    for lengths, is_evaluated in groups:
        for tokens in lengths:
            batch = padded(tokens)
            batch["labels"] = batch["input_ids"].clone()
            optimizer.zero_grad()
            with is_padded:
                outputs = model(**batch, num_items_in_batch=4 * tokens)
            loss = outputs.loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if is_evaluated:
            model.eval()
            with torch.inference_mode():
                model.get_prompt(batch_size=50)
        torch.cuda.empty_cache()
    return peaks()


def padded(tokens: int) -> dict[str, Tensor]:
    """Return 4 samples, the first of which is padded."""
    mask = torch.ones(4, tokens, dtype=torch.int64)
    mask[0, tokens // 2 :] = 0
    return {"input_ids": torch.zeros(4, tokens, dtype=torch.int64).to("cuda"), "attention_mask": mask.to("cuda")}
