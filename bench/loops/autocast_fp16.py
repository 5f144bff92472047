"""fp32 weights under autocast in fp16, with `GradScaler` and clipping."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def model():
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=8, use_cache=False)).to("cuda")


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)


def scaler():
    return torch.amp.GradScaler("cuda")


def batch():
    return torch.randint(0, 50257, (4, 512))


def step(model, optimizer, scaler, batch):
    batch = batch.to("cuda", non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(input_ids=batch, labels=batch).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
    print(f"loss {loss:.3f}, {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
