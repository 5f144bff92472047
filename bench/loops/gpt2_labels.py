"""A Hugging Face model with labels, whose outputs live through the step."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def model():
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=768, n_head=12)).cuda()


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def batch():
    return {"input_ids": torch.randint(0, 50257, (4, 512))}


def step(model, optimizer, batch):
    input_ids = batch["input_ids"].cuda()
    outputs = model(input_ids=input_ids, labels=input_ids)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return outputs.loss.item()
