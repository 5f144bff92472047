"""A model of one's own with `torch.utils.checkpoint` on each block, made on the card, SGD with momentum (foreach)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

device = "cuda"


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        samples, tokens, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    def __init__(self, vocabulary=16000, width=512, layers=6, heads=8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def model():
    with torch.device(device):
        return Model()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch():
    return torch.randint(0, 16000, (4, 1025), device=device)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
