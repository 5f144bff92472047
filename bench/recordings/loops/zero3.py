"""DeepSpeed's example of master weights and states in bf16: a 6.9B encoder under ZeRO-3 on four H100.

torch's own attention module, post-norm, a feed-forward with GELU, learned positions, each layer checkpointed; one
sample of 512 tokens, random tokens of a vocabulary of 50,000, the loss outside of the model, `loss.backward()`.
"""

from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.recordings.loops.course import Peaks, peaks

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 4096, 32, 32, 50_000, 512

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,  # as there; the batch has one
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 0,
        "memory_efficient_linear": False,  # until 0.19.4 no model had it that was made outside of `zero.Init`
    },
}  # fmt: skip
LOW = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
}


class Layer(nn.Module):
    """A post-norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.after_attention, self.after_feed_forward = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x)
        x = self.after_attention(x + attended)
        fed = self.feed_forward(x)
        x = self.after_feed_forward(x + fed)
        return x


class Encoder(nn.Module):
    """Layers between embeddings and a head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(LENGTH, device=tokens.device).unsqueeze(0).expand(len(tokens), -1)
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits


def steps(has_low_states: bool) -> Peaks:
    """Run three steps."""
    model = Encoder()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG | (LOW if has_low_states else {})
    )
    engine.train()
    criterion = nn.CrossEntropyLoss()
    for _ in range(3):
        tokens, targets = (torch.randint(0, VOCABULARY, (1, LENGTH), device="cuda") for _ in range(2))
        with torch.autocast("cuda", torch.bfloat16) if has_low_states else nullcontext():
            logits = engine(tokens)
            loss = criterion(logits.view(-1, VOCABULARY), targets.view(-1))
        loss.backward()
        engine.step()
        loss.item()
    return peaks()
