"""DeepSpeed with ZeRO-2 and a configuration of one's own."""

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7, "overlap_comm": False},
    "gradient_clipping": 1.0,
}


def engine():
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=768, n_head=12))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


def batch():
    return torch.randint(0, 50257, (4, 512))


def step(engine, batch):
    batch = batch.to(engine.device)
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
