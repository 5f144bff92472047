"""Small models and ragged samples for tests."""

import random
from typing import Any

import torch
from torch import nn

VOCABULARY = 256


def tiny_gpt2(seed: int = 0, **changes: Any) -> nn.Module:
    """A GPT-2 of two layers and width 64, without dropout unless asked."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(seed)
    config = GPT2Config(
        **{
            "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 128, "use_cache": False,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, **changes,
        }
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def ragged_samples(number: int, seed: int = 123, shortest: int = 4, longest: int = 64) -> list[dict[str, list[int]]]:
    """Samples of 4 to 64 tokens; the first part of each, its prompt, has no targets."""
    generator = random.Random(seed)
    samples = []
    for _ in range(number):
        length = generator.randint(shortest, longest)
        ids = [generator.randrange(1, VOCABULARY) for _ in range(length)]
        prompt = generator.randint(0, length // 2)
        samples.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return samples
