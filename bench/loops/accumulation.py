"""Gradient accumulation over four micro-batches with clipping, bf16 weights, a schedule; `use_cache=True`."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

ACCUMULATION = 4


def model():
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=768, n_head=12, use_cache=True)).to(torch.bfloat16).cuda()


def optimizer(model):
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))


def scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def batch():
    return [torch.randint(0, 50257, (2, 512)) for _ in range(ACCUMULATION)]


def step(model, optimizer, scheduler, batch):
    total = 0.0
    for micro_batch in batch:
        input_ids = micro_batch.cuda()
        loss = model(input_ids=input_ids, labels=input_ids)[0] / ACCUMULATION
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"loss {total:.3f}, norm {norm.item():.2f}, {torch.cuda.memory_allocated() / 2**20:.0f} MiB")
