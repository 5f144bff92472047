"""fp32 weights under autocast in bf16, a hand-written loss, fused AdamW; a small Llama with grouped queries."""

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def model():
    config = LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1376, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def batch():
    return torch.randint(0, 32000, (2, 1025))


def step(model, optimizer, batch):
    batch = batch.to(device)
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), batch[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
