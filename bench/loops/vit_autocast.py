"""A ViT under autocast in bf16, with clipping and AdamW."""

import torch
from transformers import ViTConfig, ViTForImageClassification


def model():
    return ViTForImageClassification(ViTConfig(num_hidden_layers=6, num_labels=1000)).cuda()


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def batch():
    return torch.randn(32, 3, 224, 224), torch.randint(0, 1000, (32,))


def step(model, optimizer, batch):
    images, labels = batch[0].cuda(non_blocking=True), batch[1].cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(images).logits, labels, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
