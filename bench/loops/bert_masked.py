"""BERT with dropout and a padding mask in fp32, AdamW without foreach, mean over a list of losses."""

import torch
from transformers import BertConfig, BertForMaskedLM


def model():
    return BertForMaskedLM(BertConfig(num_hidden_layers=4)).cuda().train()


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


def batch():
    mask = torch.ones(8, 256, dtype=torch.long)
    mask[3, 100:] = 0
    return {"input_ids": torch.randint(0, 30000, (8, 256)), "attention_mask": mask}


def step(model, optimizer, batch):
    batch = {name: value.cuda() for name, value in batch.items()}
    outputs = model(**batch, labels=batch["input_ids"])
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
