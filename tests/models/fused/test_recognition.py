"""Modules are recognised by what they compute, not by their names."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from frugal.config import kernels
from frugal.errors import RequestError
from frugal.models.fused import liger_internals, replacement
from frugal.models.fused.replacement import GatedMLP, RMSNorm
from tests.engine.small_models import tiny


class Mine(nn.Module):
    """A user's own norm, with another name for everything."""

    def __init__(self, width: int = 24, offset: float = 0.0, epsilon: float = 1e-5, most: float = 1e9) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.tiny, self.offset, self.most = epsilon, offset, most

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float().clamp(-self.most, self.most)
        rows = rows / (rows.square().mean(-1, keepdim=True) + self.tiny).sqrt()
        return (rows * (self.offset + self.scale.float())).to(x.dtype)


class LlamaRMSNorm(Mine):
    """One that is called like Llama's, and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


def test_a_norm_of_the_user_is_taken_with_its_epsilon_offset_and_rounding() -> None:
    assert replacement.rms_norm(Mine()) == RMSNorm(1e-5, 0.0, "gemma")  # DeepSpeed may make it bf16
    assert replacement.rms_norm(Mine(offset=1.0, epsilon=1e-3).bfloat16()) == RMSNorm(1e-3, 1.0, "gemma")


@pytest.mark.parametrize(
    "module",
    [
        LlamaRMSNorm(), Mine(most=20.0), nn.LayerNorm(24), nn.RMSNorm(24, eps=1e-5), nn.Linear(24, 24),
        nn.Embedding(4, 24),
    ],
    ids=["another mean", "a clamp", "LayerNorm", "torch's own", "Linear", "Embedding"],
)  # fmt: skip
def test_what_computes_something_else_is_no_norm(module: nn.Module) -> None:
    assert replacement.rms_norm(module) is None


class Gated(nn.Module):
    """A user's own gated MLP."""

    def __init__(
        self, activation: Any = F.silu, *, width: int = 16, inside: int = 40, least: float = -1e9, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.out, self.a, self.b = nn.Linear(inside, width), nn.Linear(width, inside), nn.Linear(width, inside)
        self.activation, self.limits, self.dropout = activation, [least], nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(self.a(x).clamp(self.limits[0]) * self.activation(self.b(x))))


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def test_a_gated_mlp_of_the_user_is_taken_by_the_part_of_each_projection() -> None:
    assert replacement.gated_mlp(Gated()) == GatedMLP("b", "a", "out", "silu")
    assert replacement.gated_mlp(Gated(tanh_gelu, inside=16)) == GatedMLP("b", "a", "out", "gelu")


def test_another_mlp_is_not() -> None:
    hooked = Gated()
    hooked.a.register_forward_hook(lambda *_: None)
    in_evaluation = Gated(dropout=0.5).eval()  # as transformers loads a model
    others = (Gated(F.gelu), Gated(F.relu), Gated(least=-20.0), Gated(least=-500.0), in_evaluation, hooked)
    for module in (*others, nn.Sequential(*Gated().children())):
        assert replacement.gated_mlp(module) is None
    assert not in_evaluation.dropout.training


@pytest.mark.parametrize("another", [{"activation": F.relu}, {"least": -20.0}], ids=["a function", "a list"])
def test_one_that_differs_in_what_is_no_number_is_tried_itself(another: dict[str, Any]) -> None:
    for parts in ((Gated(), Gated(**another)), (Gated(**another), Gated())):
        assert replacement.names(nn.ModuleList(parts)) == ("1 SwiGLU",)


def test_a_trial_draws_none_of_the_numbers_that_training_draws() -> None:
    class Dropped(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5)

    module, before = Dropped(), torch.get_rng_state()
    assert replacement.gated_mlp(module) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_llama_on_meta_in_bf16_is_recognised_and_of_a_gpt2_its_activations() -> None:
    assert replacement.names(tiny("causal-lm", "llama").bfloat16().to("meta")) == ("2 RoPE", "2 SwiGLU", "5 RMSNorm")
    assert replacement.names(tiny("causal-lm", "gpt2")) == ("2 GELU",)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"])
def test_an_activation_of_many_operators_is_torchs_one(name: str) -> None:
    own: Any = ACT2FN[name]
    assert replacement.tanh_gelu(own) is replacement.TANH_GELU
    assert replacement.names(nn.Sequential(own)) == ("1 GELU",)


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "gelu_10", "quick_gelu", "mish", "relu2", "silu"])
def test_another_activation_or_one_kernel_already_is_left(name: str) -> None:
    assert replacement.tanh_gelu(ACT2FN[name]) is None


def test_a_plan_with_them_on_a_machine_without_them_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fused_kernels", lambda: "")
    liger_internals.library.cache_clear()
    with pytest.raises(RequestError) as caught:
        replacement.apply(tiny("causal-lm", "llama"))
    assert str(caught.value) == (
        "the plan's kernels are Liger's, which cannot run here\n"
        "  because the packages liger-kernel and triton are not installed\n\n"
        "hint: pip install 'frugal-trainer[kernels]', or plan with --kernels plain"
    )


def test_rotations_of_interleaved_pairs_are_left_as_they_are() -> None:
    assert replacement.rotation(tiny("causal-lm", "llama").model.layers[0].self_attn) == "apply_rotary_pos_emb"  # type: ignore[union-attr, index]  # transformers'
    from transformers.models.cohere.modeling_cohere import CohereAttention, CohereConfig

    config = CohereConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=2)
    assert replacement.rotation(CohereAttention(config, 0)) is None
