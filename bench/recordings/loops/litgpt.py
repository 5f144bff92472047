"""The first micro-step of Lit-GPT's LoRA on Alpaca (Lightning-AI/litgpt at 8641822, its `finetune/lora.py`).

It has the longest sample, and is the fullest. All is in bf16, made on the card: a product for queries, keys and values
with LoRA of rank 8 on queries and values (a convolution in two groups, padded with zeros for keys), rotary positions in
fp32, the head in chunks of 128 tokens. Lightning makes fp32 of what the model returns. Norms are in fp32, as at
0cc02afa, the commit of the table.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.recordings.loops.course import Peaks, peaks

CHUNK, RANK, SCALING = 128, 8, 2.0


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder and what its kind has; `gate`: the hidden width of a gated feed-forward."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    longest: int
    rotated: float
    gate: int = 0
    shares_norm: bool = False
    head_has_bias: bool = False
    gelu: str = "none"

    @property
    def has_bias(self) -> bool:
        """Return whether products have a bias, norms are LayerNorm, and the feed-forward lies beside attention."""
        return not self.gate


SIZES = {
    "phi-1.5": Sizes(2048, 24, 32, 51_200, 1044, 0.5, shares_norm=True, head_has_bias=True, gelu="tanh"),
    "stablelm-alpha-3b": Sizes(4096, 16, 32, 50_688, 1034, 0.25),
    "llama-2-7b": Sizes(4096, 32, 32, 32_000, 1304, 1.0, gate=11_008),
    "llama-2-13b": Sizes(5120, 40, 40, 32_000, 1304, 1.0, gate=13_824),
}


class Norm(nn.Module):
    """RMSNorm, computed in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean + 1e-5)
        return (self.weight * normed).to(dtype)


class Projection(nn.Module):
    """Queries, keys and values with LoRA on the first and the last."""

    def __init__(self, width: int, has_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3 * width, bias=has_bias)
        self.lora_a = nn.Parameter(torch.zeros(2 * RANK, width))
        self.lora_b = nn.Parameter(torch.zeros(2 * width, RANK))
        self.dropout = nn.Dropout(0.05)
        self.places = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, x: Tensor) -> Tensor:
        pretrained = self.linear(x)
        after_a = F.linear(self.dropout(x), self.lora_a)
        after_b = F.conv1d(after_a.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        lora = self.padded(after_b) * SCALING
        return pretrained + lora

    def padded(self, x: Tensor) -> Tensor:
        """Return the change with zeros for the keys."""
        x = x.transpose(0, 1)
        result = x.new_zeros((*x.shape[:-1], self.linear.out_features))
        result = result.view(-1, self.linear.out_features)
        places = torch.tensor(self.places, device=result.device)
        result = result.index_copy(1, places, x.reshape(-1, len(self.places)))
        return result.view((*x.shape[:-1], self.linear.out_features)).transpose(0, 1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys with their positions."""
    half = x.size(-1) // 2
    first = x[..., :half]
    second = x[..., half:]
    turned = torch.cat((-second, first), dim=-1)
    roped = (x * cos) + (turned * sin)
    return roped.type_as(x)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.size = sizes.heads, sizes.width // sizes.heads
        self.num_rotated = int(sizes.rotated * self.size)
        self.attn = Projection(sizes.width, sizes.has_bias)
        self.proj = nn.Linear(sizes.width, sizes.width, bias=sizes.has_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        samples, length, width = x.size()
        qkv = self.attn(x)
        qkv = qkv.view(samples, length, self.heads, 3, self.size)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        query, key, value = qkv.split((1, 1, 1), dim=2)
        query = query.reshape(samples, -1, length, self.size)
        key = key.reshape(samples, -1, length, self.size)
        value = value.reshape(samples, -1, length, self.size)
        query_roped = rotated(query[..., : self.num_rotated], cos, sin)
        key_roped = rotated(key[..., : self.num_rotated], cos, sin)
        query = torch.cat((query_roped, query[..., self.num_rotated :]), dim=-1)
        key = torch.cat((key_roped, key[..., self.num_rotated :]), dim=-1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.size**-0.5).transpose(1, 2)
        out = out.reshape(samples, length, width)
        return self.proj(out)


class FeedForward(nn.Module):
    """A feed-forward, gated or with GELU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.gate or 4 * sizes.width
        self.fc = nn.Linear(sizes.width, hidden, bias=sizes.has_bias)
        self.gate = nn.Linear(sizes.width, hidden, bias=False) if sizes.gate else None
        self.proj = nn.Linear(hidden, sizes.width, bias=sizes.has_bias)
        self.gelu = sizes.gelu

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            first = self.fc(x)
            second = self.gate(x)
            x = F.silu(first) * second
            return self.proj(x)
        x = self.fc(x)
        x = F.gelu(x, approximate=self.gelu)
        return self.proj(x)


class Block(nn.Module):
    """A layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        norm = nn.LayerNorm if sizes.has_bias else Norm
        self.norm_1, self.attention = norm(sizes.width), Attention(sizes)
        self.norm_2 = None if sizes.shares_norm else norm(sizes.width)
        self.mlp = FeedForward(sizes)
        self.is_parallel = sizes.has_bias

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.attention(normed, cos, sin)
        if self.is_parallel:
            second = normed if self.norm_2 is None else self.norm_2(x)
            x = x + attended + self.mlp(second)
        else:
            assert self.norm_2 is not None
            x = x + attended
            x = x + self.mlp(self.norm_2(x))
        return x


class Decoder(nn.Module):
    """The decoder, whose head is run in chunks."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=sizes.head_has_bias)
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width) if sizes.has_bias else Norm(sizes.width)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        return [self.head(part) for part in x.split(CHUNK, dim=1)]


def loss_of(logits: list[Tensor], targets: Tensor) -> Tensor:
    """Return the mean loss, chunk by chunk."""
    chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
    of_chunks = [chunk.reshape(-1) for chunk in targets.split(logits[0].size(1), dim=1)]
    losses = [
        F.cross_entropy(chunk, target, ignore_index=-1, reduction="none")
        for chunk, target in zip(chunks, of_chunks, strict=True)
    ]
    return torch.cat(losses).mean()


def micro_step(name: str, samples: int) -> Peaks:
    """Run the micro-step with the longest sample."""
    sizes = SIZES[name]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Decoder(sizes)
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad = "lora" in parameter_name
    elements = int(sizes.rotated * (sizes.width // sizes.heads))
    cos, sin = (torch.zeros(sizes.longest, elements, device="cuda") for _ in range(2))
    model.train()
    tokens, targets = (torch.zeros(samples, sizes.longest, dtype=torch.int64).to("cuda") for _ in range(2))
    logits = [chunk.float() for chunk in model(tokens, cos, sin)]
    logits[-1] = logits[-1][..., :-1, :]
    loss = loss_of(logits, targets[..., 1:])
    (loss / (128 // samples)).backward()
    loss.item()
    return peaks()
