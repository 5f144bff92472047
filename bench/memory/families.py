"""Small models of every family that accuracy is shown for: factories, `bench/memory/families.py:gpt2`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal.models.objectives import Batch, SummedLoss

VOCABULARY = 512
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
DECODER = {
    **SMALL, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip


def _transformers(auto: str, model_type: str, **config: Any) -> nn.Module:
    import transformers

    made = transformers.AutoConfig.for_model(model_type, **config)
    return getattr(transformers, auto).from_config(made)


def gpt2() -> nn.Module:
    """A decoder with multi-head attention, tied weights and dropout."""
    return _transformers("AutoModelForCausalLM", "gpt2", **SMALL, n_layer=4, n_embd=128, n_head=4, use_cache=False)


def llama() -> nn.Module:
    """A decoder with grouped-query attention and an output head of its own."""
    return _transformers("AutoModelForCausalLM", "llama", **DECODER, tie_word_embeddings=False)


def qwen3() -> nn.Module:
    """A decoder with normalised queries and keys, and tied weights."""
    return _transformers("AutoModelForCausalLM", "qwen3", **DECODER, head_dim=32, tie_word_embeddings=True)


def mistral() -> nn.Module:
    """A decoder with grouped-query attention in a window."""
    return _transformers("AutoModelForCausalLM", "mistral", **DECODER, sliding_window=32, tie_word_embeddings=False)


def opt() -> nn.Module:
    """A decoder with biases everywhere, positions that are learned, and tied weights."""
    shape = {"hidden_size": 128, "ffn_dim": 320, "num_hidden_layers": 4, "num_attention_heads": 4}
    return _transformers(
        "AutoModelForCausalLM", "opt", **SMALL, **shape, max_position_embeddings=128, word_embed_proj_dim=128,
        use_cache=False, dropout=0.0,
    )  # fmt: skip


def gemma2() -> nn.Module:
    """A decoder with a soft cap on its logits, a window, tied weights and many tokens beside its width."""
    return _transformers(
        "AutoModelForCausalLM", "gemma2", **(DECODER | {"vocab_size": 8 * VOCABULARY}), head_dim=32, sliding_window=32
    )


def bert() -> nn.Module:
    """An encoder, for masked tokens, with dropout."""
    config = {**DECODER}
    del config["num_key_value_heads"], config["use_cache"]
    return _transformers("AutoModelForMaskedLM", "bert", **config)


def t5() -> nn.Module:
    """An encoder and a decoder with relative positions."""
    shape = {"d_model": 128, "d_kv": 32, "d_ff": 320, "num_layers": 3, "num_heads": 4}
    return _transformers(
        "AutoModelForSeq2SeqLM",
        "t5",
        **SMALL,
        **shape,
        pad_token_id=0,
        use_cache=False,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )


def moe() -> nn.Module:
    """A decoder with four experts, two for each token."""
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 32}
    return _transformers("AutoModelForCausalLM", "qwen3_moe", **DECODER, **sparse)


def mixtral() -> nn.Module:
    """Another decoder with experts."""
    return _transformers("AutoModelForCausalLM", "mixtral", **DECODER, num_local_experts=4, num_experts_per_tok=2)


class _Adapted(nn.Module):
    """A frozen linear layer, and a product of two narrow ones beside it (https://arxiv.org/abs/2106.09685)."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def adapters() -> nn.Module:
    """A frozen decoder with trainable adapters beside its query and value projections."""
    model: Any = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = _Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = _Adapted(layer.self_attn.v_proj)
    return model


class Patches(nn.Module):
    """A vision transformer: images `(samples, 3, 32, 32)` -> scores `(samples, 10)`."""

    def __init__(self, width: int = 128, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 65, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.embedding(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


class _ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Convolutions(nn.Module):
    """A CNN with batch normalisation: images `(samples, 3, 32, 32)` -> scores `(samples, 10)`."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        self.blocks = nn.Sequential(*(_ConvBlock(*width) for width in widths))
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        return self.head(F.max_pool2d(self.blocks(images), 2).mean((2, 3)))


class _Down(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(F.silu(self.first(x))))


class Skips(nn.Module):
    """Layers whose outputs are added in reverse order on the way back: rows `(samples, 64, 128)` -> the same."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(_Down(width) for _ in range(depth))
        self.up = nn.ModuleList(_Down(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """The rows again."""
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(x + kept.pop())
        return x


class Tied(nn.Module):
    """A recurrent-free character model whose head is its embedding: tokens `(samples, positions)` -> scores."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(_Down(width), _Down(width), nn.LayerNorm(width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token."""
        return self.head(self.blocks(self.embedding(tokens)))


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["image"].to(next(model.parameters()).dtype)
    return F.cross_entropy(model(images).float(), batch["label"], reduction="sum")


_IMAGE = {"image": torch.zeros(3, 32, 32, device="cpu"), "label": torch.tensor(0, device="cpu")}


def vit() -> tuple[nn.Module, SummedLoss]:
    """A vision transformer, plain PyTorch."""
    return Patches(), SummedLoss(_classified, example=_IMAGE)


def cnn() -> tuple[nn.Module, SummedLoss]:
    """A CNN, plain PyTorch."""
    return Convolutions(), SummedLoss(_classified, example=_IMAGE)


def _rebuilt(model: nn.Module, batch: Batch) -> Tensor:
    rows = batch["rows"].to(next(model.parameters()).dtype)
    return (model(rows) - rows).float().square().sum()


def skips() -> tuple[nn.Module, SummedLoss]:
    """A plain module with long skip connections."""
    return Skips(), SummedLoss(_rebuilt, example={"rows": torch.zeros(64, 128, device="cpu")})


def _predicted(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["tokens"])[:, :-1]
    return F.cross_entropy(scores.reshape(-1, VOCABULARY).float(), batch["tokens"][:, 1:].reshape(-1), reduction="sum")


def tied() -> tuple[nn.Module, SummedLoss]:
    """A plain module with tied weights."""
    tokens = torch.zeros(64, dtype=torch.int64, device="cpu")
    return Tied(), SummedLoss(
        _predicted, example={"tokens": tokens}, count=lambda batch: batch["tokens"][:, 1:].numel()
    )
