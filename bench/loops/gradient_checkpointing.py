"""`gradient_checkpointing_enable()` under autocast in bf16, with a mask, on a causal model."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SAMPLES, TOKENS = 4, 768


def model():
    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8))
    model.gradient_checkpointing_enable()
    model.train()
    return model.cuda()


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def batch():
    mask = torch.ones(SAMPLES, TOKENS, dtype=torch.long)
    mask[1, 500:] = 0
    return torch.randint(0, 50257, (SAMPLES, TOKENS)), mask


def step(model, optimizer, batch):
    input_ids, mask = (tensor.to("cuda") for tensor in batch)
    with torch.autocast(device_type=input_ids.device.type, dtype=torch.bfloat16):
        outputs = model(input_ids=input_ids, attention_mask=mask, labels=input_ids)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return outputs.loss.item()
