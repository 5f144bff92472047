"""Eager attention with a mask of padded samples, bf16 weights, `use_cache` left on."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def model():
    config = LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1376, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def batch():
    mask = torch.ones(4, 512, dtype=torch.long)
    mask[0, 300:] = 0
    return {"input_ids": torch.randint(0, 32000, (4, 512)), "attention_mask": mask}


def step(model, optimizer, batch):
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    outputs = model(**batch, labels=labels)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(outputs.loss)
