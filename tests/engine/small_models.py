"""Small models and ragged samples for tests."""

import random
from typing import Any

import torch
from torch import nn

from frugal.config.adapters import Lora
from frugal.models import adapters

VOCABULARY = 256


def tiny_gpt2(seed: int = 0, **changes: Any) -> nn.Module:
    """A GPT-2 of two layers and width 64, without dropout unless asked."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(seed)
    config = GPT2Config(
        **{
            "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 128, "use_cache": False,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, **changes,
        }
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def tiny(task: str, family: str, seed: int = 0) -> nn.Module:
    """A model of two layers and width 32 without dropout, from the family's own configuration."""
    import transformers

    from frugal.models.spec import _AUTO

    torch.manual_seed(seed)
    config = transformers.CONFIG_MAPPING[family].from_dict(TINY[family])
    return getattr(transformers, _AUTO[task][0]).from_config(config)


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {
    **_TOKENS, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3,
}  # fmt: skip
_ENCODER_DECODER = {
    **_TOKENS, "encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "decoder_start_token_id": 0,
    "forced_eos_token_id": 2, "use_cache": False,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {
        **_TOKENS, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "num_labels": 3, "use_cache": False,
    },
    "llama": {
        **_TOKENS, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 64, "max_position_embeddings": 128, "num_labels": 3, "use_cache": False,
    },
    "bert": _ENCODER,
    "roberta": {**_ENCODER, "type_vocab_size": 1},
    "t5": {
        **_TOKENS, "num_layers": 2, "num_decoder_layers": 2, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2,
        "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False,
    },
    "marian": {**_ENCODER_DECODER, "decoder_vocab_size": VOCABULARY},
    "bart": _ENCODER_DECODER,
}  # fmt: skip


def with_adapters(model: nn.Module, lora: str | None) -> nn.Module:
    """Return a language model with adapters that do something, if asked."""
    if lora is None:
        return model
    model = adapters.add(model, Lora.of(lora), "causal-lm", dtype=torch.float32, device=torch.device("cpu")).train()
    random = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=random)
    return model


def ragged_samples(number: int, seed: int = 123, shortest: int = 4, longest: int = 64) -> list[dict[str, list[int]]]:
    """Samples of 4 to 64 tokens; the first part of each, its prompt, has no targets."""
    generator = random.Random(seed)
    samples = []
    for _ in range(number):
        length = generator.randint(shortest, longest)
        ids = [generator.randrange(1, VOCABULARY) for _ in range(length)]
        prompt = generator.randint(0, length // 2)
        samples.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return samples


class Block(nn.Module):
    """A layer with a skip connection, and a parameter of its own beside its submodules'."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(samples, width)` to the same."""
        return x + self.scale * self.inner(x)


class SkipNet(nn.Module):
    """A plain module: four blocks between two linear layers."""

    def __init__(self, seed: int = 0, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(samples, 16)` to `(samples, 3)`."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class NormedNet(nn.Module):
    """A plain module whose samples meet in a BatchNorm; its running statistics are not those it begins with."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 3)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(samples, 16)` to `(samples, 3)`."""
        return self.last(torch.relu(self.norm(self.first(x))))


def squared_error(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Summed over the samples."""
    return ((model(batch["x"]) - batch["y"]) ** 2).sum()


def points(number: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Samples for `SkipNet`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(16, generator=generator), "y": torch.randn(3, generator=generator)} for _ in range(number)
    ]


def skip_net() -> tuple[nn.Module, Any]:
    """A factory: the plain module and its loss."""
    from frugal.models.objectives import SummedLoss

    return SkipNet(), SummedLoss(squared_error, example=points(1)[0])


FACTORIES = """
import torch
from torch import nn
from frugal.models.objectives import SummedLoss

def mine():
    loss = lambda model, batch: model(batch["x"]).sum()
    return nn.Linear(4, 1), SummedLoss(loss, example={"x": torch.zeros(4)})

def module_only():
    return nn.Linear(4, 1)

def language_model():
    from tests.engine.small_models import tiny_gpt2
    return tiny_gpt2()

def fails():
    return {}["layers"]

def exits():
    raise SystemExit(3)

def no_module():
    return 42

def nothing():
    pass

SIZE = 3
"""
"""A file of factories, see `factories` in conftest.py."""
