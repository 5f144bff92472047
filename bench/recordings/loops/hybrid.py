"""One optimizer step of Qwen3.5's text models on random tokens, as FakeGPU's comparison with real cards runs it.

Weights in bf16, or LoRA of rank 8 in fp32 beside them; one sample; AdamW parameter by parameter. Linear attention is
plain torch, in chunks of 64 tokens, of transformers 5.12: it inverts a chunk's triangle row by row, and each row's copy
of those before stays until backward. Later ones solve it in one kernel, and take 2 to 7 % less.
"""

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from bench.recordings.loops.course import Peaks, peaks

SIZES: dict[str, dict[str, int]] = {
    "0.8b": {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2},
    "2b": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 2},
}
"""Both have 24 layers, 16 heads of linear attention and tied embeddings: 752,393,024 and 1,881,825,088 parameters."""
CHUNK = 64


def step(size: str, length: int, *, is_lora: bool, is_checkpointed: bool = False, micro_batches: int = 1) -> Peaks:
    """Run the first optimizer step and return its peaks, those of loading left out."""
    config = Qwen3_5TextConfig(
        num_hidden_layers=24, linear_num_value_heads=16, tie_word_embeddings=True, use_cache=False, **SIZES[size]
    )
    model: Any = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    if is_lora:
        adapter = LoraConfig(r=8, lora_alpha=16, bias="none", task_type="CAUSAL_LM", target_modules="all-linear")
        model = get_peft_model(model, adapter)
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if is_lora:
            model.enable_input_require_grads()
    model.train()
    model.to("cuda:0")
    batches = []
    for _ in range(micro_batches):
        tokens = torch.zeros(1, length, dtype=torch.int64)
        positions = torch.arange(length).view(1, 1, length).expand(3, 1, length).clone()
        batches.append(
            {"input_ids": tokens.to("cuda"), "labels": tokens.to("cuda"), "position_ids": positions.to("cuda")}
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False)
    torch.cuda.reset_peak_memory_stats()
    with patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", chunked_delta_rule):
        for number, batch in enumerate(batches, start=1):
            outputs = model(**batch, use_cache=False)
            loss = outputs.loss / micro_batches
            loss.backward()
            if number < micro_batches:
                del outputs, loss
    optimizer.step()
    return peaks()


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Return the gated delta rule's output; `query`, `key`, `value`: `(samples, tokens, heads, size)`, `g` (the
    decay, in logarithms) and `beta`: `(samples, tokens, heads)`."""
    dtype, length = query.dtype, query.size(1)
    query, key = (modeling_qwen3_5.l2norm(each, dim=-1, eps=1e-6) for each in (query, key))
    query, key, value, beta, g = (each.transpose(1, 2).contiguous().float() for each in (query, key, value, beta, g))
    missing = -length % CHUNK
    query, key, value = (F.pad(each, (0, 0, 0, missing)) for each in (query, key, value))
    beta, g = (F.pad(each, (0, missing)) for each in (beta, g))
    query = query * query.size(-1) ** -0.5
    weighted_value = value * beta.unsqueeze(-1)
    weighted_key = key * beta.unsqueeze(-1)
    query, key, value, weighted_key, weighted_value = (
        each.unflatten(2, (-1, CHUNK)) for each in (query, key, value, weighted_key, weighted_value)
    )
    g = g.unflatten(2, (-1, CHUNK))
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu()
    g = g.cumsum(dim=-1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().float().tril()
    inverse = -((weighted_key @ key.transpose(-1, -2)) * decay).masked_fill(above, 0)
    for number in range(1, CHUNK):
        row = inverse[..., number, :number].clone()
        before = inverse[..., :number, :number].clone()
        inverse[..., number, :number] = row + (row.unsqueeze(-1) * before).sum(-2)
    inverse = inverse + torch.eye(CHUNK, device=inverse.device)
    value = inverse @ weighted_value
    decayed_key = inverse @ (weighted_key * g.exp().unsqueeze(-1))
    state = query.new_zeros((*query.shape[:2], key.size(-1), value.size(-1)))
    out = torch.zeros_like(value)
    for number in range(query.size(2)):
        query_here, key_here, value_here = query[:, :, number], key[:, :, number], value[:, :, number]
        inside = query_here @ key_here.transpose(-1, -2) * decay[:, :, number]
        from_state = decayed_key[:, :, number] @ state
        new_value = value_here - from_state
        read = (query_here * g[:, :, number, :, None].exp()) @ state
        out[:, :, number] = read + inside @ new_value
        last = g[:, :, number, -1, None]
        state = (
            state * last.unsqueeze(-1).exp()
            + (key_here * (last - g[:, :, number]).exp()[..., None]).transpose(-1, -2) @ new_value
        )
    out = out.flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2).contiguous().to(dtype), None
