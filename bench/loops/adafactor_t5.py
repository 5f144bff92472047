"""T5 with Adafactor of transformers."""

import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor


def model():
    config = T5Config(d_model=512, d_ff=2048, d_kv=64, num_layers=4, num_heads=8, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).cuda()


def optimizer(model):
    return Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)


def batch():
    return {"input_ids": torch.randint(0, 32000, (8, 256)), "labels": torch.randint(0, 32000, (8, 64))}


def step(model, optimizer, batch):
    batch = {name: value.to("cuda") for name, value in batch.items()}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
